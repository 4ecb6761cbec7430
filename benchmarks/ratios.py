"""Step times of our stages relative to DDP with little arithmetic, compared with the stored ratios.

    python benchmarks/ratios.py             # exit code 1 if a stage is more than 15 % slower; 3 if undecided
    python benchmarks/ratios.py --store     # store the result as the new baseline

All systems train in the same pair of processes, one step each in turn, so that other load on the machine affects all
equally. Compared is the median over turns of the ratio between a stage's step and DDP's step in the same turn. It
differs by up to 25 % between two pairs of processes that run the same code (1.09 and 1.35 for stage 1 of the deep
model), so a stage counts as slower only if it is in each of three pairs. This shows whether a system became slower; how
fast it is, `python benchmarks/peers.py` measures.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from common import MODELS, REPOSITORY, describe, run_workers

STORED = REPOSITORY / "benchmarks" / "results" / "ratios.json"
SYSTEMS = ("ddp", "zero1", "zero2", "zero3")
TURNS = {"deep": 40, "wide2m": 60}  # bound by overhead; by communication
WARM_UP = 3
BATCH, SEQUENCE = 1, 16
PAIRS, STORED_PAIRS = 3, 5  # of processes, one after the other
LOSS = 0.15  # of speed, that counts as one
BUSY = 0.1  # of the machine taken by others: more says nothing, since each message waits for a core then
UNKNOWN = 3  # exit code
WORKER_TIMEOUT = 300.0  # seconds


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--store", action="store_true", help=f"replace {STORED.relative_to(REPOSITORY)}")
    made.add_argument("--stored", type=Path, default=STORED, help="the file to compare with, or to write")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    made.add_argument("--model", choices=list(MODELS), help=argparse.SUPPRESS)
    return made


def work(arguments: argparse.Namespace) -> None:
    """Run one rank of all systems: train each by a step in turn, and write the seconds of these steps."""
    import torch
    import torch.distributed as dist
    from rank import Rank
    from systems import Conditions

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = {system: Rank(system, arguments.model, Conditions(), BATCH, SEQUENCE) for system in SYSTEMS}
    for number in range(WARM_UP + TURNS[arguments.model]):
        for system in SYSTEMS if number % 2 else SYSTEMS[::-1]:
            dist.barrier()  # stages 1 and 2 leave gathers under way, which are to be theirs alone
            ranks[system].step()
    result = {system: {"seconds": rank.seconds[WARM_UP:], "losses": rank.losses} for system, rank in ranks.items()}
    arguments.worker.write_text(json.dumps(result))
    del ranks  # before the process group, see peers.py
    dist.barrier()
    dist.destroy_process_group()


def measure(model: str) -> tuple[dict[str, float], float]:
    """Each stage's ratio to DDP (the median over turns), and the share of the machine that other programs took.

    A step ends when the slowest rank has finished it.
    """
    began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    ranks = run_workers(__file__, ["--model", model], 2, {}, WORKER_TIMEOUT)
    others = (busy_seconds() - busy) - (own_seconds() - own)
    assert all(rank[system]["losses"] == rank["ddp"]["losses"] for rank in ranks for system in SYSTEMS)
    seconds = {system: [max(step) for step in zip(*(rank[system]["seconds"] for rank in ranks))] for system in SYSTEMS}
    ratios = {
        system: round(statistics.median(ours / ddp for ours, ddp in zip(seconds[system], seconds["ddp"])), 3)
        for system in SYSTEMS
        if system != "ddp"
    }
    taken = max(0.0, others / (time.monotonic() - began) / (os.cpu_count() or 1))
    print(f"{model}: {ratios}; other programs took {taken:.0%} of the machine", flush=True)
    return ratios, round(taken, 3)


def busy_seconds() -> float:
    """CPU time that this machine's cores have spent on programs."""
    times = psutil.cpu_times()._asdict()
    return sum(times.get(kind, 0.0) for kind in ("user", "nice", "system"))


def own_seconds() -> float:
    """CPU time of this program and of the workers that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def store(path: Path) -> None:
    """Write the ratios of some pairs of processes as the new baseline."""
    result: dict[str, Any] = {"about": describe(__file__, ("torch",)), "others": {}, "ratios": {}}
    for model in TURNS:
        measured = [measure(model) for _ in range(STORED_PAIRS)]
        result["ratios"][model] = {system: [ratios[system] for ratios, _ in measured] for system in measured[0][0]}
        result["others"][model] = max(others for _, others in measured)
    path.write_text(json.dumps(result, indent=1) + "\n")


def slower_ones(pairs: list[dict[str, float]], stored: dict[str, list[float]]) -> list[str]:
    """What is slower in every pair of processes than the median of the stored ones, as lines for the user."""
    before = {system: statistics.median(ratios) for system, ratios in stored.items()}
    return [
        f"{system} takes {min(ratios[system] for ratios in pairs):.2f} times DDP's step or more, where it was {was:.2f}"
        for system, was in before.items()
        if all(ratios[system] > was * (1 + LOSS) for ratios in pairs)
    ]


def compare(stored: dict[str, Any]) -> int:
    """Measure, and print what became slower; return the exit code."""
    codes = {0}
    for model in TURNS:
        pairs: list[dict[str, float]] = []
        most = 0.0
        for _ in range(PAIRS):
            ratios, others = measure(model)
            pairs.append(ratios)
            most = max(most, others)
            slower = slower_ones(pairs, stored["ratios"][model])
            if not slower:
                break
        if slower and most > BUSY:
            print(f"{model}: cannot be told while other programs take {most:.0%} of the machine", file=sys.stderr)
            codes.add(UNKNOWN)
        elif slower:
            print(*(f"{model}: {line}" for line in slower), sep="\n", file=sys.stderr)
            codes.add(1)
    if 1 in codes:
        print(
            f"That is more than {LOSS:.0%} slower beside DDP than on {stored['about']['hardware']} at commit "
            f"{stored['about']['commit']}. If it is meant to be: python benchmarks/ratios.py --store",
            file=sys.stderr,
        )
    return 1 if 1 in codes else max(codes)


def main(given: list[str]) -> int:
    arguments = parser().parse_args(given)
    if arguments.worker:
        work(arguments)
        return 0
    if not (arguments.store or arguments.stored.exists()):
        parser().error(f"--stored {arguments.stored}: there is no such file; --store writes it")
    if arguments.store:
        store(arguments.stored)
        return 0
    return compare(json.loads(arguments.stored.read_text()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
