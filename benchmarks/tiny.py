"""Tiny and small modules with many calls per step, in two CPU processes: DDP and the stages, with Lightning's Trainer.

    python benchmarks/tiny.py
    python benchmarks/tiny.py --models sac --strategies ddp,zero3 --rounds 3
    python benchmarks/tiny.py --output FOLDER                       # leave the stored figures as they are

A graph network, MoCo and SAC with a few thousand parameters each, in `tiny_models.py`; five ordinary projects whose
steps take tens of milliseconds, in `small_models.py`. All strategies train in the same
pair of processes, one fit each in turn, so that other load on the machine affects all equally. A step ends when the
slower rank has finished it. Every fit begins with the same weights and data, and ends with DDP's losses bit for bit.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from common import REPOSITORY, describe, in_turn, markdown_table, median_of_rounds, run_workers, spread, write_results

MODELS = ("gnn", "moco", "sac", "simclr", "tft", "ft_transformer", "nbeats", "schnet")
DDP = {"sac": "ddp_find_unused_parameters_true"}  # each of its losses leaves some parameters without a gradient
WARM_UP = 5
BATCH = 16
WORKER_TIMEOUT = 1200.0  # seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated models")
    parser.add_argument("--strategies", default="ddp,zero1,zero2,zero3", help="the first is the baseline")
    parser.add_argument("--rounds", type=int, default=10, help="how often each strategy is run and timed")
    parser.add_argument("--steps", type=int, default=40, help=f"timed steps per round, after {WARM_UP} warm-up steps")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    unknown = set(arguments.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"--models: there is no {', '.join(sorted(unknown))}, but {', '.join(MODELS)}")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """Run one rank of every fit; write losses and seconds per step by strategy and round for the parent."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from small_models import MODELS as SMALL
    from tiny_models import MODELS as TINY
    from torch.utils.data import DataLoader

    import lightning_zero  # noqa: F401  - registers the strategies

    torch.set_num_threads(1)

    class Clock(Callback):
        """Times each step from the end of the previous step to its own end, so everything in between counts."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.cpu: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())
            self.cpu.append(time.process_time())
            self.ends.append(time.perf_counter())

    def fit(strategy: str) -> Clock:
        steps = WARM_UP + arguments.steps
        torch.manual_seed(0)
        module = (TINY | SMALL)[arguments.models]()
        clock = Clock()
        trainer = Trainer(
            strategy=DDP.get(arguments.models, strategy) if strategy == "ddp" else strategy,
            accelerator="cpu",
            devices=2,
            max_steps=steps * len(module.configure_optimizers()) if not module.automatic_optimization else steps,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # each rank makes data of its own
        )
        torch.manual_seed(1 + trainer.global_rank)
        trainer.fit(module, DataLoader(module.dataset(steps * BATCH), BATCH))
        return clock

    strategies = arguments.strategies.split(",")
    seconds: dict[str, list[list[float]]] = {strategy: [] for strategy in strategies}
    losses: dict[str, list[list[float]]] = {strategy: [] for strategy in strategies}
    cpu: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for _, turn in in_turn(strategies, arguments.rounds):
        for strategy in turn:
            clock = fit(strategy)
            seconds[strategy].append([end - start for start, end in zip(clock.ends, clock.ends[1:])][WARM_UP - 1 :])
            losses[strategy].append(clock.losses)
            cpu[strategy].append((clock.cpu[-1] - clock.cpu[WARM_UP - 1]) / arguments.steps)
    arguments.worker.write_text(json.dumps({"seconds": seconds, "losses": losses, "cpu": cpu}))


def measure(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all fits of one model: seconds per step by strategy and round, and whether losses equal the first's."""
    options = ["--models", model, "--strategies", arguments.strategies]
    options += ["--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
    ranks = run_workers(__file__, options, 2, {}, WORKER_TIMEOUT)
    first, *others = arguments.strategies.split(",")
    seconds = {
        strategy: [
            [max(step) for step in zip(*steps_of_ranks)]
            for steps_of_ranks in zip(*(rank["seconds"][strategy] for rank in ranks))
        ]
        for strategy in (first, *others)
    }
    medians = {strategy: median_of_rounds(rounds) for strategy, rounds in seconds.items()}
    # A pair are the two fits of one round, one soon after the other.
    ratios = {
        strategy: [
            statistics.median(ours) / statistics.median(measure) for ours, measure in zip(rounds, seconds[first])
        ]
        for strategy, rounds in seconds.items()
    }
    cpu = {
        strategy: [statistics.fmean(pair) for pair in zip(*(rank["cpu"][strategy] for rank in ranks))]
        for strategy in seconds
    }
    return {
        "median_seconds": medians,
        "ratios": {strategy: statistics.median(found) for strategy, found in ratios.items()},
        "cpu_seconds": {strategy: statistics.median(found) for strategy, found in cpu.items()},
        "cpu_ratios": {
            strategy: statistics.median(ours / measure for ours, measure in zip(found, cpu[first]))
            for strategy, found in cpu.items()
        },
        "ratios_of_rounds": ratios,
        "cpu": cpu,
        "seconds": seconds,
        "are_losses_equal": all(
            losses == rank["losses"][first][0]
            for rank in ranks
            for rounds in rank["losses"].values()
            for losses in rounds
        ),
    }


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return

    strategies = arguments.strategies.split(",")
    models = {model: measure(model, arguments) for model in arguments.models.split(",")}
    rows = [
        [
            model,
            strategy,
            f"{found['median_seconds'][strategy] * 1e3:.2f}",
            spread([[value * 1e3 for value in values] for values in found["seconds"][strategy]], digits=2),
            f"{found['ratios'][strategy]:.2f}",
            f"{found['cpu_seconds'][strategy] * 1e3:.2f}",
            f"{found['cpu_ratios'][strategy]:.2f}",
            "yes" if found["are_losses_equal"] else "no",
        ]
        for model, found in models.items()
        for strategy in strategies
    ]
    times = f"x {strategies[0]}"
    lines = [
        f"Trainer with two processes of one thread, Gloo, fp32, {BATCH} samples a rank. {arguments.rounds} rounds of "
        f"{arguments.steps} steps, the strategies in turn in one pair of processes. `ms a step` is the median over "
        "all steps, `rounds` the lowest and the highest median of one round, `CPU ms` the CPU time of a step on one "
        f"rank (the median over rounds). `x {strategies[0]}` is the median over rounds of the ratio in one round.",
        "",
        *markdown_table(["model", "strategy", "ms a step", "rounds", times, "CPU ms", times, "losses equal"], rows),
    ]
    write_results(
        arguments.output, "tiny", {"about": describe(__file__, ("torch", "lightning")), "models": models}, lines
    )


if __name__ == "__main__":
    main()
