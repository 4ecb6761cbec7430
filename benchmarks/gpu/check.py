"""The first run on a GPU: what works there? Tests, the doctor, and all systems on a small GPT, in five minutes.

    python benchmarks/gpu/check.py --output FOLDER
    python benchmarks/gpu/check.py --output FOLDER --device cpu      # tries the script itself

`FOLDER` then has a log for each part, and the tests' results as JUnit XML. The exit code is the number of parts that
failed.
"""

import argparse
import os
import sys

from parts import BENCHMARKS, Part, main


def parts_of(arguments: argparse.Namespace) -> list[Part]:
    folder, device = arguments.output, arguments.device
    os.environ["GPU_TESTS_ON"] = device  # otherwise, all would be skipped where torch finds no GPU

    def tests(name: str, share: float, *paths: str) -> Part:
        xml = [f"--junitxml={folder / name}.xml", "-o", "junit_logging=all"]
        command = ["-m", "pytest", *paths, "-n", "4", "--timeout", str(18 * arguments.minutes), "-v", *xml]
        return Part(name, command, share)

    on_gpu = device == "cuda"
    peers = [
        *(str(BENCHMARKS / "peers.py"), "--device", device, "--precision", "bf16", "--quick"),
        *("--models", "124m" if on_gpu else "tiny", "--systems", "single,ddp,fsdp2,deepspeed3,zero1,zero2,zero3"),
        *("--rounds", "1", "--steps", "5", "--batch", "8", "--output", str(folder)),
        *(["--sequence", "1024"] if on_gpu else []),
    ]
    return [
        tests("one_rank", 0.3, "tests/gpu/test_one_rank.py"),
        tests("streams", 0.4, "tests/gpu", "--ignore=tests/gpu/test_one_rank.py"),
        tests("private_names", 0.2, "tests/engine/test_compat.py"),
        Part("doctor", ["-m", "lightning_zero", "doctor", "--device", device, "--ranks", "1", "--json"], 0.2),
        Part("peers", peers, 0.5),
        tests("backends", 0.2, "tests/engine/test_other_backends.py"),
    ]


if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0], 5.0, parts_of))
