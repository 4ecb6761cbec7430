"""Report at the end of training: a table and results.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_zero.callbacks.monitor import ZeroMonitor, ranks_with_data
from lightning_zero.callbacks.pruning import MagnitudePruning
from lightning_zero.engine import Report, layout
from lightning_zero.io.text import print_table

_OF_MONITOR = ("per_second", "peak_bytes", "formula_bytes", "ddp_bytes", "waited", "loss_curve", "validation_curve")


def collect(trainer: Trainer, monitor: ZeroMonitor, metrics: Mapping[str, float], checkpoint: str) -> dict[str, Any]:
    """Return all results of a fit as plain values; the keys of ``metrics`` have the form ``validation/NAME``."""
    stage = getattr(trainer.strategy, "stage", None)
    within = trainer.strategy.config.shard_within if stage else None  # type: ignore[attr-defined]
    within = trainer.world_size // trainer.num_nodes if within == "node" else within
    is_divided = ranks_with_data(trainer) < trainer.world_size  # tensor parallelism: a rank communicates only its share
    expected = None
    if stage and not is_divided:
        placements = layout.placements_of(stage)
        expected = placements.communicated_psi(trainer.accumulate_grad_batches, trainer.world_size, within)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    counted = "samples" if monitor.length_fn is None else getattr(trainer.lightning_module, "counted", "items")
    recipe = getattr(trainer.lightning_module, "float8", None)  # of the zoo's models
    communicated = None if monitor.elements_per_step is None else monitor.elements_per_step / monitor.numel
    return {
        "strategy": f"ZeRO stage {stage}" if stage else type(trainer.strategy).__name__,
        "processes": trainer.world_size,
        "precision": ", float8 ".join(filter(None, (str(trainer.precision), recipe))),
        "parameters": monitor.numel,
        "steps": trainer.global_step,
        "training_loss": monitor.loss_curve[-1][1] if monitor.loss_curve else None,
        "validation": {name.removeprefix("validation/"): value for name, value in metrics.items()},
        "counted": counted,
        **{name: getattr(monitor, name) for name in _OF_MONITOR},
        "units": {name or "root": numel for name, numel in monitor.units.items()},
        "communicated_psi": communicated,
        "expected_psi": expected,
        "sparsity": next((each.sparsity for each in callbacks if isinstance(each, MagnitudePruning)), None),
        "checkpoint": checkpoint,
    }


DETAILS = ("formula", "buffers", "DDP's memory", "traffic's formula")
"""Names of results that a sweep's table leaves out, so that it is not too wide for a terminal."""


def figures(results: dict[str, Any]) -> dict[str, str]:
    """The main results of a fit as text, by name: a job's table shows all, a sweep's all but ``DETAILS``."""
    found = {}
    if results["training_loss"] is not None:
        found["training loss"] = f"{results['training_loss']:.3f}"
    for name, value in results["validation"].items():
        found[f"validation {name}"] = f"{value:.4g}"
    if results.get("sparsity") is not None:
        found["sparsity"] = f"{results['sparsity']:.1%}"
    rate, psi, peak = results["per_second"], results["communicated_psi"], results["peak_bytes"]
    found[f"{results['counted']}/s"] = "not measured" if rate is None else f"{rate:.0f}"
    total = sum(peak.values())
    buffers = sum(peak.get(category, 0) for category in Report.WORKING_BUFFERS)
    sizes = {"states": total - buffers, "formula": results["formula_bytes"], "buffers": buffers, "memory": total}
    sizes["DDP's memory"] = results["ddp_bytes"]
    found |= {name: f"{nbytes / 1e6:.1f} MB" for name, nbytes in sizes.items() if nbytes is not None}
    found["traffic"] = "not counted" if psi is None else f"{psi:.2f} Psi"
    if results["expected_psi"] is not None:
        found["traffic's formula"] = f"{results['expected_psi']} Psi"
    return found


def write_report(folder: Path, results: dict[str, Any], sample: str | None) -> None:
    """Print a text sample, if any, and a table; write ``results.json``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    if sample is not None:
        # Barely trained models generate control characters, which a terminal would interpret.
        text = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in sample)
        print(f"{' sample ':-^80}\n{text}\n{80 * '-'}")
    print(f"{results['strategy']}, {results['processes']} processes, {results['precision']}")
    rows = [("parameters (Psi)", f"{results['parameters'] / 1e6:.2f} million"), ("steps", str(results["steps"]))]
    for name, value in dict(results["validation_curve"]).get(0, {}).items():
        rows.append((f"{name.replace('/', ' ')} before the first step", f"{value:.4g}"))
    print_table([*rows, *figures(results).items(), ("units", str(len(results["units"])))], right=(1,))
    print("checkpoint", results["checkpoint"] or "none")
    print("curves lightning-zero report", folder, flush=True)
