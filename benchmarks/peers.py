"""Ours compared with DDP, ZeroRedundancyOptimizer, FSDP and DeepSpeed: time, memory, communication, overhead, start-up.

    python benchmarks/peers.py                                              # all systems on the GPT of 25 M parameters
    python benchmarks/peers.py --models wide,deep --steps 30                # bound by communication; by overhead
    python benchmarks/peers.py --models 25m,vit,moe,lora --precision bf16 --accumulate 4 --checkpoint-activations
    python benchmarks/peers.py --shrunk --rounds 1 --steps 2 --systems ddp,zero3      # a quick check, in seconds

Every system runs once per round, in fresh processes and in reversed order every other round, so that a machine that
slows down over time affects all systems equally. The figures are medians over all rounds. All other readings are taken
in separate runs, so that they do not slow down the timed runs. docs/development/benchmarks.md explains each column.

The exit code is 1 if a system failed, or if its losses differ from the first system's.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import (
    MODELS,
    READS_TOKENS,
    REPOSITORY,
    RETURN_MEMORY_AT_ONCE,
    describe,
    in_turn,
    markdown_table,
    median_of_rounds,
    peak_resident_bytes,
    resident_bytes,
    run_workers,
    spread,
    write_results,
)
from machines import Machines

PACKAGES = {
    "single": "torch",
    "ddp": "torch.nn.parallel",
    "zero_optimizer": "torch.distributed.optim",
    "fsdp1": "torch.distributed.fsdp",
    "fsdp2": "torch.distributed.fsdp",
    "fsdp2_keep": "torch.distributed.fsdp",
    "hsdp": "torch.distributed.fsdp",
    "deepspeed1": "deepspeed",
    "deepspeed2": "deepspeed",
    "deepspeed3": "deepspeed",
    "deepspeed3_hpz": "deepspeed",
    "zero1": "lightning_zero.engine",
    "zero2": "lightning_zero.engine",
    "zero3": "lightning_zero.engine",
    "zero1_gloo": "lightning_zero.engine",
    "zero2_gloo": "lightning_zero.engine",
    "zero3_gloo": "lightning_zero.engine",
    "zero3_node": "lightning_zero.engine",
}
"""The systems in `systems.py`, and the package that a project imports for each."""
BETWEEN_MACHINES = ("hsdp", "deepspeed3_hpz", "zero3_node")
"""Systems that are left out by default on one machine."""
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon for the matrices of blocks and AdamW for the rest"}
WARM_UP = 2  # steps: the first allocates gradients and optimizer state, the second may still find its order
WORKER_TIMEOUT = 1800.0  # seconds
MEBIBYTE = 2**20
# How far losses may be apart, relatively. In fp32 systems differ in the order of sums; in bf16 in what they round.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
OVERHEAD_STEPS = 20  # of the shrunk model


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = ",".join(name for name in PACKAGES if name not in BETWEEN_MACHINES)
    made.add_argument("--systems", default=default, help="comma-separated, from: " + " ".join(PACKAGES))
    made.add_argument("--models", default="25m", help="comma-separated, from: " + " ".join(MODELS))
    made.add_argument("--rounds", type=int, default=5, help="how often each system is run and timed")
    made.add_argument("--steps", type=int, default=8, help="timed steps per round, after the warm-up")
    made.add_argument("--batch", type=int, default=2, help="sequences or samples per rank and micro-batch")
    made.add_argument("--sequence", type=int, help="tokens in a sequence, for models that read tokens (default: 128)")
    made.add_argument("--precision", default="fp32", choices=list(TOLERANCE))
    made.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    made.add_argument(
        "--optimizer",
        default="adamw",
        choices=list(OPTIMIZERS),
        help="muon: Muon for the matrices of blocks, AdamW for the rest; not with zero_optimizer and fsdp1",
    )
    made.add_argument("--checkpoint-activations", action="store_true", help="recompute blocks in backward")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: GPUs, if there are any")
    made.add_argument("--ranks", type=int, help="number of processes; default: 2 on a CPU, one per GPU otherwise")
    made.add_argument("--two-machines", action="store_true", help="half of the ranks on each; needs root, Linux's ip")
    made.add_argument("--rate", help="rate of the network between the two machines, such as 1gbit")
    made.add_argument("--quick", action="store_true", help="only times, losses and a GPU's memory: fewer processes")
    made.add_argument("--shrunk", action="store_true", help="models with as many modules but negligible arithmetic")
    made.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    made.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    made.add_argument("--readings", action="store_true", help=argparse.SUPPRESS)
    return made


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a one-line message for a mistake, before anything is started; fill in defaults from the machine."""
    for option, known in (("systems", PACKAGES), ("models", MODELS)):
        unknown = [name for name in getattr(arguments, option) if name not in known]
        if unknown:
            parser.error(f"--{option}: {', '.join(unknown)} is not among {', '.join(known)}")
    for option in ("rounds", "steps", "batch", "sequence", "accumulate", "ranks"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            parser.error(f"--{option} {value}: it must be at least 1")
    without = [name for name in arguments.models if MODELS[name]["kind"] not in READS_TOKENS]
    if arguments.sequence and without:
        parser.error(f"--sequence: {', '.join(without)} reads no sequences; leave one of the two out")
    arguments.sequence = arguments.sequence or 128
    if arguments.optimizer == "muon":
        arguments.systems = [system for system in arguments.systems if system not in ("zero_optimizer", "fsdp1")]
    if arguments.output.exists() and not arguments.output.is_dir():
        parser.error(f"--output {arguments.output}: this is no folder")
    if find_spec("deepspeed") is None:
        absent = [system for system in arguments.systems if PACKAGES[system] == "deepspeed"]
        arguments.systems = [system for system in arguments.systems if system not in absent]
        if absent:
            print(f"left out, since the package deepspeed is not installed: {', '.join(absent)}")
        if not arguments.systems:
            parser.error("--systems: none is left; `pip install deepspeed` installs those")
    gpus = 0 if arguments.device == "cpu" else count_gpus()
    if arguments.device == "cuda" and not gpus:
        parser.error("--device cuda: torch finds no GPU on this machine")
    arguments.device = "cuda" if gpus else "cpu"
    arguments.ranks = arguments.ranks or gpus or 2
    if arguments.two_machines and (gpus or arguments.ranks % 2):
        parser.error("--two-machines takes an even number of --ranks, and --device cpu")
    if arguments.rate and not arguments.two_machines:
        parser.error("--rate is that of the network of --two-machines")
    if gpus and arguments.ranks > gpus:
        parser.error(f"--ranks {arguments.ranks}: this machine has {gpus} GPUs; take fewer, or --device cpu")


def count_gpus() -> int:
    """Count GPUs in a separate process, as this one does not import torch."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True
    )
    return int(done.stdout or 0)


def connect(kind: str, alone: bool) -> Any:
    """This rank's device; also starts a process group over all ranks unless there is only one. Imports torch."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not alone:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    return device


def work(arguments: argparse.Namespace) -> None:
    """Train one rank of one system, and write losses, seconds and bytes to the parent's file."""
    (system,), (model,) = arguments.systems, arguments.models
    started = time.perf_counter()
    device = connect(arguments.device, alone=system == "single")
    import_module(PACKAGES[system])
    start_up = time.perf_counter() - started

    import torch  # from here on with what all systems need for the benchmark alone, and no project needs
    import torch.distributed as dist
    from rank import Rank
    from readings import Live, communication
    from systems import Conditions

    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    conditions = Conditions(device, dtype, arguments.accumulate, arguments.checkpoint_activations, arguments.optimizer)
    before = resident_bytes()  # here, so that the memory of code is not counted as the training's
    started = time.perf_counter()

    def begin() -> Rank:
        nonlocal start_up
        rank = Rank(system, model, conditions, arguments.batch, arguments.sequence, arguments.shrunk)
        for number in range(WARM_UP):
            rank.step()
            start_up += time.perf_counter() - started if number == 0 else 0
        return rank

    result: dict[str, Any] = {}
    if arguments.readings:
        with Live() as live:
            rank = begin()
        result["live_bytes"] = live.peak
        result |= communication(rank.step) if system != "single" else {}
    else:
        rank = begin()
        for _ in range(arguments.steps):
            rank.step()
    result |= {
        "parameters": rank.parameters,
        "losses": rank.losses,
        "seconds": rank.seconds[WARM_UP:],
        "cpu_seconds": rank.cpu_seconds[WARM_UP:],
        "start_up_seconds": start_up,
        "resident_bytes": peak_resident_bytes() - before,
        "device": "CPU",
    }
    if device.type == "cuda":
        result |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device": torch.cuda.get_device_name(),
        }
    arguments.worker.write_text(json.dumps(result))
    # DDP's reducer would else be the last to hold the group, and end it without giving up the interpreter's lock, for
    # which Gloo's threads may wait then: the process would never end.
    del rank
    if system != "single":
        dist.barrier()  # a rank that leaves first must not take the store away from the others
        dist.destroy_process_group()
    os._exit(0)  # threads that DeepSpeed has left abort the interpreter's end now and then


