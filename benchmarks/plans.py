"""Predicted and measured times: those from `lightning-zero plan`, and whether its choice is the fastest.

    python benchmarks/plans.py                                      # GPT of 25 M parameters, 16 configurations
    python benchmarks/plans.py --model tiny --rounds 1 --steps 3    # a quick check, in a minute
    python benchmarks/plans.py --device cuda --model 1.3b --precision bf16-mixed --choices zero1 zero3

Every configuration trains by the Trainer once per round, in fresh processes. Before each round the machine is measured
as by `lightning-zero doctor`; plans use the median of these measurements. On GPUs there is one process, on a CPU two.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, run_workers, write_results

WARM_UP = 2
WORKER_TIMEOUT = 1800.0  # seconds

# stage (0 is DDP), offload, whether units compute their activations again
CHOICES = [
    (0, "none", False),
    (1, "none", False),
    (2, "none", False),
    (3, "none", False),
    (2, "cpu", False),
    (3, "cpu", False),
    (2, "none", True),
    (3, "none", True),
]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--model", default="25m", choices=list(GPTS))
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--precision", default="32-true", help="the Trainer's")
    names = [name_of(*choice) for choice in CHOICES]
    made.add_argument("--choices", nargs="+", default=names, choices=names)
    made.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="sequences per rank and step")
    made.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    made.add_argument("--rounds", type=int, default=3, help="how often each configuration is run and timed")
    made.add_argument("--steps", type=int, default=6, help="timed steps per round, after the warm-up")
    made.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    made.add_argument("--do", help=argparse.SUPPRESS)
    return made


def train(arguments: argparse.Namespace, batch: int, stage: int, offload: str, recompute: bool) -> list[float]:
    """Seconds of each step in a fit, from the start of one batch to the start of the next."""
    import time

    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader

    from lightning_zero import ZeroStrategy

    class Clock(Callback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            self.at.append(time.perf_counter())

    if arguments.device == "cpu":
        torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    steps = WARM_UP + arguments.steps
    options: dict[str, Any] = {"offload": None if offload == "none" else offload}
    if recompute:
        options["activation_checkpointing"] = "units"
    clock = Clock()
    trainer = Trainer(
        strategy=ZeroStrategy(stage=stage, **options) if stage else "ddp",
        accelerator=arguments.device,
        devices=ranks_of(arguments),
        precision=arguments.precision,
        max_steps=steps + 1,
        callbacks=[clock],
        barebones=True,
    )
    data = [sample_of(arguments, batch) for _ in range(ranks_of(arguments) * (steps + 1))]
    with torch.device(arguments.device):  # a GPU initialises large models in seconds
        module = module_of(arguments)
    trainer.fit(module, DataLoader(data, batch_size=None))
    return [after - before for before, after in itertools.pairwise(clock.at)][WARM_UP:]


def ranks_of(arguments: argparse.Namespace) -> int:
    return 1 if arguments.device == "cuda" else 2


def module_of(arguments: argparse.Namespace) -> Any:
    from lightning_zero.zoo.gpt import LanguageModel

    return LanguageModel(**GPTS[arguments.model], context=arguments.sequence)


def sample_of(arguments: argparse.Namespace, batch: int) -> Any:
    import torch

    text = torch.randint(256, (batch, arguments.sequence + 1))
    return text[:, :-1], text[:, 1:]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from dataclasses import asdict

    import torch
    import torch.distributed as dist

    from lightning_zero.planning.measure import measure_rank

    ranks = ranks_of(arguments)
    if ranks > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    resources, about = measure_rank(torch.device(arguments.device), ranks)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return {"resources": asdict(resources), **about}


def plan(arguments: argparse.Namespace, measured: dict[str, Any]) -> list[dict[str, Any]]:
    from functools import partial

    from lightning_zero.planning.advice import CHECKPOINTING, OFFLOADS, as_json, make_plans
    from lightning_zero.planning.timeline import Resources

    return [
        as_json(made)
        for batch, (stage, offload, recompute) in configurations_of(arguments)
        for made in make_plans(
            partial(module_of, arguments),
            sample_of(arguments, batch),
            ranks=ranks_of(arguments),
            stages=[stage],
            variants=[{**OFFLOADS[offload], **CHECKPOINTING["on" if recompute else "off"]}],
            resources=Resources(**measured["resources"]),
            transport=measured.get("transport", "nccl"),
            precision=arguments.precision,
        )
    ]


def work(arguments: argparse.Namespace) -> None:
    what, *given = json.loads(arguments.do)
    act = {"train": train, "plan": plan, "measure": measure}[what]
    arguments.worker.write_text(json.dumps(act(arguments, *given)))


def main(given: list[str]) -> int:
    arguments = parser().parse_args(given)
    if arguments.worker:
        work(arguments)
        return 0
    options = ["--model", arguments.model, "--sequence", str(arguments.sequence), "--steps", str(arguments.steps)]
    options += ["--batch", *map(str, arguments.batch), "--choices", *arguments.choices]
    options += ["--device", arguments.device, "--precision", arguments.precision]
    ranks = ranks_of(arguments)

    def do(processes: int, *what: Any) -> list[Any]:
        return run_workers(__file__, [*options, "--do", json.dumps(what)], processes, {}, WORKER_TIMEOUT)

    configurations = configurations_of(arguments)
    seconds: dict[Any, list[float]] = {each: [] for each in configurations}
    machines = []
    for _, order in in_turn(configurations, arguments.rounds):
        machines.append(do(ranks, "measure")[0])
        for batch, choice in order:
            found = do(ranks, "train", batch, *choice)
            seconds[batch, choice] += [max(step) for step in zip(*found)]
    speeds = {
        name: value and statistics.median(machine["resources"][name] for machine in machines)
        for name, value in machines[0]["resources"].items()
    }
    plans = do(1, "plan", {**machines[0], "resources": speeds})[0]
    rows = []
    for (batch, choice), planned in zip(configurations, plans):
        measured = statistics.median(seconds[batch, choice])
        rows.append(
            {
                "batch": batch,
                "name": name_of(*choice),
                "seconds": seconds[batch, choice],
                "measured": measured,
                "predicted": planned["seconds_per_step"],
                "total_bytes": planned["peak_bytes"]["total"],
                "samples_per_second": ranks * batch / measured,
                "predicted_samples_per_second": planned["samples_per_second"],
            }
        )
    chosen = max(rows, key=lambda row: row["predicted_samples_per_second"])
    best = max(rows, key=lambda row: row["samples_per_second"])
    result = {
        "about": describe(__file__, ("torch", "lightning")),
        "speeds": speeds,
        "configurations": rows,
        "chosen": f"{chosen['name']}, batch {chosen['batch']}",
        "quickest": f"{best['name']}, batch {best['batch']}",
        "of_the_quickest": chosen["samples_per_second"] / best["samples_per_second"],
    }
    lines = [
        f"Model `{arguments.model}`, {'2 processes of one thread' if ranks == 2 else 'one GPU'}, "
        f"{arguments.precision}, AdamW, {arguments.sequence} tokens a sequence; {arguments.rounds} rounds of "
        f"{arguments.steps} steps by the Trainer.",
        "",
        *markdown_table(
            ["configuration", "sequences", "measured s", "predicted s", "predicted / measured", "peak MB"],
            [
                [
                    row["name"],
                    str(row["batch"]),
                    f"{row['measured']:.3f}",
                    f"{row['predicted']:.3f}",
                    f"{row['predicted'] / row['measured']:.2f}",
                    f"{row['total_bytes'] / 1e6:.0f}",
                ]
                for row in rows
            ],
        ),
        "",
        f"Chosen: {result['chosen']}; quickest: {result['quickest']}. The choice has "
        f"{result['of_the_quickest']:.1%} of the quickest one's samples a second.",
    ]
    name = f"plans_{arguments.model}{'_cuda' if arguments.device == 'cuda' else ''}"
    write_results(arguments.output, name, result, lines)
    return 0


def configurations_of(arguments: argparse.Namespace) -> list[tuple[int, tuple[int, str, bool]]]:
    """Each batch size with each chosen configuration."""
    chosen = [choice for choice in CHOICES if name_of(*choice) in arguments.choices]
    return list(itertools.product(arguments.batch, chosen))


def name_of(stage: int, offload: str, recompute: bool) -> str:
    name = f"zero{stage}" + ("_offload" if offload == "cpu" else "") if stage else "ddp"
    return name + ("+recomputing" if recompute else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
