"""The engine's cost beyond arithmetic as the numbers of tensors, units and ranks grow.

    python benchmarks/growth.py
    python benchmarks/growth.py --tensors 10,100 --units 2,8 --ranks 2,64 --processes 2 --rounds 1 --steps 3
    python benchmarks/growth.py --memory                                   # model states as on 64 ranks

A step's cost is the training thread's CPU time, minus that of the same forward and backward in plain torch in one
process, and minus that of Adam's arithmetic. CPU time excludes other programs, and waiting where processes share cores.
Other programs can only make a step slower, so the minimum counts. The numbers of tensors, units and ranks are varied
separately, as rank 0 of torch's `fake` group, which communicates nothing; the time in the group's own calls is
subtracted. For comparison, real processes over Gloo are measured, and DistributedDataParallel in them.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, run_workers, write_results

SYSTEMS = ["zero1", "zero2", "zero3"]
COLORS = {"single": "grey", "ddp": "tab:red", "zero1": "tab:blue", "zero2": "tab:green", "zero3": "tab:orange"}
RANKS = 8  # of the fake group where tensors or units are varied
UNITS = 2  # where tensors are varied
SMALL = (80, 10)  # tensors and units, where ranks are varied
WIDTH = 48  # elements of a tensor: no multiple of 32, so that none lies against the next, the case that costs most
WIDE = 4096  # where ranks are varied: 8 of them are 32 elements for each of 1024 ranks, so that none is padding
LINEAR, CONSTANT = 1.15, 0.15  # exponents up to which growth counts as such: timings of single runs differ
MEMORY_RANKS = 64
MEMORY_LIMIT = 1.02  # of the formula
WARM_UP = 2  # steps: the first allocates, the second finds the order of reductions
WORKER_TIMEOUT = 900.0  # seconds


Rounds = dict[str, list[list[dict[str, Any]]]]  # by system: of each round, what each point took


class Point(NamedTuple):
    tensors: int
    units: int
    ranks: int
    width: int


class Series(NamedTuple):
    """Points in which one number grows; `processes`: the ranks are real processes over Gloo."""

    name: str
    points: list[Point]
    systems: list[str]
    processes: bool = False

    @property
    def sizes(self) -> list[int]:
        return [getattr(point, "ranks" if self.processes else self.name) for point in self.points]

    @property
    def limit(self) -> float:
        return LINEAR if self.name in ("tensors", "units") else CONSTANT


def parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return sorted({int(number) for number in text.split(",") if number})

    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--systems", default="zero1,zero3", help="comma-separated, from: " + " ".join(SYSTEMS))
    made.add_argument("--tensors", type=numbers, default=[10, 100, 1000, 10000], help="numbers of tensors")
    made.add_argument("--units", type=numbers, default=[2, 10, 50, 100, 500], help="numbers of units")
    made.add_argument("--ranks", type=numbers, default=[2, 8, 64, 1024], help="numbers of ranks in the fake group")
    made.add_argument("--processes", type=numbers, default=[2, 4, 8], help="numbers of real processes; '' for none")
    made.add_argument("--rounds", type=int, default=3, help="how often each system is run and timed")
    made.add_argument("--steps", type=int, default=5, help="timed steps per round, after the warm-up")
    made.add_argument("--memory", action="store_true", help="instead: model states as on 64 ranks, against the formula")
    made.add_argument("--model", default="25m", choices=GPTS, help="with --memory")
    made.add_argument("--device", default="cpu", help="with --memory: cpu, or cuda")
    made.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    made.add_argument("--points", type=json.loads, help=argparse.SUPPRESS)  # of a worker
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    return made


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a one-line message for a mistake, before anything is started."""
    unknown = set(arguments.systems.split(",")) - {*SYSTEMS, *(("single", "ddp") if arguments.worker else ())}
    if unknown:
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join(SYSTEMS)}")
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    for name, least in (("tensors", 2), ("units", 1), ("ranks", 2)):
        values = getattr(arguments, name)
        if len(values) < 2 or values[0] < least:
            parser.error(f"--{name} takes two numbers or more, of at least {least}")


def all_series(arguments: argparse.Namespace) -> list[Series]:
    systems = arguments.systems.split(",")
    tensors = 2 * max(arguments.units)
    chosen = [
        Series("tensors", [Point(number, UNITS, RANKS, WIDTH) for number in arguments.tensors], systems),
        Series("units", [Point(tensors, number, RANKS, WIDTH) for number in arguments.units], systems),
        Series("ranks", [Point(*SMALL, number, WIDE) for number in arguments.ranks], systems),
    ]
    if arguments.processes:
        points = [Point(*SMALL, number, WIDE) for number in arguments.processes]
        chosen.append(Series("processes", points, ["ddp", *systems], processes=True))
    return chosen


