"""Draws the plots for the README and docs/explanation/performance.md from the stored results.

    python benchmarks/plots.py            # into docs/assets, from benchmarks/results

Each plot names in its footer the command and the hardware of the measurement. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from growth import plot as plot_growth
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
ASSETS = Path(__file__).parents[1] / "docs" / "assets"

NAMES = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed2": "DeepSpeed 2",
    "deepspeed3": "DeepSpeed 3",
    "zero1_gloo": "zero1, over Gloo",
    "zero2_gloo": "zero2, over Gloo",
    "zero3_gloo": "zero3, over Gloo",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
}
OURS, THEIRS, LIGHT = "#6a1b9a", "#90a4ae", "#ce93d8"

MODELS = {
    "peers_25m": "GPT 25 M",
    "peers_25m_batch1_sequence16": "GPT 25 M, 1 x 16 tokens",
    "peers_124m": "GPT 121 M",
    "peers_25m_bf16": "GPT 25 M, bf16",
    "peers_25m_accumulate4": "GPT 25 M, 4 micro-batches",
    "peers_25m_checkpointed": "GPT 25 M, activations recomputed",
    "peers_wide": "wide, 17 M in 4 layers",
    "peers_vit": "ViT 21 M",
    "peers_moe": "mixture of experts, 14 M",
    "peers_lora": "GPT 25 M with LoRA",
    "peers_deep": "100 layers of width 64",
    "peers_deep200": "200 layers of width 64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=ASSETS)
    arguments = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "lightning_zero"  # the same results give the same file
    arguments.output.mkdir(parents=True, exist_ok=True)
    for draw in (step_time, memory, models, checkpoints, offload):
        path = arguments.output / f"{draw.__name__.replace('_', '-')}.svg"
        figure = draw(lambda name: json.loads((arguments.results / f"{name}.json").read_text()))
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight", facecolor="white")
        print(path)
    plot_growth(arguments.output / "growth.svg", json.loads((arguments.results / "growth.json").read_text())["series"])


def step_time(read: Any) -> Figure:
    """Seconds per step for the 25 M GPT, by system."""
    result = read("peers_25m")
    seconds = {label: result["systems"][name]["median_seconds"] for name, label in NAMES.items()}
    title = "Time of a training step: GPT of 25 M parameters, fp32, 2 CPU processes"
    return bars(seconds, "{:.2f}", "seconds a step (less is better)", title, result, height=3.7)


def memory(read: Any) -> Figure:
    """Peak resident memory per rank for the 25 M GPT, by system."""
    result = read("peers_25m")
    mebibytes = {label: result["systems"][name]["resident_bytes"] / 2**20 for name, label in NAMES.items()}
    title = "Memory of a rank: GPT of 25 M parameters, fp32, 2 CPU processes"
    return bars(mebibytes, "{:.0f}", "MiB a rank at the peak (less is better)", title, result, height=3.7)


def bars(
    values: dict[str, float], form: str, unit: str, title: str, result: dict[str, Any], height: float = 2.6
) -> Figure:
    """One bar for each value, with the value as text of the given form; ZeRO's bars have another colour."""
    figure, axes = canvas(7.6, height)
    colours = [OURS if label.startswith("zero") else THEIRS for label in values]
    bar = axes.barh(list(values), list(values.values()), color=colours, height=0.7)
    axes.bar_label(bar, [form.format(value) for value in values.values()], padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(values.values()))
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    source(figure, result)
    return figure


def models(read: Any) -> Figure:
    """Stage 3's step time relative to DDP, FSDP2 and DeepSpeed 3, by model."""
    figure, axes = canvas(7.6, 4.6)
    results = {label: read(name) for name, label in MODELS.items()}
    marks = {"ddp": ("o", "#37474f"), "fsdp2": ("s", OURS), "deepspeed3": ("D", LIGHT)}
    for system, (mark, colour) in marks.items():
        ratios = [
            result["systems"]["zero3"]["median_seconds"] / result["systems"][system]["median_seconds"]
            for result in results.values()
        ]
        axes.plot(ratios, range(len(ratios)), mark, color=colour, label=f"against {NAMES[system]}", markersize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4)
    axes.set_xlabel("time of a step under zero3 / under the other (left of 1: zero3 is faster)")
    axes.set_title("zero3 beside DDP, FSDP2 and DeepSpeed 3, by model", loc="left")
    figure.legend(frameon=False, fontsize=8, loc="outside upper right", ncols=3)
    axes.grid(axis="x", alpha=0.3)
    source(figure, results["GPT 25 M"], command="python benchmarks/peers.py, with the options in each result's file")
    return figure


def checkpoints(read: Any) -> Figure:
    """Seconds for which training waits for a save, by checkpoint format."""
    result = read("checkpoint")
    names = {
        "fsdp2": "FSDP2, DCP",
        "full": "zero3, one file",
        "sharded": "zero3, folder",
        "fsdp2_async": "FSDP2, DCP, background",
        "full_async": "zero3, one file, background",
        "sharded_async": "zero3, folder, background",
    }
    seconds = {label: result["medians"][name]["stall"] for name, label in names.items()}
    title = "Saving 1.45 GB of weights and AdamW's state, 2 processes"
    return bars(seconds, "{:.2f}", "seconds for which training waits for a save (less is better)", title, result)


def offload(read: Any) -> Figure:
    """Seconds per step with model states in host memory and on a disk, next to the same system without offload."""
    result = read("offload")
    medians = result["medians"]
    seconds = {
        "zero3": medians["none"],
        "zero3, states in host memory": medians["cpu"],
        "zero3, states on a disk": medians["nvme"],
        "zero3, states and parameters on a disk": medians["nvme_all"],
        "FSDP2": medians["fsdp2"],
        "FSDP2, CPUOffloadPolicy": medians["fsdp2_cpu"],
    }
    title = "Offload: GPT of 25 M parameters, fp32, one CPU process"
    return bars(seconds, "{:.2f}", "seconds a step (less is better)", title, result)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.title.set_fontsize(10)
    return figure, axes


def source(figure: Figure, result: dict[str, Any], command: str | None = None) -> None:
    """Write below a plot the command and the hardware of the measurement."""
    about = result["about"]
    text = f"{command or about['command']}\n{about['hardware']}; {about['versions']}"
    figure.supxlabel(text, fontsize=6.5, color="#546e7a", x=0.01, ha="left")


if __name__ == "__main__":
    main()
