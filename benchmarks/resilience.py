"""Overhead per step of keeping the state in memory, and the time until a job continues after a kill.

    python benchmarks/resilience.py
    python benchmarks/resilience.py --batch 4 --systems ""      # the overhead alone
    python benchmarks/resilience.py --model tiny --pairs 8 --rounds 1 --systems memory --output FOLDER

The overhead is measured within one run that keeps the state of every fourth step: the step during which a state is
copied, and the next one, which waits until the state is written, take longer than the two steps before and after them.
In the other measurement rank 1 of two is killed (SIGKILL) within a step. The other systems' jobs resume from
checkpoints that they write at regular intervals, as the training scripts in their documentation do.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, run_workers, write_results

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
SYSTEMS = {
    "memory": "zero3, memory",
    "checkpoint": "zero3, checkpoints",
    "ddp": "DDP, checkpoints",
    "deepspeed3": "DeepSpeed stage 3, checkpoints",
}
WORKER_TIMEOUT = 1800.0  # seconds
BATCH = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="25m", choices=GPTS)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per step and rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--pairs", type=int, default=100, help="timed pairs of steps with a save, and as many without")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems that are killed; by default all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is killed")
    parser.add_argument("--kill-at", type=int, default=27, help="step in which rank 1 is killed")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between kept states or checkpoints")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    parser.add_argument("--job", help=argparse.SUPPRESS)  # likewise, a job that is killed
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # where the job writes
    return parser.parse_args()


def learner_of(arguments: argparse.Namespace) -> Any:
    from lightning_zero.zoo.gpt import LanguageModel

    return LanguageModel(**GPTS[arguments.model], context=arguments.sequence, warmup_steps=1)


def loader_of(arguments: argparse.Namespace, steps: int) -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    text = torch.randint(256, (2 * steps * arguments.batch, arguments.sequence + 1))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), arguments.batch)


# -- overhead ----------------------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> None:
    """Run one rank that keeps the state of every fourth step; write the seconds that steps take."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_zero import ResilienceConfig, ZeroStrategy

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    config = ResilienceConfig(every_n_steps=1, job=f"benchmark-{os.environ['MASTER_PORT']}")

    class Clock(Callback):
        """Times steps from end to end, so that a step's time includes the copy of the state before it."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            interval = 1 if len(self.ends) % 4 == 0 else NEVER
            self.ends.append(time.perf_counter())
            trainer.strategy._restarts._every = interval

    steps = WARM_UP + 4 * arguments.pairs + 2
    clock = Clock()
    strategy = ZeroStrategy(stage=3, resilience=config)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(strategy=strategy, callbacks=[clock], max_steps=steps, default_root_dir=folder, **QUIET)
        trainer.fit(learner_of(arguments), loader_of(arguments, steps))
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    arguments.worker.write_text(json.dumps(seconds[WARM_UP:]))


WARM_UP, NEVER = 8, 10**9  # steps; a multiple of 4, so that the first timed step has a copy
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": True,
}


def overhead(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of two steps with and without a save on rank 0, in turn."""
    given = ["--model", arguments.model, "--batch", str(arguments.batch), "--sequence", str(arguments.sequence)]
    given += ["--pairs", str(arguments.pairs)]
    seconds, _ = run_workers(__file__, given, 2, {}, WORKER_TIMEOUT)
    of_two = [first + second for first, second in zip(seconds[0::2], seconds[1::2], strict=False)]
    return {"with": of_two[0::2], "without": of_two[1::2]}


def overhead_table(seconds: dict[str, list[float]]) -> list[str]:
    """The time that a save adds: mean and standard error of the differences from neighbouring pairs of steps."""
    without = seconds["without"]
    step = statistics.mean(without) / 2
    around = [(before + after) / 2 for before, after in zip(without, without[1:], strict=False)]
    added = [copy - rest for copy, rest in zip(seconds["with"][1:], around, strict=False)]
    mean, error = statistics.mean(added), statistics.stdev(added) / len(added) ** 0.5
    rows = [["nothing", f"{step:.4f}", "", ""]]
    for name, interval in (("every step", 1), ("every 20th (the default)", 20)):
        of_step = mean / interval
        ratio = f"{of_step / step:+.1%} +- {error / interval / step:.1%}"
        rows.append([name, f"{step + of_step:.4f}", f"{1e3 * of_step:.1f} +- {1e3 * error / interval:.1f}", ratio])
    return markdown_table(["kept", "seconds a step", "ms added to a step", "added"], rows)


# -- recovery ----------------------------------------------------------------------------------------------------------


def note(folder: Path, what: str, step: int) -> None:
    with (folder / f"notes-{os.environ['RANK']}").open("a") as file:
        file.write(json.dumps([time.time(), what, step]) + "\n")


def die_once(folder: Path, step: int, at: int) -> None:
    """Kill rank 1 in the given step, unless it was killed before."""
    if os.environ["RANK"] == "1" and step == at and not (folder / "killed").exists():
        (folder / "killed").touch()
        note(folder, "killed", step)
        os.kill(os.getpid(), signal.SIGKILL)


