"""Report at the end of a training: a table, a plot, a line for each main result, and results.json."""

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_zero.engine.report import WORKING_BUFFERS
from lightning_zero.monitoring.callback import ZeroMonitor

if TYPE_CHECKING:
    from rich.console import Console


def expected_psi(stage: int, accumulate: int, world_size: int) -> int:
    """Expected elements communicated per rank and optimizer step, divided by Psi (ZeRO paper, section 7).

    Psi is the number of parameters. Stage 1 reduces the gradients once a step, stages 2 and 3 once a micro-batch;
    stages 1 and 2 gather the parameters once a step, stage 3 twice a micro-batch.
    """
    if world_size == 1:
        return 0
    return {1: 2, 2: accumulate + 1, 3: 3 * accumulate}[stage]


def collect(trainer: Trainer, monitor: ZeroMonitor, metrics: Mapping[str, float], checkpoint: str) -> dict[str, Any]:
    """Return all results of a fit as plain values; ``metrics`` are the validation metrics, by ``validation/NAME``."""
    stage = getattr(trainer.strategy, "stage", None)
    last = [loss for _, loss in monitor.loss_curve[-20:]]
    communicated = None if monitor.elements_per_step is None else monitor.elements_per_step / monitor.numel
    expected = expected_psi(stage, trainer.accumulate_grad_batches, trainer.world_size) if stage else None
    return {
        "strategy": f"ZeRO stage {stage}" if stage else type(trainer.strategy).__name__,
        "processes": trainer.world_size,
        "precision": str(trainer.precision),
        "parameters": monitor.numel,
        "steps": trainer.global_step,
        "training_loss": sum(last) / len(last) if last else None,
        "validation": {name.removeprefix("validation/"): value for name, value in metrics.items()},
        "counted": monitor.counted,
        "per_second": monitor.per_second,
        "peak_bytes": monitor.peak_bytes,
        "formula_bytes": monitor.formula_bytes,
        "ddp_bytes": monitor.ddp_bytes,
        "units": {name or "root": numel for name, numel in monitor.units.items()},
        "communicated_psi": communicated,
        "expected_psi": expected,
        "waited": monitor.waited,
        "checkpoint": checkpoint,
        "loss_curve": monitor.loss_curve,
        "validation_curve": monitor.validation_curve,
    }


def figures(results: dict[str, Any]) -> dict[str, str]:
    """Return the main results as name -> formatted value, for tables and the last lines of output."""
    found, loss = {}, results["training_loss"]
    if loss is not None:
        found["training loss (rank 0, mean of 20 steps)"] = f"{loss:.3f}"
    for name, value in results["validation"].items():
        if name != "loss":
            found[f"validation {name}"] = f"{value:.3g}"
    rate, psi = results["per_second"], results["communicated_psi"]
    found[f"{results['counted']} a second"] = "not measured" if rate is None else f"{rate:.0f}"
    held, formula, ddp = results["peak_bytes"], results["formula_bytes"], results["ddp_bytes"]
    buffers = sum(held.get(category, 0) for category in WORKING_BUFFERS)
    total = sum(held.values())
    if formula is None or ddp is None:
        found["peak memory a rank"] = "not measured"
    else:
        found["model states at the peak"] = f"{(total - buffers) / 1e6:.1f} MB (formula {formula / 1e6:.1f} MB)"
        found["working buffers at the peak"] = f"{buffers / 1e6:.1f} MB"
        found["peak memory a rank"] = f"{total / 1e6:.1f} MB (DDP {ddp / 1e6:.1f} MB)"
    expected = results["expected_psi"]
    found["communicated a step"] = "not counted" if psi is None else f"{psi:.2f} Psi (expected {expected} Psi)"
    return found


def write_report(folder: Path, results: dict[str, Any], sample: str | None) -> None:
    """Print the table, a sample of text and the main results, and write ``results.json`` and ``loss.png``.

    Table and sample need rich, the plot matplotlib.
    """
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    plot = plot_losses(folder / "loss.png", {results["strategy"]: results})
    if note := missing("rich"):
        print("table", note)
    else:
        _print_table(results, sample)
    for name, value in figures(results).items():
        print(name, value)
    print("checkpoint", results["checkpoint"] or "none")
    print("plot", plot, flush=True)


def missing(package: str) -> str | None:
    """Return what is printed in place of a part of the report whose package is missing."""
    is_installed = importlib.util.find_spec(package) is not None
    return None if is_installed else f'none: the package {package} is missing: pip install "lightning_zero[demo]"'


def _print_table(results: dict[str, Any], sample: str | None) -> None:
    from rich.table import Table

    console = make_console()
    table = Table(title=f"{results['strategy']}, {results['processes']} processes, {results['precision']}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("parameters (Psi)", f"{results['parameters'] / 1e6:.2f} million")
    table.add_row("steps", str(results["steps"]))
    for name, value in dict(results["validation_curve"]).get(0, {}).items():
        table.add_row(f"{name.replace('/', ' ')} before the first step", f"{value:.3g}")
    if "loss" in results["validation"]:
        table.add_row("validation loss", f"{results['validation']['loss']:.3f}")
    for name, value in figures(results).items():
        table.add_row(name, value)
    for category, held in results["peak_bytes"].items():
        table.add_row(f"  {category} at the peak", f"{held / 1e6:.1f} MB")
    if results["units"]:
        numels = results["units"].values()
        sizes = f", {min(numels) / 1e6:.2f} to {max(numels) / 1e6:.2f} million"
        table.add_row("units, gathered one after another", f"{len(numels)}{sizes}")
    for unit, seconds in list(results["waited"].items())[:5]:
        table.add_row(f"  waited for {unit} a step", f"{1000 * seconds:.2f} ms")
    console.print(table)
    if sample is not None:
        console.rule("sample")
        console.print(sample, markup=False, highlight=False)
        console.rule()


def make_console() -> "Console":
    """Create a console as wide as the terminal, or 120 columns for files and logs instead of rich's 80."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def plot_losses(path: Path, runs: dict[str, dict[str, Any]]) -> Path | str:
    """Plot training and validation loss of each run, label -> results, to a PNG at ``path``.

    Returns:
        ``path``, or what to install for a plot.
    """
    if note := missing("matplotlib"):
        return note
    # Figures created without pyplot need no display and leave no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss")
    for index, (label, results) in enumerate(runs.items()):
        steps, losses = zip(*results["loss_curve"] or [(0, float("nan"))], strict=True)
        axes.plot(steps, losses, color=f"C{index}", alpha=0.35, linewidth=0.8)
        key = "validation/loss"
        points = [(step, metrics[key]) for step, metrics in results["validation_curve"] if key in metrics]
        if points:
            axes.plot(*zip(*points, strict=True), color=f"C{index}", marker="o", label=f"{label}, validation")
        else:
            axes.plot([], [], color=f"C{index}", label=label)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
