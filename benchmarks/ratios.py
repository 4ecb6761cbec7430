"""How long our stages take beside DDP where little is computed, against what they took when it was last stored.

    lightning-zero bench ratios             # exit code 1 where a stage has lost more than 15 %
    lightning-zero bench ratios --store     # keep what is measured as the new measure

All systems train in the same pair of processes, one step each in turn, so that whatever else the machine does meets all
alike; what is compared is the median over the turns of a stage's step to DDP's in the same turn. So this is no
measurement of how fast a system is, for which there is `lightning-zero bench peers`, but of whether it became slower.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from common import MODELS, REPOSITORY, describe, run_workers

STORED = REPOSITORY / "benchmarks" / "results" / "ratios.json"
SYSTEMS = ("ddp", "zero1", "zero2", "zero3")
TURNS = {"deep": 30, "wide2m": 60}  # bound by overhead; by communication
WARM_UP = 3
BATCH, SEQUENCE = 1, 16
LOSS = 0.15  # of speed, that counts as one
WORKER_TIMEOUT = 120.0  # seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("lightning-zero bench ratios", description=__doc__.partition("\n")[0])
    parser.add_argument("--store", action="store_true", help=f"write {STORED.relative_to(REPOSITORY)} anew")
    parser.add_argument("--stored", type=Path, default=STORED, help="the file to compare with, or to write")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    parser.add_argument("--model", choices=list(MODELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.store or arguments.worker or arguments.stored.exists()):
        parser.error(f"--stored {arguments.stored}: there is no such file; --store writes it")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """One rank of all systems: trains each by a step in turn, and writes the seconds of these steps."""
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


def measure(model: str) -> dict[str, float]:
    """Each stage's median ratio to DDP. A step ends when its slowest rank has ended it."""
    ranks = run_workers(__file__, ["--model", model], 2, {}, WORKER_TIMEOUT)
    assert all(rank[system]["losses"] == rank["ddp"]["losses"] for rank in ranks for system in SYSTEMS)
    seconds = {system: [max(step) for step in zip(*(rank[system]["seconds"] for rank in ranks))] for system in SYSTEMS}
    return {
        system: round(statistics.median(ours / ddp for ours, ddp in zip(seconds[system], seconds["ddp"])), 3)
        for system in SYSTEMS
        if system != "ddp"
    }


def losses(model: str, stored: dict[str, float]) -> list[str]:
    """What to say of each stage that takes longer beside DDP than was stored."""
    found = measure(model)
    print(f"{model}: {found}, stored {stored}", flush=True)
    return [
        f"{model}: {system} takes {found[system]:.2f} times DDP's step, where it was {stored[system]:.2f}"
        for system in found
        if found[system] > stored[system] * (1 + LOSS)
    ]


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return 0
    if arguments.store:
        result: dict[str, Any] = {"about": describe(__file__, ("torch",))}
        # twice, and the better of the two: a disturbed measurement must not become the measure
        for model in TURNS:
            first, second = measure(model), measure(model)
            result[model] = {system: min(first[system], second[system]) for system in first}
            print(f"{model}: {first}, {second}", flush=True)
        arguments.stored.write_text(json.dumps(result, indent=1) + "\n")
        return 0
    stored = json.loads(arguments.stored.read_text())
    slower = []
    for model in TURNS:
        if losses(model, stored[model]):
            slower += losses(model, stored[model])  # once more: the machine has other things to do, too
    for line in slower:
        print(line, file=sys.stderr)
    if slower:
        print(
            f"More than {LOSS:.0%} slower beside DDP than on {stored['about']['hardware']} at commit "
            f"{stored['about']['commit']}. If that is right: lightning-zero bench ratios --store",
            file=sys.stderr,
        )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
