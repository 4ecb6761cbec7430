"""Detect drift of inputs or outputs by comparing recent values with a saved reference."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zero.engine import process_group

_BINS = 10
_LEAST = 1e-4  # minimum fraction of values assumed for a bin, since an empty bin would make the index infinite


class Drift(NamedTuple):
    """How far recent values of one quantity are from the reference values.

    Attributes:
        psi: the population stability index over the reference's deciles; 0 for equal distributions.
        ks: the Kolmogorov-Smirnov statistic: the largest distance between the distribution functions, 0 to 1.
        p: the probability that ``ks`` would be at least this large for two samples from the same distribution.
    """

    psi: float
    ks: float
    p: float

    def exceeds(self, psi_above: float, ks_above: float) -> bool:
        """Whether ``psi`` or ``ks`` is above its bound; ``ks`` counts only if it is significant (p < 0.01)."""
        return self.psi > psi_above or (self.ks > ks_above and self.p < 0.01)


def drift_of(reference: Mapping[str, Any], recent: Mapping[str, Any]) -> dict[str, Drift]:
    """Compare each quantity's recent values with its reference values. The mappings' keys are quantity names.

    Raises:
        ImportError: if scipy is not installed.
        ValueError: if a quantity of the reference has no values but NaN, in the reference or in the recent data.
    """
    try:
        from scipy.stats import ks_2samp
    except ImportError:
        raise ImportError('Drift cannot be computed without scipy: pip install "lightning_zero[drift]"') from None
    found = {}
    for name in reference:
        before, now = (values[~np.isnan(values)] for values in map(np.asarray, (reference[name], recent.get(name, []))))
        if not len(before) or not len(now):
            raise ValueError(
                f"there are no values of {name!r} to compare: the quantities are {sorted(reference)} in the reference, "
                f"{sorted(recent)} in the recent data. Record both with the same DriftMonitor(values=...)."
            )
        ks, p = ks_2samp(before, now)
        found[name] = Drift(_psi(before, now), float(ks), float(p))
    return found


def _psi(reference: np.ndarray, recent: np.ndarray) -> float:
    # Bin edges: deciles or, for a quantity with few distinct values, those values.
    edges = np.unique(np.quantile(reference, np.linspace(0, 1, _BINS + 1)[1:-1]))

    def parts(values: np.ndarray) -> np.ndarray:
        counts = np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1)
        return np.maximum(counts / len(values), _LEAST)

    before, now = parts(reference), parts(recent)
    return float(((now - before) * np.log(now / before)).sum())


class DriftMonitor(Callback):
    """Records values from an evaluation or prediction on all ranks, and compares them with a reference.

    Args:
        values: a function of a step's outputs and its batch that returns tensors (of inputs or outputs) by quantity
            name; every element counts as one value.
        reference: the file with the values that an earlier run saved; None to compare nothing.
        save_to: the file (``.npz``) in which to save this run's values; None to save nothing.
        psi_above: the population stability index above which a quantity has drifted.
        ks_above: the Kolmogorov-Smirnov statistic above which a quantity has drifted, if the statistic is significant.
        on_drift: called on rank 0 if any quantities have drifted, with their figures by name; for example, to start
            retraining.

    Attributes:
        found: the figures from the last comparison, by quantity name; empty on ranks other than 0.
        drifted: the entries of ``found`` for quantities that have drifted.
    """

    def __init__(
        self,
        values: Callable[[Any, Any], Mapping[str, Tensor]],
        reference: str | Path | None = None,
        *,
        save_to: str | Path | None = None,
        psi_above: float = 0.2,
        ks_above: float = 0.1,
        on_drift: Callable[[dict[str, Drift]], Any] | None = None,
    ) -> None:
        self._values, self._save_to, self._on_drift = values, save_to, on_drift
        self._reference = read_values(reference) if reference is not None else None
        self._bounds = psi_above, ks_above
        self._seen: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.found: dict[str, Drift] = {}
        self.drifted: dict[str, Drift] = {}

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen.clear()

    def _update(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        for name, values in self._values(outputs, batch).items():
            flat = values.detach().float().flatten()
            self._seen[name].append(flat[~flat.isnan()])

    def _end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        own = {name: torch.cat(parts).cpu().numpy() for name, parts in self._seen.items()}
        everyone = process_group.all_gather_objects(own) if trainer.world_size > 1 else [own]
        names = dict.fromkeys(name for each in everyone for name in each)  # ranks may have seen others, in any order
        recent = {name: np.concatenate([each[name] for each in everyone if name in each]) for name in names}
        if not trainer.is_global_zero:
            return
        if self._save_to is not None:
            np.savez(self._save_to, **recent)  # type: ignore[arg-type]  # mypy mistakes the values for options
        if self._reference is None:
            return
        self.found = drift_of(self._reference, recent)
        self.drifted = {name: drift for name, drift in self.found.items() if drift.exceeds(*self._bounds)}
        metrics = {f"drift/{name}/{key}": value for name, d in self.found.items() for key, value in d._asdict().items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)
        if self.drifted and self._on_drift is not None:
            self._on_drift(self.drifted)

    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _start
    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _update
    on_validation_epoch_end = on_test_epoch_end = on_predict_epoch_end = _end


def read_values(path: str | Path) -> dict[str, Any]:
    """Read the values that a ``DriftMonitor`` has saved, by quantity name.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file contains anything else.
    """
    try:
        with np.load(path) as file:
            values = dict(file)
        if all(each.ndim == 1 and each.dtype.kind in "iuf" for each in values.values()):
            return values
    except (AttributeError, ValueError, TypeError, EOFError, BadZipFile, zlib.error):
        pass  # numpy's text recommends unpickling
    raise ValueError(f"{path} has other contents than arrays of numbers, as DriftMonitor(save_to=...) writes them")
