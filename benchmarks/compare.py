"""Whether one benchmark result, or one run with ZeroMonitor, takes more time or memory than another.

    python benchmarks/compare.py OLD.json NEW.json
    python benchmarks/compare.py benchmarks/results NEW --relative-to ddp       # folders of results
    python benchmarks/compare.py logs/before logs/after                         # runs with ZeroMonitor and a CSVLogger

The exit code is 1 if something became slower or larger, and 2 if there is nothing to compare.
"""

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import markdown_table
from scipy.stats import mannwhitneyu

_UNITS = {
    **dict.fromkeys(("seconds", "start_up_seconds", "overhead", "cpu", "hooks_seconds", "setup", "step"), "s"),
    **dict.fromkeys(("stalls", "written", "load", "load_cached", "step_while_writing"), "s"),
    "turns": "x",
    **dict.fromkeys(("live_bytes", "resident_bytes", "allocated_bytes", "reserved_bytes"), "bytes"),
    **dict.fromkeys(("asked_bytes", "sent_bytes", "resident", "allocated", "peak", "bytes"), "bytes"),
}
"""Units of readings in benchmark results, by the name of the reading. For every reading, more is worse."""
_DERIVED = {"about", "costs", "medians"}
_PLACES = {"systems", "rounds", "series", "models", "strategies"}
"""Names that are left out when the path of a reading is printed."""
_RESAMPLES = 2000

Path_ = tuple[str, ...]


class Series(NamedTuple):
    """Readings of one quantity. The unit is ``"s"``, ``"x"`` (multiples of another system's time) or ``"bytes"``."""

    unit: str
    values: list[float]


@dataclass(frozen=True)
class Change:
    """Comparison of the old and the new readings of one quantity.

    Attributes:
        old, new: medians of the readings.
        samples: number of old and of new readings.
        ratio: the new median divided by the old one.
        interval: 95 % confidence interval of the ratio, by resampling; None if there are fewer than two old or new
            readings, or if ``old`` is zero.
        p: p-value of a two-sided Mann-Whitney U test; None if there are fewer than two old or new readings.
        verdict: ``"slower"`` or ``"larger"``, ``"faster"`` or ``"smaller"``, or empty if unchanged or uncertain.
    """

    name: str
    unit: str
    old: float
    new: float
    samples: tuple[int, int]
    ratio: float
    interval: tuple[float, float] | None
    p: float | None
    verdict: str


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Compare two benchmark results, two folders of results, or the folders of two runs with "
        "ZeroMonitor and a CSVLogger. The exit code is 1 if something became slower or takes more memory.",
    )
    made.add_argument("old", type=Path, metavar="OLD", help="file or folder")
    made.add_argument("new", type=Path, metavar="NEW", help="file or folder")
    made.add_argument("--threshold", type=float, default=1.05, help="ignore changes up to this ratio (default: 1.05)")
    made.add_argument("--alpha", type=float, default=0.05, help="significance level of the test (default: 0.05)")
    made.add_argument(
        "--relative-to",
        metavar="SYSTEM",
        help="divide times by those of a system in the same file, such as ddp; for machines whose speeds "
        "differ or vary",
    )
    made.add_argument("--json", action="store_true", help="print the changes as JSON")
    return made


def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    notes: list[str] = []
    try:
        if given.threshold < 1 or not 0 < given.alpha < 1:
            raise ValueError(f"--threshold {given.threshold} must be >= 1, and --alpha {given.alpha} between 0 and 1")
        changes = compare(given.old, given.new, given.threshold, given.alpha, given.relative_to, notes)
    except (OSError, ValueError) as error:
        notes.append(f"compare.py: {error}")
        return 2
    finally:
        print(*dict.fromkeys(notes), sep="\n", end="\n" * bool(notes), file=sys.stderr)
    if given.json:
        found = [asdict(change) | {"ratio": change.ratio if change.old else None} for change in changes]
        document = {"threshold": given.threshold, "alpha": given.alpha, "series": found, "notes": notes}
        print(json.dumps(document, indent=1))
    else:
        _print(changes)
    return int(any(change.verdict in ("slower", "larger") for change in changes))


