"""A training step with offloaded model states, with and without overlap, compared with a step without offload.

    python benchmarks/offload.py
    python benchmarks/offload.py --model 25m --systems none,nvme,nvme_serial --rounds 3 --disk FOLDER
    python benchmarks/offload.py --model 1.3b --precision bf16 --batch 8 --sequence 2048

One process, on the first GPU if there is one. Every system runs once per round in a fresh process, in reversed order
every other round; one that fails is left out, and the exit code is 1. The last step's losses are listed to show that
all do the same work. TFLOP/s count 6 operations per parameter and token.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import GPTS, REPOSITORY, describe, in_turn, markdown_table, peak_resident_bytes, run_workers, write_results

OURS = ["none", "cpu", "cpu_serial", "cpu_all", "nvme", "nvme_serial", "nvme_all"]
PEERS = ["fsdp2", "fsdp2_cpu", "deepspeed", "deepspeed_cpu"]  # _cpu: CPUOffloadPolicy; ZeRO-Offload of all there is
WARM_UP = 2  # steps that are not timed
WORKER_TIMEOUT = 1800.0  # seconds


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "none,cpu,cpu_serial,nvme,nvme_serial"
    parser.add_argument("--systems", default=default, help="comma-separated, from: " + " ".join([*OURS, *PEERS]))
    parser.add_argument("--model", default="25m", choices=GPTS)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="folder on the disk; default: the system's temporary folder")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "benchmarks" / "results", help="where results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # the parent starts workers with it
    arguments = parser.parse_args()
    unknown = set(arguments.systems.split(",")) - {*OURS, *PEERS}
    if unknown:
        parser.error(f"--systems: {', '.join(sorted(unknown))} is not among {', '.join([*OURS, *PEERS])}")
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """Train with one system, and write times and losses to the parent's file."""
    import torch
    from models import model_of
    from offload_systems import SYSTEMS, Setting

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_num_threads(int(os.environ["BENCHMARK_THREADS"]))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
    with device:  # a GPU initialises large models in seconds
        model = model_of(arguments.model, arguments.sequence)
    parameters = sum(p.numel() for p in model.parameters())
    training = SYSTEMS[arguments.systems](model, Setting(device, dtype, arguments.disk))
    text = torch.randint(256, (arguments.batch, arguments.sequence + 1), device=device)
    seconds = []
    for _ in range(WARM_UP + arguments.steps):
        started = time.perf_counter()
        loss = float(training.step(text[:, :-1], text[:, 1:]))  # waits for the device
        seconds.append(time.perf_counter() - started)
    result = {
        "parameters": parameters,
        "seconds": seconds[WARM_UP:],
        "loss": loss,
        "resident": peak_resident_bytes(),
        "allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "peak": training.peak_by_category(),
    }
    arguments.worker.write_text(json.dumps(result))


def main() -> int:
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
        return 0
    systems = arguments.systems.split(",")
    rounds: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    chosen = ["--model", arguments.model, "--precision", arguments.precision]
    chosen += ["--batch", str(arguments.batch), "--sequence", str(arguments.sequence), "--steps", str(arguments.steps)]
    for number, turn in in_turn(systems, arguments.rounds):
        for system in (each for each in turn if each in rounds):
            with tempfile.TemporaryDirectory(dir=arguments.disk) as folder:
                threads = {"BENCHMARK_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
                options = ["--systems", system, *chosen, "--disk", folder]
                try:
                    (result,) = run_workers(__file__, options, 1, threads, WORKER_TIMEOUT)
                except RuntimeError as error:
                    print(f"{system} FAILED, and is left out: {error}", flush=True)
                    del rounds[system]
                    continue
            rounds[system].append(result)
            print(f"round {number + 1}: {system:<12} {statistics.median(result['seconds']):.3f} s a step", flush=True)
    if rounds:
        report(arguments, rounds)
    return int(len(rounds) < len(systems))


def report(arguments: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]]) -> None:
    step = {
        system: statistics.median(s for result in results for s in result["seconds"])
        for system, results in rounds.items()
    }
    first = next(iter(rounds.values()))[0]
    tokens = arguments.batch * arguments.sequence
    rows = []
    for system, results in rounds.items():
        seconds = [s for result in results for s in result["seconds"]]
        serial = step.get(f"{system}_serial")
        rows.append(
            [
                system,
                f"{step[system]:.3f}",
                f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{6e-12 * first['parameters'] * tokens / step[system]:.3f}",
                f"{step['none'] / step[system]:.2f}" if "none" in step else "",
                f"{step[system] / serial:.2f}" if serial else "",
                f"{statistics.median(result['resident'] for result in results) / 1e6:.0f}",
                f"{statistics.median(result['allocated'] for result in results) / 1e6:.0f}",
                f"{results[0]['loss']:.6f}",
            ]
        )
    head = ["system", "step s", "spread", "TFLOP/s", "speed x none", "time x serial", "RSS MB", "allocated MB", "loss"]
    lines = [
        f"A GPT of {first['parameters'] / 1e6:.1f} M parameters in {arguments.precision} with fused AdamW, "
        f"{arguments.batch} x {arguments.sequence} tokens a step, one process on {first['device']}, stage 3. Medians "
        f"of {arguments.rounds} rounds of {arguments.steps} steps. `speed x none`: of the same without offload; "
        "`time x serial`: against the same with `overlap=False`.",
        "",
        *markdown_table(head, rows),
    ]
    result = {"about": describe(__file__, ("torch", "lightning")), "medians": step, "rounds": rounds}
    write_results(arguments.output, "offload", result, lines)


if __name__ == "__main__":
    sys.exit(main())
