"""The strategy's overhead in Python: a Trainer with one process, plain Lightning compared with a ZeRO strategy.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 1 --steps 3 --model tiny

With one rank there is no communication, so the difference from plain Lightning is our own code.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from common import (
    GPTS,
    REPOSITORY,
    describe,
    in_turn,
    markdown_table,
    median_of_rounds,
    run_workers,
    spread,
    write_results,
)
from peers import WARM_UP, WORKER_TIMEOUT


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default="auto,zero1,zero2,zero3", help="the first is the baseline")
    parser.add_argument("--rounds", type=int, default=5, help="how often each strategy is run and timed")
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round, after the warm-up")
    parser.add_argument("--model", default="25m", choices=GPTS)
    parser.add_argument("--batch", type=int, default=2, help="sequences per step")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> None:
    """Run one fit under one strategy; write losses and seconds per step to the parent's file."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from torch.utils.data import DataLoader, TensorDataset

    import lightning_zero  # noqa: F401  - registers the strategies
    from lightning_zero.zoo.gpt import LanguageModel

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # of a process group there is none: this is what a user's single process sees
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)

    class Clock(Callback):
        """Times each step from the end of the previous step to its own end, so everything in between counts."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(outputs["loss"].item())
            self.ends.append(time.perf_counter())

    steps = WARM_UP + arguments.steps
    text = torch.randint(256, (steps * arguments.batch, arguments.sequence + 1))
    loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), arguments.batch)
    clock = Clock()
    trainer = Trainer(
        strategy=arguments.strategies,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # which shuffles: every strategy should see the same data
    )
    trainer.fit(LanguageModel(**GPTS[arguments.model], context=arguments.sequence, tied=False), loader)
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)][WARM_UP - 1 :]
    arguments.worker.write_text(json.dumps({"seconds": seconds, "losses": clock.losses}))


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return

    strategies = arguments.strategies.split(",")
    seconds: dict[str, list[list[float]]] = {strategy: [] for strategy in strategies}
    losses: dict[str, list[float]] = {}
    for _, turn in in_turn(strategies, arguments.rounds):
        for strategy in turn:
            options = ["--strategies", strategy, "--steps", str(arguments.steps), "--model", arguments.model]
            options += ["--batch", str(arguments.batch), "--sequence", str(arguments.sequence)]
            (rank,) = run_workers(__file__, options, 1, {}, WORKER_TIMEOUT)
            seconds[strategy].append(rank["seconds"])
            losses[strategy] = rank["losses"]

    medians = {strategy: median_of_rounds(seconds[strategy]) for strategy in strategies}
    rows = [
        [
            strategy,
            f"{medians[strategy]:.4f}",
            spread(seconds[strategy]),
            f"{medians[strategy] / medians[strategies[0]]:.3f}",
            f"{losses[strategy][-1]:.7f}",
        ]
        for strategy in strategies
    ]
    lines = [
        f"Trainer with one process and one thread, model `{arguments.model}`, fp32, AdamW, {arguments.batch} x "
        f"{arguments.sequence} tokens a step. Medians of {arguments.rounds} rounds of {arguments.steps} steps; "
        "`rounds` is the lowest and the highest median of one round.",
        "",
        *markdown_table(["strategy", "s a step", "rounds", f"x {strategies[0]}", "last loss"], rows),
    ]
    result = {
        "about": describe(__file__, ("torch", "lightning")),
        "median_seconds": medians,
        "seconds": seconds,
        "losses": losses,
    }
    write_results(arguments.output, "overhead", result, lines)


if __name__ == "__main__":
    main()
