"""A trace of two steps at stage 3 as rank 0 of four, and the share of the communication that computation hides.

    PYTHONPATH=.:benchmarks python benchmarks/gpu/overlap.py --model 1.3b --batch 8 --sequence 2048 --output FOLDER

NCCL refuses several ranks on one GPU, so the other ranks are simulated (`tests/gpu/one_device.py`): each collective is
a pause and a copy on a stream of its own. `FOLDER/trace.json.gz` can be opened in Perfetto.
"""

import argparse
import sys
from pathlib import Path

import torch
from common import GPTS, describe, write_results
from models import batch_of, model_of
from systems import SYSTEMS, Conditions
from torch.profiler import ProfilerActivity, profile

from tests.gpu.one_device import twins
from tests.gpu.test_profile import Span, covered, on_device

RANKS = 4
PAUSE = 300_000  # cycles of 0.5 ns: about as long as NVLink takes for a layer of the GPT of 1.3 billion parameters
STEPS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="1.3b", choices=GPTS)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--output", type=Path, required=True, help="folder for the trace and the result")
    arguments = parser.parse_args()
    device, on_gpu = torch.device(arguments.device), arguments.device == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with twins(RANKS, PAUSE if on_gpu else 0):
        torch.manual_seed(0)
        with device:
            model = model_of(arguments.model, arguments.sequence)
        training = SYSTEMS["zero3"](model, Conditions(device, torch.bfloat16))
        text = batch_of(arguments.model, arguments.batch, arguments.sequence, torch.Generator().manual_seed(0))
        inputs, targets = (tensor.to(device) for tensor in text)
        for _ in range(2):
            training.step(inputs, targets)
        if on_gpu:
            torch.cuda.synchronize()
        with profile(activities=kinds) as profiled:
            for _ in range(STEPS):
                training.step(inputs, targets)
            if on_gpu:
                torch.cuda.synchronize()
    arguments.output.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(arguments.output / "trace.json.gz"))
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in on_device(profiled):
        is_communication = "spin_kernel" in event.name or "Memcpy DtoD" in event.name
        spans[is_communication].append((event.time_range.start, event.time_range.end))
    result = {
        "about": describe(__file__, ("torch",)),
        "hidden": covered(spans[True], spans[False]),
        "communication_seconds": sum(end - start for start, end in spans[True]) / 1e6 / STEPS,
        "computation_seconds": sum(end - start for start, end in spans[False]) / 1e6 / STEPS,
    }
    lines = [
        f"The GPT {arguments.model} in bf16, {arguments.batch} x {arguments.sequence} tokens, stage 3, as rank 0 of "
        f"{RANKS} simulated ranks. A step has {result['communication_seconds'] * 1e3:.1f} ms of communication and "
        f"{result['computation_seconds'] * 1e3:.1f} ms of computation on the device; computation hides "
        f"{result['hidden']:.0%} of the communication.",
    ]
    write_results(arguments.output, "overlap", result, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
