"""Overhead per step of keeping the state in memory, and the time until a job continues after a kill.

    python benchmarks/resilience.py
    python benchmarks/resilience.py --batch 4 --systems ""      # the overhead alone
    python benchmarks/resilience.py --model tiny --blocks 2 --rounds 1 --systems memory,memory_launch --output FOLDER

The overhead is measured within one run, in alternating blocks of steps that keep the state never, every step or every
fifth step. In the other measurement rank 1 of two is killed (SIGKILL) in the middle of a step. The other systems' jobs
resume from checkpoints that they write at regular intervals, as the training scripts in their documentation do.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, run_workers, spread, write_results

INTERVALS = {"nothing": 10**9, "every step": 1, "every fifth": 5}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
LAUNCH = ["-m", "lightning_zero", "launch"]
SYSTEMS: dict[str, tuple[str, list[str]]] = {
    "memory_launch": ("zero3, memory, lightning-zero launch", LAUNCH),
    "memory": ("zero3, memory, torchrun", TORCHRUN),
    "checkpoint": ("zero3, checkpoints, torchrun", TORCHRUN),
    "ddp": ("DDP, checkpoints, torchrun", TORCHRUN),
    "deepspeed3": ("DeepSpeed stage 3, checkpoints, torchrun", TORCHRUN),
}
WORKER_TIMEOUT = 1800.0  # seconds
BATCH = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="25m", choices=GPTS)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per step and rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of ten timed steps, for each interval")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems that are killed; by default all")
    parser.add_argument("--rounds", type=int, default=3, help="how often each system is killed")
    parser.add_argument("--kill-at", type=int, default=27, help="step in which rank 1 is killed")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between the other systems' checkpoints")
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
    """Run one rank that keeps its state at changing intervals; write seconds per step, by block."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything

    from lightning_zero import ResilienceConfig, ZeroStrategy

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    order = [name for _, names in in_turn(list(INTERVALS), arguments.blocks) for name in names]
    config = ResilienceConfig(job=f"benchmark-{os.environ['MASTER_PORT']}")

    class Clock(Callback):
        """Times steps from start to start, without a block's first one, which includes work from the block before."""

        def __init__(self) -> None:
            self.begun: list[float] = []
            self.blocks: list[tuple[str, list[float]]] = []

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.begun.append(time.perf_counter())
            step = len(self.begun) - 1 - WARM_UP
            if step >= 0 and step % (TIMED + 1) == 0:
                if step:
                    times = self.begun[-TIMED - 1 :]
                    name = order[step // (TIMED + 1) - 1]
                    self.blocks.append((name, [end - begin for begin, end in zip(times, times[1:], strict=False)]))
                if step // (TIMED + 1) < len(order):
                    name = order[step // (TIMED + 1)]
                    trainer.strategy._resilience._config = replace(config, every_n_steps=INTERVALS[name])

    steps = WARM_UP + len(order) * (TIMED + 1) + 1
    clock = Clock()
    trainer = Trainer(strategy=ZeroStrategy(stage=3, resilience=config), callbacks=[clock], max_steps=steps, **QUIET)
    trainer.fit(learner_of(arguments), loader_of(arguments, steps))
    arguments.worker.write_text(json.dumps(clock.blocks))


WARM_UP, TIMED = 5, 10  # steps; those that are timed make a block
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": True,
}


def overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step on rank 0, by interval, in blocks."""
    given = ["--model", arguments.model, "--batch", str(arguments.batch), "--sequence", str(arguments.sequence)]
    given += ["--blocks", str(arguments.blocks)]
    blocks, _ = run_workers(__file__, given, 2, {}, WORKER_TIMEOUT)
    return {name: [times for its, times in blocks if its == name] for name in INTERVALS}


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
    memory = ResilienceConfig(job=f"benchmark-{arguments.folder.name}") if in_memory else None
    saver = ModelCheckpoint(arguments.folder, every_n_train_steps=arguments.checkpoint_every, save_last=True)
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
    command = [sys.executable, *SYSTEMS[system][1], "--nproc-per-node", "2", "--max-restarts", "2"]
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
    blocks = overhead(arguments)
    base = statistics.median(statistics.mean(times) for times in blocks["nothing"])
    rows = []
    for name, times in blocks.items():
        means = [statistics.mean(each) for each in times]
        ratio = statistics.median(means) / base
        rows.append([name, f"{statistics.median(means):.4f}", spread([[each] for each in means]), f"{ratio:.3f}"])
    lines = markdown_table(["kept", "seconds a step", "lowest - highest block", "x nothing"], rows)

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
        rows.append([SYSTEMS[name][0], *spans[:2], f"{statistics.median(columns['steps again']):.0f}"])
    head = ["system", "seconds to the next step", "seconds until no step is missing", "steps done again"]
    lines += ["", *markdown_table(head, rows)] if rows else []
    about = describe(__file__, ("torch", "lightning", "deepspeed"))
    name = "resilience" if systems else f"resilience_batch{arguments.batch}"
    write_results(arguments.output, name, {"about": about, "overhead": blocks, "recovery": found}, lines)


if __name__ == "__main__":
    main()
