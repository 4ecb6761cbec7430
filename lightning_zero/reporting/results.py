"""Report at the end of training: a table and results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer

from lightning_zero.callbacks.monitor import ZeroMonitor
from lightning_zero.callbacks.pruning import Pruning
from lightning_zero.engine import Report
from lightning_zero.io.tables import show


def collect(trainer: Trainer, monitor: ZeroMonitor, metrics: Mapping[str, float], checkpoint: str) -> dict[str, Any]:
    """Return all results of a fit as plain values; the keys of ``metrics`` have the form ``validation/NAME``."""
    report = monitor.report
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    counted = "samples" if monitor.length_fn is None else getattr(trainer.lightning_module, "counted", "items")
    communicated = None if monitor.elements_per_step is None else monitor.elements_per_step / monitor.numel
    return {
        "strategy": type(trainer.strategy).__name__ if report is None else f"ZeRO stage {report.stage}",
        "processes": trainer.world_size,
        "precision": str(trainer.precision),
        "parameters": monitor.numel,
        "steps": trainer.global_step,
        "training_loss": monitor.loss_curve[-1][1] if monitor.loss_curve else None,
        "validation": {name.removeprefix("validation/"): value for name, value in metrics.items()},
        "counted": counted,
        "per_second": monitor.per_second,
        "peak_bytes": monitor.peak_bytes,
        "formula_bytes": None if report is None else report.formula,
        "ddp_bytes": None if report is None else report.replicated,
        "units": {} if report is None else {name or "root": numel for name, numel in report.units.items()},
        "communicated_psi": communicated,
        "waited": monitor.waited,
        "sparsity": next((each.sparsity for each in callbacks if isinstance(each, Pruning)), None),
        "checkpoint": checkpoint,
        "loss_curve": monitor.loss_curve,
        "validation_curve": monitor.validation_curve,
    }


class Figure(NamedTuple):
    """One of the main results, as text.

    Attributes:
        name: label of the result's row in a job's table.
        heading: header of the result's column in a sweep's table; "" if it has no column.
        note: what the value refers to, or a figure to compare it with.
    """

    name: str
    heading: str
    value: str
    note: str = ""


def figures(results: dict[str, Any]) -> list[Figure]:
    """Return the main results of a fit."""
    found, loss = [], results["training_loss"]
    if loss is not None:
        last, _ = results["loss_curve"][-1]
        found.append(Figure("training loss", "training loss", f"{loss:.3f}", f"rank 0, last logged at step {last}"))
    for name, value in results["validation"].items():
        if name != "loss":
            found.append(Figure(f"validation {name}", name, f"{value:.3g}"))
    if results.get("sparsity") is not None:
        found.append(Figure("sparsity", "sparsity", f"{results['sparsity']:.1%}", "of the elements chosen for pruning"))
    rate, psi = results["per_second"], results["communicated_psi"]
    counted = results["counted"]
    found.append(Figure(f"{counted} a second", f"{counted}/s", "not measured" if rate is None else f"{rate:.0f}"))
    held, formula, ddp = results["peak_bytes"], results["formula_bytes"], results["ddp_bytes"]
    total = sum(held.values())
    buffers = sum(held.get(category, 0) for category in Report.WORKING_BUFFERS)
    of_formula = f"formula {_mb(formula)}" if formula else ""
    return [
        *found,
        Figure("model states at the peak", "states", _mb(total - buffers), of_formula),
        Figure("working buffers at the peak", "", _mb(buffers)),
        Figure("peak memory a rank", "memory", _mb(total), f"DDP {_mb(ddp)}" if ddp else ""),
        Figure("communicated a step", "traffic", "not counted" if psi is None else f"{psi:.2f} Psi"),
    ]


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def write_report(folder: Path, results: dict[str, Any], sample: str | None) -> None:
    """Print a text sample, if any, and a table; write ``results.json``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    if sample is not None:
        # Barely trained models generate control characters, which a terminal would interpret.
        text = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in sample)
        print(f"{' sample ':-^80}\n{text}\n{80 * '-'}")
    print(f"{results['strategy']}, {results['processes']} processes, {results['precision']}")
    show(_rows(results), right=(1,))
    print("checkpoint", results["checkpoint"] or "none")
    print("curves lightning-zero report", folder, flush=True)


def _rows(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The rows of a job's table: name, value and note."""
    rows = [
        ("parameters (Psi)", f"{results['parameters'] / 1e6:.2f} million", ""),
        ("steps", str(results["steps"]), ""),
    ]
    for name, value in dict(results["validation_curve"]).get(0, {}).items():
        rows.append((f"{name.replace('/', ' ')} before the first step", f"{value:.3g}", ""))
    if "loss" in results["validation"]:
        rows.append(("validation loss", f"{results['validation']['loss']:.3f}", ""))
    rows += [(each.name, each.value, each.note) for each in figures(results)]
    rows += [(f"  {category} at the peak", _mb(held), "") for category, held in results["peak_bytes"].items()]
    if numels := results["units"].values():
        sizes = f"{min(numels) / 1e6:.2f} to {max(numels) / 1e6:.2f} million parameters each"
        rows.append(("units, gathered one after another", str(len(numels)), sizes))
    for unit, seconds in list(results["waited"].items())[:5]:
        rows.append((f"  waited for {unit} a step", f"{1000 * seconds:.2f} ms", ""))
    return rows
