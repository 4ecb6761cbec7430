"""Read what runs have written: manifests, results, a CSVLogger's metrics, Hydra's overrides. All are read as data."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_zero.io.annotations import matches
from lightning_zero.io.paths import read_json
from lightning_zero.io.plain import plain
from lightning_zero.io.untrusted import read_yaml
from lightning_zero.reporting.manifest import NAME as MANIFEST

Curve = list[tuple[int, float]]

RESULTS, OVERRIDES = "results.json", ".hydra/overrides.yaml"
_DEPTH = 3  # of a run's folder below the given folder; the jobs of a sweep are at depth 1


class ReportError(Exception):
    """Raised if a report cannot be written; the message is one line."""


class Run(NamedTuple):
    """What one run, or one job of a sweep, has written, without passwords and keys. Missing files are empty here."""

    folder: Path
    name: str  # the folder's path below the given one, or the given folder's name
    overrides: list[str]
    manifest: dict[str, Any]
    results: dict[str, Any]
    metrics: dict[str, Curve]


def read_runs(folder: Path) -> list[Run]:
    """Read the run in a folder, or the runs in its subfolders: the jobs of a sweep, or the versions of a logger.

    Raises:
        ReportError: if ``folder`` is not a folder, no run has records, or a record cannot be read.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder: pass the folder of a run or of a sweep")
    runs = [_read(each, folder) for each in _run_folders(folder, _DEPTH)]
    if not any(run.manifest or run.results or run.metrics for run in runs):
        raise ReportError(
            f"{folder} has no records of a run: no {MANIFEST} from RunManifest, no {RESULTS} from lightning-zero "
            "train, and no metrics.csv from CSVLogger"
        )
    return runs


def overrides_of(folder: Path) -> list[str]:
    """Hydra's overrides for the job in a folder; empty if Hydra has written none. Raises ReportError if damaged."""
    found: Any = None
    try:
        found = read_yaml(folder / OVERRIDES) if _is_readable(folder, OVERRIDES) else []
    except (OSError, ValueError, yaml.YAMLError):
        pass
    if not matches(found, list[str]):
        raise ReportError(f"{folder / OVERRIDES} is not a YAML file with a list of overrides")
    return found


def _run_folders(folder: Path, depth: int) -> list[Path]:
    if any(os.path.lexists(folder / name) for name in (MANIFEST, RESULTS, "metrics.csv", OVERRIDES)):
        return [folder]
    children = [child for child in folder.iterdir() if depth and child.is_dir() and not child.is_symlink()]
    ordered = sorted(children, key=lambda child: (len(child.name), child.name))
    return [found for child in ordered for found in _run_folders(child, depth - 1)]


def _read(folder: Path, root: Path) -> Run:
    name = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
    results = _json_in(folder, RESULTS)
    metrics: dict[str, Curve] = {}
    for step, loss in _pairs(results, "loss_curve", float, folder):
        metrics.setdefault("loss", []).append((step, loss))
    for step, found in _pairs(results, "validation_curve", dict[str, float], folder):
        for metric, value in found.items():
            metrics.setdefault(metric, []).append((step, value))
    files = sorted(folder.rglob("metrics.csv"), key=lambda file: file.lstat().st_mtime)  # a resumed run has several
    logged = _curves_in(folder, files[-1].relative_to(folder).as_posix()) if files else {}
    return Run(folder, name, plain(overrides_of(folder)), _json_in(folder, MANIFEST), results, metrics | logged)


def _pairs(results: dict[str, Any], name: str, kind: Any, folder: Path) -> list[Any]:
    """Take a list of pairs of a step and a value out of a job's results."""
    pairs = results.pop(name, [])
    if not matches(pairs, list[list[Any]]) or not all(
        len(pair) == 2 and matches(pair[0], int) and matches(pair[1], kind) for pair in pairs
    ):
        raise ReportError(f"{folder / RESULTS}: {name} must be a list of pairs of a step and a value")
    return pairs


def _json_in(folder: Path, name: str) -> dict[str, Any]:
    try:
        return plain(read_json(folder / name)) if _is_readable(folder, name) else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(" ".join(str(error).split())) from None


def _curves_in(folder: Path, name: str) -> dict[str, Curve]:
    """Each metric's curve in a CSVLogger's file."""
    found: dict[str, Curve] = {}
    try:
        names, *rows = list(csv.reader((_text_in(folder, name) or "\n").splitlines())) or [[]]
        for row in rows:
            values = dict(zip(names, row))
            step = values.pop("step", "")
            for metric, value in values.items():
                if step and value and metric != "epoch":
                    found.setdefault(metric, []).append((int(float(step)), float(value)))
    except (ValueError, OverflowError, csv.Error) as error:
        raise ReportError(f"{folder / name} is not a CSVLogger file: {error}") from None
    return found


def _text_in(folder: Path, name: str) -> str | None:
    """The text of a file, None if it does not exist."""
    try:
        return (folder / name).read_text(encoding="utf-8") if _is_readable(folder, name) else None
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{folder / name} cannot be read: {error}") from None


def _is_readable(folder: Path, name: str) -> bool:
    """Whether a file exists. A link is refused, since it could make a report publish any file of its author."""
    path, expected = folder / name, os.path.join(os.path.realpath(folder), name)
    if not os.path.lexists(path):
        return False
    if os.path.realpath(path) != expected or not path.is_file():
        raise ReportError(f"{path} is a link or not a regular file, so a report does not read it")
    return True
