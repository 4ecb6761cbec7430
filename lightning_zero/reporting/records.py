"""Read the records of runs: files written by ``lightning-zero train``, ``RunManifest`` and loggers."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from lightning_zero.io.untrusted import read_yaml
from lightning_zero.reporting.manifest import NAME as MANIFEST
from lightning_zero.reporting.manifest import plain

Curve = list[tuple[int, float]]

OVERRIDES = ".hydra/overrides.yaml"
_EVENTS = "events.out.tfevents.*"
_DEPTH = 3
"""Maximum depth of a run's folder below the given folder. The jobs of a sweep are at depth 1."""


class ReportError(Exception):
    """Raised if a report cannot be written; the message is one line."""


@dataclass
class Run:
    """One run, or one job of a sweep.

    Attributes:
        folder: the folder with the run's records.
        label: the overrides or settings that distinguish this job from the other jobs, or the folder's name.
        overrides: Hydra's overrides, as on the command line.
        manifest: the manifest from ``RunManifest``; empty if there is none.
        results: ``results.json`` from ``lightning-zero train``; empty if there is none.
        config: the configuration; empty if it is unknown.
        metrics: metrics by name, from loggers and ``results.json``, each a list of (step, value).
    """

    folder: Path
    label: str
    overrides: list[str] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)

    @property
    def has_records(self) -> bool:
        return bool(self.manifest or self.results or self.metrics)


def read_runs(folder: Path) -> list[Run]:
    """Read the run in a folder, or the runs in its subfolders: the jobs of a sweep, or the versions of a logger.

    Raises:
        ReportError: if ``folder`` is not a folder, no run has records, or a record cannot be read.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: pass the folder of a run or of a sweep")
    runs = [_read(each) for each in _run_folders(folder, _DEPTH)]
    if len(runs) > 1:
        labels = labels_of({run.folder: run.overrides or _settings(run.config) for run in runs})
        for run in runs:
            run.label = labels[run.folder]
    if not any(run.has_records for run in runs):
        raise ReportError(
            f"{folder} has no records of a run: no {MANIFEST} from RunManifest, no results.json from lightning-zero "
            "train, no metrics.csv from CSVLogger, and no event files from TensorBoard"
        )
    return runs


def overrides_of(folder: Path) -> list[str]:
    """Hydra's overrides for the job in a folder; empty if Hydra has written none."""
    file = folder / OVERRIDES
    try:
        return [str(override) for override in read_yaml(file)] if file.exists() else []
    except (TypeError, ValueError, yaml.YAMLError):
        raise ReportError(f"{file} is not a YAML file with a list of overrides") from None


def labels_of(overrides: Mapping[Path, list[str]]) -> dict[Path, str]:
    """Label each job by the overrides that differ between jobs, and by its folder if these overrides are not unique."""
    common = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    own = {
        job: " ".join(override for override in given if override not in common).replace('"', "")
        for job, given in overrides.items()
    }
    times = Counter(own.values())
    depth = next(depth for depth in count(1) if len({job.parts[-depth:] for job in own}) == len(own))
    places = {job: "/".join(job.parts[-depth:]) for job in own}
    return {
        job: label if label and times[label] == 1 else f"{label} {places[job]}".strip() for job, label in own.items()
    }


def _run_folders(folder: Path, depth: int) -> list[Path]:
    names = (MANIFEST, "results.json", "metrics.csv", OVERRIDES)
    if any((folder / name).exists() for name in names) or any(folder.glob(_EVENTS)):
        return [folder]
    children = sorted(filter(Path.is_dir, folder.iterdir()), key=lambda child: (len(child.name), child.name))
    return [found for child in children if depth for found in _run_folders(child, depth - 1)]


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each setting in a nested configuration."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Return a configuration in the form of overrides, for runs that were not started by Hydra."""
    return [f"{name}={value}" for name, value in flat(config)]


def _read(folder: Path) -> Run:
    # Hydra, loggers and earlier versions of RunManifest write passwords and keys, which a report must not show.
    run = Run(folder, folder.name, plain(overrides_of(folder)))
    run.manifest = plain(_read_json(folder / MANIFEST))
    run.results = _read_json(folder / "results.json")
    run.config = run.manifest.get("config") or plain(_read_config(folder))
    run.metrics = _curves_of(run.results)
    for file in _newest(folder.rglob("metrics.csv")):
        run.metrics |= _read_csv(file)
    for file in _newest(folder.rglob(_EVENTS)):
        run.metrics |= _read_events(file.parent)
    return run


def _newest(files: Iterable[Path]) -> list[Path]:
    """Return a list with a logger's newest file, empty if there is none. A resumed run may have left several files."""
    return sorted(files, key=lambda file: file.stat().st_mtime)[-1:]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ReportError(f"{file} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _read_config(folder: Path) -> dict[str, Any]:
    """Hydra's configuration, or the module's hyperparameters as a logger has written them."""
    for file in (folder / ".hydra/config.yaml", *_newest(folder.rglob("hparams.yaml"))):
        if file.exists():
            try:
                return dict(read_yaml(file))
            except (ValueError, yaml.YAMLError):  # a logger has written Python objects to the file
                continue
    return {}


def _read_csv(file: Path) -> dict[str, Curve]:
    """The metrics in a CSVLogger file, by name."""
    found: dict[str, Curve] = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            step = row.pop("step", None)
            for name, text in row.items():
                if step and text and name != "epoch":
                    try:
                        found.setdefault(name, []).append((int(float(step)), float(text)))
                    except ValueError as error:
                        raise ReportError(f"{file} is not a CSVLogger file: {error}") from None
    return found


def _read_events(folder: Path) -> dict[str, Curve]:
    """The scalars in a folder's TensorBoard event files, by name."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ReportError(
            f"{folder} has TensorBoard event files, but the package tensorboard is missing: "
            'pip install "lightning_zero[tensorboard]"'
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: load all values
    names = (name for name in events.Tags()["scalars"] if name not in ("epoch", "hp_metric"))
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


def _curves_of(results: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves in the results of ``lightning-zero train``."""
    found: dict[str, Curve] = {"loss": [(step, loss) for step, loss in results.get("loss_curve", ())]}
    for step, metrics in results.get("validation_curve", ()):
        for name, value in metrics.items():
            found.setdefault(name, []).append((step, value))
    return {name: curve for name, curve in found.items() if curve}
