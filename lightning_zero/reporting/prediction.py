"""Predict a run's memory with the planner: do a fake run with the settings in the run's manifest."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

import torch


class NotPredicted(Exception):
    """Raised if a run cannot be predicted; the message completes the sentence "No prediction: ..."."""


def predicted(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Run two steps on fake tensors, with the manifest's settings and zeros shaped like the run's first batch.

    Returns:
        ``peak_bytes``, the engine's bytes by category at the engine's peak, as in ``Report.peak``;
        ``process_peak_bytes``, the process's bytes by category at its peak; ``host_bytes``; ``assumptions``.

    Raises:
        NotPredicted: if the manifest is incomplete, or its module or strategy cannot be planned here.
    """
    from lightning_zero.planning.fake_run import fake_run

    if "batch" not in manifest:
        raise NotPredicted(f"manifest.json is missing or lacks the shapes of a batch: {_ADVICE}")
    strategy = manifest["strategy"]
    stage = strategy["stage"]
    if stage is None and not strategy["class"].endswith((":DDPStrategy", ":SingleDeviceStrategy")):
        raise NotPredicted(f"{strategy['class']} cannot be predicted: only ZeRO, DDP and a single device can")
    options = {name: _restored(value) for name, value in strategy.get("options", {}).items()}
    batch = _zeros(manifest["batch"])
    if "" not in sys.path:
        sys.path.insert(0, "")  # makes the project's modules in the current folder importable
    try:
        run = fake_run(
            lambda: _module(manifest),
            batch,
            ranks=manifest["ranks"],
            machines=manifest.get("nodes", 1),
            stage=stage,
            accumulate=manifest["accumulate_grad_batches"],
            precision=manifest["precision"],
            clip=manifest["gradient_clip_val"],
            transport=strategy.get("transport", "nccl"),  # DDP's buckets do not depend on the transport
            **options,
        )
    except NotPredicted:
        raise
    except Exception as error:  # raised by the project's code, which may need more than the manifest contains
        text = (str(error).strip() or "no message").splitlines()[0]
        raise NotPredicted(f"the planner failed with {type(error).__name__}: {text}") from error
    unseen = () if stage else ("reduction",)  # DDP's buckets, which a real run does not measure
    return {
        "peak_bytes": {name: nbytes for name, nbytes in run.report_peak.items() if name not in unseen},
        "process_peak_bytes": run.peak_bytes,
        "host_bytes": run.host_bytes,
        "assumptions": list(run.assumptions),
    }


_ADVICE = "add the callback lightning_zero.reporting.RunManifest to the Trainer"


def _module(manifest: Mapping[str, Any]) -> Any:
    """Create the run's module from ``lightning-zero train``'s configuration, or from its class and hyperparameters."""
    from hydra.utils import instantiate

    if "_target_" in (manifest["config"].get("model") or {}):
        return instantiate(manifest["config"]["model"])
    model = manifest["model"]
    if model["class"].startswith("__main__:"):
        raise NotPredicted(f"{model['class']} is in a script, which a report cannot import: move the class to a module")
    return pkgutil.resolve_name(model["class"])(
        **{name: _restored(value) for name, value in model["hyperparameters"].items()}
    )


def _restored(value: Any) -> Any:
    """Restore a value that ``manifest.plain`` has converted."""
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if isinstance(value, dict):
        if "repr" in value:
            raise NotPredicted(f"{value['repr']} cannot be restored from its text")
        if "class" in value:
            return pkgutil.resolve_name(value["class"])
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        return {name: _restored(each) for name, each in value.items()}
    return value


def _zeros(shape: Mapping[str, Any]) -> Any:
    """Create a batch of zeros from the result of ``manifest.shapes_of``."""
    ((kind, value),) = shape.items()
    if kind == "tensor":
        dtype, sizes = value
        return torch.zeros(sizes, dtype=getattr(torch, dtype), device="cpu")
    if kind == "mapping":
        return {name: _zeros(each) for name, each in value.items()}
    if kind == "value":
        return _restored(value)
    return {"list": list, "tuple": tuple}[kind](map(_zeros, value))
