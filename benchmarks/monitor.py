"""ZeroMonitor's cost: Trainers with two CPU processes, in which the monitor is switched on and off during training.

    python benchmarks/monitor.py
    python benchmarks/monitor.py --strategies zero3 --model tiny --every 5 --pairs 2 --output FOLDER

Parts of a fit with the monitor alternate with parts without it, so that other load on the machine affects both. Each
part with the monitor ends with an observation, which goes to a CSVLogger.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, markdown_table, run_workers, write_results
from ratios import busy_seconds, own_seconds

WARM_UP = 5
WORKER_TIMEOUT = 3600.0  # seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategies", default="ddp,zero1,zero2,zero3")
    parser.add_argument("--model", default="25m", choices=GPTS)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--sequence", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--every", type=int, default=50, help="the monitor's every_n_steps, and steps in a part")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of parts, one with the monitor and one without")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    return parser.parse_args()


def work(arguments: argparse.Namespace) -> None:
    """Run one rank; write seconds and CPU seconds per step of each part, and those of the monitor's own hooks."""
    import torch
    from lightning.pytorch import Callback, Trainer, seed_everything
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_zero.monitoring import ZeroMonitor
    from lightning_zero.zoo.gpt import LanguageModel

    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    length = arguments.every + 1  # the first step of a part is not observed

    class Switched(Callback):
        """Times parts of the fit; the monitor is on in every other part."""

        def __init__(self) -> None:
            self.monitor = ZeroMonitor(arguments.every)
            self.seconds: list[float] = []
            self.cpu: list[float] = []
            self.hooks: list[float] = []
            self.step = -WARM_UP
            self.began = (0.0, 0.0)
            self.spent = 0.0

        def on_fit_start(self, *given: Any) -> None:
            self.monitor.on_fit_start(*given)

        def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
            number, place = divmod(self.step, length)
            if self.step >= 0 and place == 0:
                self.end_of_part()
            is_on = number % 2 == 0
            if is_on or self.step < 0:
                began = time.thread_time()
                self.monitor.on_train_batch_end(trainer, *given)
                self.spent += time.thread_time() - began
            if place == length - 1:
                self.monitor.on_validation_start(trainer, given[0])  # it measures nothing until its next step
            self.step += 1

        def end_of_part(self) -> None:
            now = time.perf_counter(), time.process_time()
            if self.step:
                self.seconds.append((now[0] - self.began[0]) / length)
                self.cpu.append((now[1] - self.began[1]) / length)
                self.hooks.append(self.spent / length)
            self.began, self.spent = now, 0.0

    steps = WARM_UP + 2 * arguments.pairs * length + 1
    text = torch.randint(256, (2 * steps * arguments.batch, arguments.sequence + 1))
    switched = Switched()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=arguments.strategies,
            accelerator="cpu",
            devices=2,
            max_steps=steps,
            callbacks=[switched],
            logger=CSVLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), arguments.batch)
        trainer.fit(LanguageModel(**GPTS[arguments.model], context=arguments.sequence, tied=False), data)
    result = {"seconds": switched.seconds, "cpu": switched.cpu, "hooks": switched.hooks}
    arguments.worker.write_text(json.dumps(result))


def measure(strategy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    options = ["--strategies", strategy, "--model", arguments.model, "--batch", str(arguments.batch)]
    options += ["--sequence", str(arguments.sequence), "--every", str(arguments.every), "--pairs", str(arguments.pairs)]
    began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    ranks = run_workers(__file__, options, 2, {}, WORKER_TIMEOUT)
    others = (busy_seconds() - busy) - (own_seconds() - own)
    found: dict[str, Any] = {"others": max(0.0, others / (time.monotonic() - began) / (os.cpu_count() or 1))}
    for kind in ("seconds", "cpu"):
        # A part ends on both ranks together; the CPU time is that of both.
        parts = [(max if kind == "seconds" else sum)(part) for part in zip(*(rank[kind] for rank in ranks))]
        on, off = parts[::2], parts[1::2]
        found[kind] = {"on": on, "off": off, "ratio": statistics.median(a / b for a, b in zip(on, off))}
    found["hooks_seconds"] = [seconds for rank in ranks for seconds in rank["hooks"][::2]]
    found["hooks"] = statistics.median(found["hooks_seconds"])
    return found


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return
    found = {strategy: measure(strategy, arguments) for strategy in arguments.strategies.split(",")}
    rows = [
        [
            strategy,
            f"{1000 * statistics.median(each['seconds']['off']):.2f}",
            f"{each['seconds']['ratio']:.4f}",
            f"{each['cpu']['ratio']:.4f}",
            f"{1e6 * each['hooks']:.1f}",
            f"{each['hooks'] / statistics.median(each['seconds']['off']):.3%}",
            f"{each['others']:.0%}",
        ]
        for strategy, each in found.items()
    ]
    head = [
        "strategy",
        "ms a step without",
        "x with",
        "x CPU time",
        "hooks, CPU microseconds a step",
        "of a step",
        "others",
    ]
    lines = [
        f"Two processes of one thread, model `{arguments.model}`, fp32, AdamW, {arguments.batch} x "
        f"{arguments.sequence} tokens a rank and step, `ZeroMonitor(every_n_steps={arguments.every})` with a "
        f"CSVLogger. {arguments.pairs} pairs of parts with and without the monitor; medians over pairs.",
        "",
        *markdown_table(head, rows),
    ]
    result = {"about": describe(__file__, ("torch", "lightning")), "strategies": found}
    write_results(arguments.output, "monitor", result, lines)


if __name__ == "__main__":
    main()