def run(system: str, model: str, arguments: argparse.Namespace, *more: str, **environment: str) -> list[Any]:
    """Run one system in fresh processes; return each rank's results."""
    options = ["--systems", system, "--models", model, "--device", arguments.device]
    options += ["--precision", arguments.precision, "--accumulate", str(arguments.accumulate)]
    options += ["--batch", str(arguments.batch), "--sequence", str(arguments.sequence), "--steps", str(arguments.steps)]
    options += ["--optimizer", arguments.optimizer]
    options += ["--checkpoint-activations"] * arguments.checkpoint_activations + ["--shrunk"] * arguments.shrunk
    if arguments.device == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu"}  # DeepSpeed takes a GPU that it finds
    ranks = ranks_of(system, arguments)
    if not arguments.two_machines or ranks == 1:
        return run_workers(__file__, [*options, *more], ranks, environment, WORKER_TIMEOUT)
    with Machines(arguments.rate) as machines:
        return run_workers(__file__, [*options, *more], ranks, environment, WORKER_TIMEOUT, machines)


def ranks_of(system: str, arguments: argparse.Namespace) -> int:
    return 1 if system == "single" else arguments.ranks


def read(system: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A system's readings other than speed: bytes per rank, and CPU time of a step with negligible arithmetic."""
    read = run(system, model, arguments, "--readings")
    empty = run(system, model, arguments, "--shrunk", "--batch", "1", "--sequence", "8", "--steps", str(OVERHEAD_STEPS))
    overhead = [rank["cpu_seconds"] for rank in empty]
    found = {
        "overhead_seconds": statistics.fmean(statistics.median(steps) for steps in overhead),
        "overhead": overhead,
        **{
            key: statistics.fmean(rank[key] for rank in read)
            for key in ("asked_bytes", "sent_bytes", "left_bytes")
            if key in read[0]
        },
    }
    if arguments.device == "cuda":
        return found
    resident = run(system, model, arguments, "--steps", "1", **RETURN_MEMORY_AT_ONCE)
    found["live_bytes"] = max(rank["live_bytes"] for rank in read)
    found["resident_bytes"] = max(rank["resident_bytes"] for rank in resident)
    return found


def measure(model: str, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each system's measurements on one model, or the error of a system that failed."""
    measured: dict[str, dict[str, Any]] = {}

    def fail(system: str, error: RuntimeError) -> None:
        measured[system] = {"error": str(error)}
        print(f"{model}: {system} FAILED, and is left out from here on: {error}", flush=True)

    for system in arguments.systems:
        try:
            readings = {} if arguments.quick else read(system, model, arguments)
            measured[system] = readings | {"seconds": [], "start_up_seconds": []}
        except RuntimeError as error:
            fail(system, error)
    for number, turn in in_turn(arguments.systems, arguments.rounds):
        for system in turn:
            if "error" in measured[system]:
                continue
            try:
                ranks = run(system, model, arguments)
            except RuntimeError as error:
                fail(system, error)
                continue
            found = measured[system]
            # A step ends when its slowest rank has ended it.
            found["seconds"].append([max(step) for step in zip(*(rank["seconds"] for rank in ranks))])
            found["start_up_seconds"].append(max(rank["start_up_seconds"] for rank in ranks))
            found |= {key: ranks[0][key] for key in ("parameters", "device")}
            if arguments.device == "cuda":
                found |= {key: max(rank[key] for rank in ranks) for key in ("allocated_bytes", "reserved_bytes")}
            found["losses"] = [statistics.fmean(step) for step in zip(*(rank["losses"] for rank in ranks))]
            print(
                f"{model}, round {number + 1} of {arguments.rounds}: {system:<14} "
                f"{statistics.median(found['seconds'][-1]):.4f} s a step, last loss {found['losses'][-1]:.7f}",
                flush=True,
            )
    return measured


def compare_losses(measured: dict[str, dict[str, Any]], ranks: int) -> str | None:
    """Record the largest relative difference of each system's losses from the reference's; return the reference."""
    comparable = [
        system for system, found in measured.items() if "losses" in found and (system != "single" or ranks == 1)
    ]
    if not comparable:
        return None
    reference = "ddp" if "ddp" in comparable else comparable[0]
    for system in comparable:
        pairs = zip(measured[system]["losses"], measured[reference]["losses"])
        off = [abs(loss - wanted) / abs(wanted) for loss, wanted in pairs]
        measured[system]["losses_off"] = float("nan") if any(map(math.isnan, off)) else max(off)
    return reference


def is_wrong(found: dict[str, Any], precision: str) -> bool:
    # not `>`: a loss that is no number is off, too
    return "error" in found or not found.get("losses_off", 0.0) <= TOLERANCE[precision]


def report(model: str, arguments: argparse.Namespace, measured: dict[str, dict[str, Any]]) -> None:
    reference = compare_losses(measured, arguments.ranks)
    done = {system: found for system, found in measured.items() if "error" not in found}
    for found in done.values():
        found["median_seconds"] = median_of_rounds(found["seconds"])
    about = describe(__file__, ("torch", "lightning", "deepspeed"))
    bases = [system for system in ("ddp", "fsdp2") if system in done]
    memory = ("live", "resident") if arguments.device == "cpu" else ("allocated", "reserved")
    reads = MODELS[model]["kind"] in READS_TOKENS
    head = ["system", "s a step", "rounds", *(f"x {base.upper()}" for base in bases)]
    head += [f"{'tokens' if reads else 'samples'} a s", *(f"{kind} MiB" for kind in memory)]
    head += ["asked MiB", "sent MiB", *(["left MiB"] if arguments.two_machines else [])]
    head += ["overhead ms", "start-up s", "losses off"]
    rows = [row(system, found, done, bases, memory, reads, arguments) for system, found in measured.items()]
    lines = [
        *description(model, arguments, measured, reference),
        "",
        *markdown_table(head, rows),
        "",
        "docs/development/benchmarks.md says what each column is.",
    ]
    result = {"about": about, "reference": reference, "systems": measured}
    write_results(arguments.output, file_name(model, arguments), result, lines)


def description(
    model: str, arguments: argparse.Namespace, measured: dict[str, dict[str, Any]], reference: str | None
) -> list[str]:
    first = next((found for found in measured.values() if "error" not in found), {"parameters": 0, "device": "none"})
    size = f"{arguments.batch} x {arguments.sequence} tokens"
    if MODELS[model]["kind"] not in READS_TOKENS:
        size = f"{arguments.batch} samples"
    over = "Gloo, one thread each" if arguments.device == "cpu" else "NCCL"
    network = ""
    if arguments.two_machines:
        network = f", half of them on each of two simulated machines ({arguments.rate or 'no limit'} between them)"
    return [
        f"The model {model}{', shrunk,' * arguments.shrunk} of {first['parameters'] / 1e6:.1f} M parameters, "
        f"{arguments.precision}, {OPTIMIZERS[arguments.optimizer]}, {size} a rank and micro-batch, "
        f"{arguments.accumulate} micro-batches a step"
        f"{', activations checkpointed' * arguments.checkpoint_activations}; {arguments.ranks} processes over {over}, "
        f"on {first['device']}{network}. `single` is one process with one rank's data: no communication, and other "
        "losses.",
        f"Medians of {arguments.rounds} rounds of {arguments.steps} steps; `rounds` is the lowest and the highest "
        f"median of one round. Losses off: at worst, from those of {reference}; up to "
        f"{TOLERANCE[arguments.precision]:g} counts as the same.",
    ]


def row(
    system: str,
    found: dict[str, Any],
    done: dict[str, dict[str, Any]],
    bases: list[str],
    memory: tuple[str, str],
    reads: bool,
    arguments: argparse.Namespace,
) -> list[str]:
    if "error" in found:
        return [system, "FAILED", *[""] * (9 + len(bases) + arguments.two_machines)]
    median = found["median_seconds"]
    count = arguments.batch * arguments.accumulate * ranks_of(system, arguments) * (arguments.sequence if reads else 1)
    off = f"{found['losses_off']:.1e}" if "losses_off" in found else ""
    return [
        system,
        f"{median:.4f}",
        spread(found["seconds"]),
        *(f"{median / done[base]['median_seconds']:.2f}" for base in bases),
        f"{count / median:.0f}",
        *(in_mebibytes(found, f"{kind}_bytes", 1) for kind in memory),
        *(in_mebibytes(found, key, 2) for key in ("asked_bytes", "sent_bytes")),
        *([f"{found.get('left_bytes', 0) / MEBIBYTE:.2f}"] if arguments.two_machines else []),
        f"{found['overhead_seconds'] * 1e3:.2f}" if "overhead_seconds" in found else "",
        f"{statistics.median(found['start_up_seconds']):.2f}",
        f"DIFFERENT: {off}" if is_wrong(found, arguments.precision) else off,
    ]


def in_mebibytes(found: dict[str, Any], key: str, digits: int) -> str:
    return f"{found[key] / MEBIBYTE:.{digits}f}" if key in found else ""


def file_name(model: str, arguments: argparse.Namespace) -> str:
    """Build a file name that lists settings other than the defaults, so that such results do not overwrite others."""
    parts = ["peers", model, *(["shrunk"] if arguments.shrunk else [])]
    parts += ["cuda"] if arguments.device == "cuda" else []
    parts += [f"ranks{arguments.ranks}"] if arguments.ranks != 2 else []
    parts += [arguments.precision] if arguments.precision != "fp32" else []
    parts += [f"batch{arguments.batch}"] if arguments.batch != 2 else []
    parts += [f"sequence{arguments.sequence}"] if arguments.sequence != 128 else []
    parts += [f"accumulate{arguments.accumulate}"] if arguments.accumulate != 1 else []
    parts += [arguments.optimizer] if arguments.optimizer != "adamw" else []
    parts += ["two_machines", *([arguments.rate] if arguments.rate else [])] if arguments.two_machines else []
    parts += ["checkpointed"] if arguments.checkpoint_activations else []
    return "_".join(parts)


def main(given: list[str]) -> int:
    arguments = parser().parse_args(given)
    arguments.systems = arguments.systems.split(",")
    arguments.models = arguments.models.split(",")
    if arguments.worker:
        work(arguments)
        return 0
    check(parser(), arguments)
    wrong = []
    for model in arguments.models:
        measured = measure(model, arguments)
        report(model, arguments, measured)
        for system, found in measured.items():
            if is_wrong(found, arguments.precision):
                what = "failed" if "error" in found else f"has LOSSES THAT DIFFER, by {found['losses_off']:.1e}"
                wrong.append(f"{model}: {system} {what}")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