def job(arguments: argparse.Namespace) -> None:
    """Run one rank of the job that is killed."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    (job_of_deepspeed if arguments.job == "deepspeed3" else job_of_lightning)(arguments)


def job_of_lightning(arguments: argparse.Namespace) -> None:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_zero import ResilienceConfig, ZeroStrategy

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            note(arguments.folder, "begun", trainer.global_step)

        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            die_once(arguments.folder, trainer.global_step, arguments.kill_at)

    in_memory = arguments.job.startswith("memory")
    every = arguments.checkpoint_every
    memory = ResilienceConfig(every, job=f"benchmark-{arguments.folder.name}") if in_memory else None
    saver = ModelCheckpoint(arguments.folder, every_n_train_steps=every, save_last=True)
    strategy = "ddp" if arguments.job == "ddp" else ZeroStrategy(stage=3, resilience=memory)
    callbacks = [Notes()] if in_memory else [Notes(), saver]
    steps = arguments.kill_at + 3
    trainer = Trainer(
        strategy=strategy, callbacks=callbacks, max_steps=steps, enable_checkpointing=not in_memory, **QUIET
    )
    last = arguments.folder / "last.ckpt"
    trainer.fit(learner_of(arguments), loader_of(arguments, steps), ckpt_path=last if last.exists() else None)


def job_of_deepspeed(arguments: argparse.Namespace) -> None:
    import deepspeed
    import torch
    from systems import adamw, cross_entropy

    deepspeed.init_distributed("gloo")
    learner = learner_of(arguments)
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=learner.gpt, model_parameters=learner.gpt.parameters(), optimizer=adamw(learner.gpt), config=config
    )
    _, state = engine.load_checkpoint(str(arguments.folder))
    for step in range(state["step"] if state else 0, arguments.kill_at + 3):
        note(arguments.folder, "begun", step)
        text = torch.randint(256, (arguments.batch, arguments.sequence + 1))
        engine.backward(cross_entropy(engine(text[:, :-1]), text[:, 1:]))
        die_once(arguments.folder, step, arguments.kill_at)
        engine.step()
        if (step + 1) % arguments.checkpoint_every == 0:
            engine.save_checkpoint(str(arguments.folder), client_state={"step": step + 1})


def recovered(arguments: argparse.Namespace, system: str) -> dict[str, float]:
    """Run a job whose rank 1 is killed once: seconds until the next step begins, and until lost steps are redone."""
    folder = Path(tempfile.mkdtemp(prefix="resilience-"))
    given = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in GIVEN]
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"]
    command += [__file__, "--job", system, "--folder", str(folder), *given]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if not system.startswith(("memory", "checkpoint")):
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it the restart of DDP and DeepSpeed hangs
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            command, env=os.environ | settings, cwd=folder, stdout=log, stderr=log, timeout=WORKER_TIMEOUT
        )
    if done.returncode:
        raise RuntimeError(f"{system} ended with {done.returncode}:\n{(folder / 'log').read_text()[-3000:]}")
    notes = [json.loads(line) for rank in (0, 1) for line in (folder / f"notes-{rank}").read_text().splitlines()]
    ((killed, _, at),) = (each for each in notes if each[1] == "killed")
    later = sorted(each for each in notes if each[0] > killed + 1e-3 and each[1] == "begun")
    again = [each for each in later if each[2] <= at]
    caught_up = min(when for when, _, step in later if step == at)
    shutil.rmtree(folder)
    return {
        "restarted": min(when for when, *_ in again) - killed,
        "caught up": caught_up - killed,
        "steps again": at - min(step for *_, step in again),
    }


GIVEN = ("model", "batch", "sequence", "kill-at", "checkpoint-every")


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        return work(arguments)
    if arguments.job:
        return job(arguments)
    seconds = overhead(arguments)
    lines = overhead_table(seconds)

    systems = [name for name in arguments.systems.split(",") if name]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for _, names in in_turn(systems, arguments.rounds):
        for name in names:
            found[name].append(recovered(arguments, name))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    rows = []
    for name in systems:
        columns = {key: [each[key] for each in found[name]] for key in ("restarted", "caught up", "steps again")}
        spans = [f"{statistics.median(each):.1f} ({min(each):.1f} - {max(each):.1f})" for each in columns.values()]
        rows.append([SYSTEMS[name], *spans[:2], f"{statistics.median(columns['steps again']):.0f}"])
    head = ["system", "seconds to the next step", "seconds until no step is missing", "steps done again"]
    lines += ["", *markdown_table(head, rows)] if rows else []
    about = describe(__file__, ("torch", "lightning", "deepspeed"))
    name = "resilience" if systems else f"resilience_batch{arguments.batch}"
    write_results(arguments.output, name, {"about": about, "overhead": seconds, "recovery": found}, lines)


if __name__ == "__main__":
    main()
