"""A report's contents as plain values, for the HTML page and for ``--json``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_zero.reporting.prediction import NotPredicted, predicted
from lightning_zero.reporting.records import Curve, Run
from lightning_zero.version import __version__

CATEGORIES = ("parameters", "gathered", "gradients", "reduction", "optimizer", "activations", "host")
"""Categories of memory, in the order in which figures stack them."""


@dataclass(frozen=True)
class Declared:
    """The user's figures for one rank's device, to estimate costs. Estimates that need a missing figure are omitted.

    Attributes:
        price: price per hour, in any currency.
        watts: power draw.
        carbon: grams of CO2 per kWh.
    """

    price: float | None = None
    watts: float | None = None
    carbon: float | None = None


def summarize(runs: list[Run], declared: Declared, predict: bool) -> dict[str, Any]:
    """Return a report's contents as plain values.

    Args:
        runs: one run, or the jobs of a sweep.
        declared: figures for the cost estimate.
        predict: whether to predict each run's memory from its manifest.
    """
    jobs = [_job(run, declared, predict) for run in runs]
    costs = [job["cost"] for job in jobs if job["cost"]]
    total = {name: sum(cost[name] for cost in costs) for name in costs[0]} if len(jobs) > 1 and costs else {}
    return {"lightning_zero": __version__, "jobs": jobs, "cost": total}


def _job(run: Run, declared: Declared, predict: bool) -> dict[str, Any]:
    manifest, results = run.manifest, run.results
    end = manifest.get("end", {})
    engine = end.get("engine") or {}
    ranks = manifest.get("ranks") or results.get("processes")
    seconds = end.get("seconds")
    over_time = _memory_over_time(run.metrics)
    return {
        "label": run.label,
        "folder": run.folder.name,
        "overrides": run.overrides,
        "status": _status(run),
        "started": manifest.get("started"),
        "seconds": seconds,
        "steps": end.get("steps") or results.get("steps"),
        "ranks": ranks,
        "nodes": manifest.get("nodes"),
        "strategy": _strategy(run),
        "precision": manifest.get("precision") or results.get("precision"),
        "parameters": manifest.get("model", {}).get("parameters") or results.get("parameters"),
        "last": {name: curve[-1][1] for name, curve in run.metrics.items()},
        "validation": results.get("validation", {}),
        "sparsity": results.get("sparsity", run.metrics.get(SPARSITY, [(0, None)])[-1][1]),
        "throughput": _throughput(run),
        "memory": {
            "measured": engine.get("peak") or results.get("peak_bytes") or _at_peak(over_time),
            "formula": engine.get("formula") or results.get("formula_bytes"),
            "ddp": engine.get("replicated") or results.get("ddp_bytes"),
            "device": end.get("device_peak_bytes"),
            "over_time": over_time,
            **_prediction(manifest, predict),
        },
        "communication": end.get("communication", []),
        "communicated_psi": results.get("communicated_psi"),
        "expected_psi": results.get("expected_psi"),
        "cost": _cost(seconds, ranks, declared),
        "config": run.config,
        "metrics": run.metrics,
        "manifest": {name: value for name, value in manifest.items() if name not in ("config", "end")},
    }


def _status(run: Run) -> str:
    if not run.has_records:
        return "no records"
    if not run.manifest:
        return "unknown"
    return run.manifest["end"]["status"] if "end" in run.manifest else "did not end"


def _strategy(run: Run) -> str | None:
    strategy = run.manifest.get("strategy")
    if strategy is None:
        return run.results.get("strategy")
    return f"ZeRO stage {strategy['stage']}" if strategy["stage"] else strategy["class"].rpartition(":")[2]


def _at_peak(over_time: dict[str, Curve]) -> dict[str, float]:
    """Bytes by category at the step where their sum is highest."""
    by_step: dict[int, dict[str, float]] = {}
    for name in over_time.keys() - {"peak"}:
        for step, value in over_time[name]:
            by_step.setdefault(step, {})[name] = value
    return max(by_step.values(), key=lambda found: sum(found.values()), default={})


def _prediction(manifest: Mapping[str, Any], predict: bool) -> dict[str, Any]:
    if not predict:
        return {"predicted": None, "not_predicted": "it was not requested"}
    try:
        return {"predicted": predicted(manifest), "not_predicted": None}
    except NotPredicted as error:
        return {"predicted": None, "not_predicted": str(error)}


def _cost(seconds: float | None, ranks: int | None, declared: Declared) -> dict[str, float]:
    """Return rank hours and, if declared figures allow, price, kWh and kg of CO2; {} if time or ranks are unknown."""
    if seconds is None or ranks is None:
        return {}
    hours = seconds * ranks / 3600
    found = {"rank_hours": hours}
    if declared.price is not None:
        found["price"] = hours * declared.price
    if declared.watts is not None:
        found["kwh"] = hours * declared.watts / 1000
        if declared.carbon is not None:
            found["co2_kg"] = found["kwh"] * declared.carbon / 1000
    return found


def groups_of(metrics: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Group curves by figure: a metric's curves (train, val, ...), or ZeroMonitor's curves of one kind and unit."""
    found: dict[str, dict[str, Curve]] = {}
    for name, curve in metrics.items():
        part, _, rest = name.partition("/")
        if is_detail(name):
            series, _, unit = rest.rpartition("_")
            group = f"{part}, {unit}" if unit in _UNITS else part
            series = series if unit in _UNITS else rest
        else:
            group = re.sub(r"^(train|training|val|valid|validation|test)[/_]|_(step|epoch)$", "", name)
            series = name
        found.setdefault(group, {})[series] = curve
    return found


def is_detail(name: str) -> bool:
    """Whether a metric is one of ZeroMonitor's many metrics for memory, communication, time or waits."""
    return name.partition("/")[0] in ("memory", "communication", "time", "wait")


SPARSITY = "pruning/sparsity"
_UNITS = ("MB", "calls", "s")


def _memory_over_time(metrics: Mapping[str, Curve]) -> dict[str, Curve]:
    """Curves of bytes by category from ZeroMonitor's metrics; ``peak`` is the highest sum so far."""
    return {
        match[1]: [(step, 1e6 * megabytes) for step, megabytes in curve]
        for name, curve in metrics.items()
        if (match := re.fullmatch(r"memory/(\w+)_MB", name)) and match[1] in (*CATEGORIES, "peak")
    }


def _throughput(run: Run) -> dict[str, Any] | None:
    """Return the unit of throughput, such as tokens, and the rate per second, from the results or ZeroMonitor."""
    if run.results.get("per_second"):
        return {"counted": run.results["counted"], "per_second": run.results["per_second"]}
    found = {
        match[1]: curve[-1][1]
        for name, curve in run.metrics.items()
        if (match := re.fullmatch(r"throughput/(\w+)_per_sec", name))
    }
    general = ("samples", "batches", "flops")  # used only if the module reports no unit of its own, such as tokens
    counted = min(found, key=lambda name: general.index(name) if name in general else -1, default=None)
    return None if counted is None else {"counted": counted, "per_second": found[counted]}
