"""The second run on a GPU: speed and memory of a GPT of 1.3 billion parameters in bf16, in six minutes.

    python benchmarks/gpu/measure.py --output FOLDER
    python benchmarks/gpu/measure.py --output FOLDER --device cpu      # tries the script itself, with a tiny model

Beside plain torch and FSDP2, in turn: step time and memory. Then model states against the formula, predicted and
measured step times, a trace of overlap, DeepSpeed, and offload of a GPT of 7 billion parameters. What does not fit into
the time is left out from the end. `FOLDER` then has a log for each part, and the benchmarks' results. The exit code is
the number of parts that failed.
"""

import argparse
import sys
from pathlib import Path

from parts import BENCHMARKS, Part, main


def parts_of(arguments: argparse.Namespace) -> list[Part]:
    folder, device = arguments.output, arguments.device
    on_gpu = device == "cuda"
    model, large = ("1.3b", "7b") if on_gpu else ("tiny", "tiny")
    batch, sequence = ("8", "2048") if on_gpu else ("2", "128")
    size = ["--batch", batch, "--sequence", sequence, "--output", str(folder)]

    def peers(systems: str, rounds: int, where: Path) -> list[str]:
        return [
            *(str(BENCHMARKS / "peers.py"), "--device", device, "--models", model, "--precision", "bf16", "--quick"),
            *("--systems", systems, "--rounds", str(rounds), "--steps", "8", *size[:-1], str(where)),
        ]

    memory = [str(BENCHMARKS / "growth.py"), "--memory", "--device", device, "--model", model, "--output", str(folder)]
    plans = [
        *(str(BENCHMARKS / "plans.py"), "--device", device, "--model", model, "--precision", "bf16-mixed"),
        *("--choices", "zero3", "--rounds", "1", *size),
    ]
    trace = [str(BENCHMARKS / "gpu" / "overlap.py"), "--device", device, "--model", model, *size]
    offload = [
        *(str(BENCHMARKS / "offload.py"), "--model", large, "--precision", "bf16", "--systems", "cpu,deepspeed_cpu"),
        *("--rounds", "1", "--steps", "3", *size),
    ]
    return [
        Part("peers", peers("single,zero3,fsdp2,zero1", 2, folder), 0.5),
        Part("memory", memory, 0.2),
        Part("plans", plans, 0.2),
        Part("trace", trace, 0.2),
        Part("deepspeed", peers("single,deepspeed3", 1, folder / "deepspeed"), 0.25),
        Part("offload", offload, 0.4),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0], 6.0, parts_of))
