"""`lightning-zero parity`: check that a project trains identically under ZeRO and DDP, or find the first difference."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from lightning_zero.commands.projects import project_of, project_parser, split_arguments, strategy_options
from lightning_zero.commands.showing import positive, print_json
from lightning_zero.io.text import listed


def main(arguments: list[str]) -> int:
    own, of_script = split_arguments(arguments)
    parsed = parser().parse_intermixed_args(own)
    if not parsed.project:
        parser().error("specify what to train: package.module:Module, train.py or model=gpt_tiny")
    sys.path.insert(0, "")
    try:
        from lightning_zero.planning.parity import probe

        options = {name: values[-1] for name, values in strategy_options(parsed.option, _SET_BY_PARITY).items()}
        project = project_of(parsed, of_script)
        settings = {name: value for name, value in project.settings.items() if name not in ("ranks", "machines")}
        settings |= {"precision": parsed.precision} if parsed.precision is not None else {}
        found = probe(project, ranks=parsed.ranks, stages=parsed.stage, steps=parsed.steps, **settings, **options)
    except (ValueError, ImportError, OSError) as error:
        print(f"lightning-zero parity: {error}", file=sys.stderr)
        return 2
    if parsed.json:
        print_json([asdict(comparison) for comparison in found])
    else:
        for comparison in found:
            print(_said(comparison, parsed))
    return int(not all(comparison.is_equal for comparison in found))


_SET_BY_PARITY = {"stage": "write --stage {}", "start_method": "parity always forks its processes"}
"""Options of the strategy that --option cannot set, with the reason or what to write instead."""


def parser() -> argparse.ArgumentParser:
    made = project_parser(
        "parity",
        "Train the same few steps under DDP and under ZeRO in processes on the CPU. The exit code is 1 if a loss or a "
        "weight differs in any bit, or by more than 1e-6 if sums are taken in another order.",
        stages=[1, 2, 3],
    )
    made.add_argument("--ranks", type=positive, default=2, help="number of processes (default: 2)")
    made.add_argument("--steps", type=positive, default=3, help="number of optimizer steps (default: 3)")
    return made


def _said(comparison: Any, parsed: Any) -> str:
    if comparison.is_equal:
        how = f"within {comparison.tolerance:g} (sums in another order)" if comparison.tolerance else "bit for bit"
        return f"zero{comparison.stage}: the same as DDP, {how} (steps: {parsed.steps}, ranks: {parsed.ranks})."
    parts = []
    if comparison.loss is not None:
        theirs, ours = (", ".join(f"{loss:.9g}" for loss in losses) for losses in comparison.loss)
        parts.append(f"the ranks' losses are {ours} under ZeRO, but {theirs} under DDP")
    if comparison.weights:
        worst = sorted(comparison.weights, key=lambda name: -comparison.weights[name])
        differences = listed((f"{name} by up to {comparison.weights[name]:.3g}" for name in worst), 3)
        parts.append(f"weights differ after this micro-batch: {differences}")
    return f"zero{comparison.stage}: differs from DDP at micro-batch {comparison.step}: {'; '.join(parts)}."