def compare(
    old: Path, new: Path, threshold: float, alpha: float, relative_to: str | None, notes: list[str]
) -> list[Change]:
    """Compare all readings that two files or folders have in common.

    Args:
        notes: list to which warnings are appended, for example about readings that are missing or too few.

    Raises:
        OSError, ValueError: if a file cannot be read, or there is nothing to compare.
    """
    before, after = _read(old, notes), _read(new, notes)
    changes = []
    for label in filter(after.__contains__, before):
        machines = [found[label].hardware for found in (before, after)]
        if machines[0] != machines[1] and relative_to is None:
            notes.append(
                f"{old} was measured on {machines[0]}, {new} on {machines[1]}: compare times with --relative-to"
            )
        ones, others = (_relative(found[label].series, relative_to) for found in (before, after))
        missing = [_name(label, path) for path in ones if path not in others]
        if missing:
            notes.append(f"{new} lacks {len(missing)} of the readings in {old}: {_listed(missing)}")
        changes += [
            change_of(_name(label, path), series, others[path], threshold, alpha)
            for path, series in ones.items()
            if path in others and any((*series.values, *others[path].values))
        ]
    if alone := sorted(before.keys() ^ after.keys()):
        notes.append(f"found in only one of {old} and {new}: {_listed(alone)}")
    if not changes:
        beside = f" that can be expressed relative to {relative_to}" if relative_to else ""
        raise ValueError(f"{old} and {new} have no readings in common{beside}")
    if few := [each for each in changes if each.unit != "bytes" and _least_p(*each.samples) > alpha]:
        names = _listed([f"{each.name} ({each.samples[0]} and {each.samples[1]})" for each in few])
        notes.append(f"too few samples for a significant change at --alpha {alpha:g}: {names}")
    return changes


def _least_p(old: int, new: int) -> float:
    """Return the smallest p-value possible with these sample counts: that of two series that do not overlap."""
    return 2 / math.comb(old + new, old)


def change_of(name: str, old: Series, new: Series, threshold: float, alpha: float) -> Change:
    """Compare two series. Times count as changed only if the test is significant; bytes are exact and need no test."""
    medians = statistics.median(old.values), statistics.median(new.values)
    ratio = medians[1] / medians[0] if medians[0] else math.inf
    enough = min(len(old.values), len(new.values)) > 1
    p = _p(old.values, new.values) if enough else None
    verdict = ""
    if old.unit == "bytes" or (p is not None and p < alpha):
        more, less = ("larger", "smaller") if old.unit == "bytes" else ("slower", "faster")
        verdict = more if ratio > threshold else less if ratio < 1 / threshold else ""
    interval = _interval(old.values, new.values) if enough and medians[0] else None
    return Change(name, old.unit, *medians, (len(old.values), len(new.values)), ratio, interval, p, verdict)


def _p(old: Sequence[float], new: Sequence[float]) -> float:
    if len({*old, *new}) == 1:
        return 1.0
    return float(mannwhitneyu(old, new, alternative="two-sided").pvalue)


def _interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float]:
    drawn = np.random.default_rng(0)
    before, after = (np.median(drawn.choice(values, (_RESAMPLES, len(values))), axis=1) for values in (old, new))
    low, high = np.quantile(after / before, (0.025, 0.975))
    return float(low), float(high)


# -- reading ----------------------------------------------------------------------------------------------------------


class _Result(NamedTuple):
    series: dict[Path_, Series]
    hardware: str | None


def _read(place: Path, notes: list[str]) -> dict[str, _Result]:
    """Read a file's result, or all results or runs in a folder; return them by file name or by the run's label."""
    if not place.exists():
        raise ValueError(f"{place}: there is no such file or folder")
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    results = {file: result for file in files if "about" in (result := _result(file))}
    if not results and place.is_dir():
        return _runs(place)
    if not results:
        raise ValueError(f"{place} is not a benchmark result of this project: it has no 'about' entry")
    found = {}
    for file, result in results.items():
        series = series_of(result)
        found[file.stem if place.is_dir() else ""] = _Result(series, result["about"].get("hardware"))
        if not series:
            notes.append(
                f"{file} has no samples, only statistics computed from them: measure again with "
                f"{result['about'].get('command', 'its benchmark')}"
            )
    return found