# -- in a worker ------------------------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> None:
    """Measure one system at the given points, or its memory, and write the results to the parent's file."""
    import torch
    import torch.distributed as dist
    from growth_systems import fake_ranks, measure

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.memory:
        arguments.worker.write_text(json.dumps(memory_of_stages(arguments)))
        return
    is_real = int(os.environ["WORLD_SIZE"]) > 1
    if is_real:
        dist.init_process_group("gloo")
    found = []
    for tensors, units, ranks, width in arguments.points:
        is_fake = not is_real and arguments.systems != "single"
        with fake_ranks(ranks) if is_fake else nullcontext():
            found.append(measure(arguments.systems, tensors, units, width, WARM_UP, arguments.steps))
    arguments.worker.write_text(json.dumps(found))
    if is_real:
        dist.barrier()  # a rank that leaves first must not take the store away from the others
        dist.destroy_process_group()


def memory_of_stages(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from growth_systems import fake_ranks, measure_memory

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (1, 2, 3):
            with fake_ranks(MEMORY_RANKS):
                found.append(measure_memory(arguments.model, stage, dtype, torch.device(arguments.device)))
    return found


# -- in the parent ----------------------------------------------------------------------------------------------------


def main(given: list[str]) -> int:
    arguments = parser().parse_args(given)
    check(parser(), arguments)
    if arguments.worker:
        work(arguments)
        return 0
    (compare_memory if arguments.memory else compare_growth)(arguments)
    return 0


def compare_growth(arguments: argparse.Namespace) -> None:
    chosen = all_series(arguments)
    rounds: dict[str, Rounds] = {
        series.name: {system: [] for system in ("single", *series.systems)} for series in chosen
    }
    for processes in (False, True):
        alike = [series for series in chosen if series.processes is processes]
        systems = ["single", *alike[0].systems] if alike else []
        for number, turn in in_turn(systems, arguments.rounds):
            for system in turn:
                found = iter(run(system, [point for series in alike for point in series.points], processes, arguments))
                for series in alike:
                    rounds[series.name][system].append([next(found) for _ in series.points])
                where = "over Gloo" if processes else "as one of many"
                print(f"{where}, round {number + 1} of {arguments.rounds}: {system}", flush=True)
    report(arguments, chosen, rounds)


def run(system: str, points: list[Point], processes: bool, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A system's seconds at each point for setting up and for each step, on the slowest rank."""
    options = ["--systems", system, "--steps", str(arguments.steps)]

    def worker(points: list[Point], ranks: int) -> list[Any]:
        return run_workers(__file__, [*options, "--points", json.dumps(points)], ranks, {}, WORKER_TIMEOUT)

    if not processes or system == "single":
        return worker(points, 1)[0]
    found = []
    for point in points:
        ranks = [result for (result,) in worker([point], point.ranks)]
        steps = [max(step) for step in zip(*(rank["seconds"] for rank in ranks))]
        found.append({"setup": max(rank["setup"] for rank in ranks), "seconds": steps})
    return found


def report(arguments: argparse.Namespace, chosen: list[Series], rounds: dict[str, Rounds]) -> None:
    results: dict[str, Any] = {}
    lines = introduction(arguments)
    for series in chosen:
        costs = costs_of(series, rounds[series.name])
        results[series.name] = {"sizes": series.sizes, "points": series.points, "costs": costs}
        results[series.name]["rounds"] = rounds[series.name]
        lines += ["", *lines_of(series, costs)]
    result = {"about": describe(__file__, ("torch", "lightning")), "series": results}
    write_results(arguments.output, "growth", result, lines)
    plot(arguments.output / "growth.png", results)


def costs_of(series: Series, rounds: Rounds) -> dict[str, Any]:
    """By system: milliseconds per step beyond plain torch and for setting up, at each point, and both exponents."""

    def least(system: str, key: str) -> list[float]:
        by_point = zip(*rounds[system])
        return [1e3 * min(value for found in point for value in listed(found[key])) for point in by_point]

    plain = least("single", "seconds")
    costs: dict[str, Any] = {"single": {"step": plain}}
    for system in series.systems:
        step = [whole - arithmetic for whole, arithmetic in zip(least(system, "seconds"), plain)]
        costs[system] = {"step": step, "setup": least(system, "setup")}
        costs[system] |= {f"{key}_exponents": exponents(series.sizes, costs[system][key]) for key in ("step", "setup")}
        at_the_end = costs[system]["step_exponents"][1]
        costs[system]["holds"] = at_the_end is not None and at_the_end <= series.limit
    return costs


def listed(value: float | list[float]) -> list[float]:
    return value if isinstance(value, list) else [value]


def exponents(sizes: Sequence[int], costs: Sequence[float]) -> tuple[float | None, float | None]:
    """The log-log slope of all points by least squares, and between the last two, where quadratic growth would show.

    None where a cost is lost in the noise of what it is taken off from.
    """
    if min(costs) <= 0:
        return None, None
    x = [math.log(size) for size in sizes]
    y = [math.log(cost) for cost in costs]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)
    return slope, (y[-1] - y[-2]) / (x[-1] - x[-2])


def introduction(arguments: argparse.Namespace) -> list[str]:
    return [
        "CPU time of the thread that trains, in ms: `plain` is forward and backward in plain torch on one process, the "
        "others what a step takes beyond that and beyond Adam's arithmetic; `set up` is making the engine, or wrapping "
        f"the module for DDP. The least of {arguments.rounds} rounds of {arguments.steps} steps. The exponents "
        "are slopes in log-log: of all points, and between the last two. Except for `processes`, which are real ones "
        "over Gloo, this is rank 0 of torch's `fake` group."
    ]


def lines_of(series: Series, costs: dict[str, Any]) -> list[str]:
    point = series.points[0]
    fixed = {
        "tensors": f"{UNITS} units, {RANKS} ranks",
        "units": f"{point.tensors} tensors, {RANKS} ranks",
    }.get(series.name, f"{point.tensors} tensors, {point.units} units")
    head = [series.name, "plain", *series.systems, *(f"{system}: set up" for system in series.systems)]
    columns = [costs["single"]["step"]]
    columns += [costs[system][key] for key in ("step", "setup") for system in series.systems]
    rows = [[str(size), *(f"{value:.2f}" for value in row)] for size, *row in zip(series.sizes, *columns)]
    for row, title in enumerate(("exponent", "at the end")):
        slopes = [costs[system][f"{key}_exponents"][row] for key in ("step", "setup") for system in series.systems]
        rows.append([title, "", *("?" if slope is None else f"{slope:.2f}" for slope in slopes)])
    claim = "no worse than linear" if series.limit == LINEAR else "constant"
    ours = [system for system in series.systems if system != "ddp"]
    said = [f"{system} {'holds' if costs[system]['holds'] else 'DOES NOT HOLD'}" for system in ours]
    lines = [f"**Against {series.name}**, with {fixed}:", "", *markdown_table(head, rows), ""]
    if series.processes:
        note = "On a CPU each rank exchanges with each other one itself, so the cost of a gather grows with them."
        return [*lines, note]
    return [*lines, f"A step's cost is {claim} (exponent at the end at most {series.limit}): {', '.join(said)}."]


def plot(path: Path, results: dict[str, Any]) -> None:
    """Draw a step's cost beyond its arithmetic, one panel per series, if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print("no plot, since the package matplotlib is not installed")
        return
    from matplotlib.figure import Figure  # without pyplot no display is needed

    figure = Figure(figsize=(4 * len(results), 4), layout="constrained")
    for axes, (name, series) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items()):
        for system, cost in series["costs"].items():
            label = "plain torch's own" if system == "single" else system
            style = {"color": COLORS[system], "ls": ":" if system == "single" else "-"}
            axes.plot(series["sizes"], cost["step"], marker="o", label=label, **style)
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="ms a step beyond plain torch")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def compare_memory(arguments: argparse.Namespace) -> None:
    options = ["--memory", "--model", arguments.model, "--device", arguments.device]
    (stages,) = run_workers(__file__, options, 1, {}, WORKER_TIMEOUT)
    rows = []
    for found in stages:
        states = sum(found["held"].values())
        found["of_formula"] = states / found["formula"]
        sizes = [found["formula"], states, found["allocated"], sum(found["peak"].values()), found["peak_allocated"]]
        cells = [f"{size / 1e6:.2f}" if size else "" for size in sizes]
        ratio = f"{found['of_formula']:.4f}"
        rows.append([f"{found['stage']} in {found['dtype']}", *cells[:2], ratio, *cells[2:]])
    head = ["stage", "formula MB", "held MB", "of it", "allocated MB", "peak MB", "peak allocated MB"]
    holds = all(found["of_formula"] <= MEMORY_LIMIT for found in stages)
    lines = [
        f"The model {arguments.model} of {stages[0]['parameters'] / 1e6:.1f} M parameters with AdamW, as on rank 0 of "
        f"{MEMORY_RANKS}, on {arguments.device}. `held`: parameters, gradients and optimizer state after a backward, "
        "when all are there, by the engine's count; `allocated`: the same by torch's, on a GPU. `peak`: with what is "
        "gathered and in reduction, and in torch's count activations. At stage 1 gradients are accumulated first, as "
        "the formula has them.",
        "",
        *markdown_table(head, rows),
        "",
        f"At most {MEMORY_LIMIT} x the formula at every stage: {'holds' if holds else 'DOES NOT HOLD'}.",
    ]
    result = {"about": describe(__file__, ("torch", "lightning")), "holds": holds, "stages": stages}
    write_results(arguments.output, "growth_memory", result, lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