def _result(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def series_of(result: Mapping[str, Any]) -> dict[Path_, Series]:
    """Return the readings in a benchmark's result, by their paths in the nested dictionaries.

    Times outside of lists are left out: each of these is a median of other readings.
    """
    found: dict[Path_, Series] = {}
    for path, value, is_listed in _numbers(result):
        unit = next((_UNITS[name] for name in reversed(path) if name in _UNITS), None)
        if unit == "bytes" or (unit is not None and is_listed):
            found.setdefault(path, Series(unit, [])).values.append(value)
    return found


def _numbers(value: Any, path: Path_ = (), is_listed: bool = False) -> Iterator[tuple[Path_, float, bool]]:
    """Yield each number, its path, and whether a list contains it. Numbers that share a path repeat one reading.

    Items of a list share a path. Dictionaries do so only in the outermost list under ``rounds``: in any other list,
    each dictionary holds separate readings, for example those of one size.
    """
    if isinstance(value, list) and value and isinstance(value[0], Mapping) and (is_listed or "rounds" not in path):
        value = {str(place): each for place, each in enumerate(value)}
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name not in _DERIVED:
                yield from _numbers(each, (*path, str(name)), is_listed)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, path, True)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value), is_listed


def _runs(folder: Path) -> dict[str, _Result]:
    """Read the times and memory that ZeroMonitor has logged to CSVLoggers, by the path of the logger's folder."""
    files = sorted(folder.rglob("metrics.csv"))
    labels = {file: str(file.parent.relative_to(folder)) if len(files) > 1 else "" for file in files}
    found = {labels[file]: _Result(_logged(file), None) for file in files}
    if not any(result.series for result in found.values()):
        raise ValueError(f"{folder} has no metrics from ZeroMonitor: add the callback and a CSVLogger")
    return found


def _logged(file: Path) -> dict[Path_, Series]:
    found: dict[Path_, Series] = {}
    with file.open(newline="") as text:
        cells = [cell for row in csv.DictReader(text) for cell in row.items()]
    for name, value in cells:
        if not value:
            continue
        if name.startswith("time/") or name == "throughput/step_s":
            found.setdefault((name,), Series("s", [])).values.append(float(value))
        elif name.startswith("memory/") and name.endswith("_MB"):
            found.setdefault((name,), Series("bytes", [])).values.append(1e6 * float(value))
    return found


def _relative(series: dict[Path_, Series], system: str | None) -> dict[Path_, Series]:
    """Express times as multiples of a system's median time; leave memory unchanged."""
    if system is None:
        return series
    found = {path: each for path, each in series.items() if each.unit == "bytes"}
    for path, (unit, values) in series.items():
        beside = [(*path[:place], system, *path[place + 1 :]) for place, name in enumerate(path) if name != system]
        base = next((series[each] for each in beside if each in series), None)
        if base is not None and unit != "bytes":
            found[path] = Series("x", [value / statistics.median(base.values) for value in values])
    return found


# -- printing ---------------------------------------------------------------------------------------------------------


def _name(label: str, path: Path_) -> str:
    return f"{label}: " * bool(label) + "/".join(name for name in path if name not in _PLACES)


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def _print(changes: Sequence[Change]) -> None:
    head = ["reading", "old", "new", "samples", "ratio", "95 % interval", "p", "verdict"]
    rows = []
    for change in changes:
        scale, unit = (1e6, "MB") if change.unit == "bytes" else (1, change.unit)
        medians = [f"{median / scale:.4g} {unit}" for median in (change.old, change.new)]
        interval = "" if change.interval is None else f"{change.interval[0]:.3f} - {change.interval[1]:.3f}"
        samples = f"{change.samples[0]}, {change.samples[1]}"
        p = "" if change.p is None else f"{change.p:.2g}"
        rows.append([change.name, *medians, samples, f"{change.ratio:.3f}", interval, p, change.verdict])
    print(*markdown_table(head, rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
