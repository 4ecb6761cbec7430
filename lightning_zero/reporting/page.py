"""The page of a report: one HTML file without external resources. Requires jinja2 and matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from importlib import resources
from typing import Any, NamedTuple

from lightning_zero.io.sizes import in_bytes
from lightning_zero.reporting import figures
from lightning_zero.reporting.records import flat
from lightning_zero.reporting.summary import CATEGORIES, groups_of, is_detail

MAIN_PACKAGES = ("python", "torch", "lightning", "pytorch-lightning", "lightning_zero", "torchmetrics", "hydra-core")


class Drawing(NamedTuple):
    """A figure with its caption."""

    title: str
    svg: str


def render(summary: Mapping[str, Any], title: str) -> str:
    """Return a summary's page as HTML."""
    jobs = summary["jobs"]
    return _template().render(
        title=title,
        summary=summary,
        jobs=jobs,
        comparison=list(_comparison(jobs)) if len(jobs) > 1 else [],
        columns=columns_of(jobs),
        drawings=[{part: list(draw(job)) for part, draw in _PARTS.items()} for job in jobs],
        main_packages=MAIN_PACKAGES,
    )


def columns_of(jobs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the columns of the table of jobs: for each heading, one text per job."""
    names = dict.fromkeys(name for job in jobs for name in job["validation"])
    last = dict.fromkeys(name for job in jobs for name in job["last"] if not is_detail(name))
    metrics = {f"validation {name}": [number(job["validation"].get(name)) for job in jobs] for name in names}
    if not names:
        metrics = {f"last {name}": [number(job["last"].get(name)) for job in jobs] for name in last}
    columns = {
        "status": [job["status"] for job in jobs],
        "strategy": [job["strategy"] or "" for job in jobs],
        **metrics,
        "sparsity": ["" if job["sparsity"] is None else f"{job['sparsity']:.1%}" for job in jobs],
        "throughput": [rate(job) for job in jobs],
        "peak memory a rank": [
            in_bytes(sum(job["memory"]["measured"].values())) if job["memory"]["measured"] else "" for job in jobs
        ],
        "predicted": [
            in_bytes(sum(job["memory"]["predicted"]["peak_bytes"].values())) if job["memory"]["predicted"] else ""
            for job in jobs
        ],
        "time": [duration(job["seconds"]) for job in jobs],
    }
    return {name: texts for name, texts in columns.items() if any(texts)}


def _comparison(jobs: list[dict[str, Any]]) -> Iterator[Drawing]:
    """Yield figures that compare jobs: one for each metric that several jobs have, and one for memory."""
    names = dict.fromkeys(name for job in jobs for name in job["metrics"] if not is_detail(name))
    for name in names:
        series = {job["label"]: job["metrics"][name] for job in jobs if name in job["metrics"]}
        if len(series) > 1:
            yield Drawing(name, figures.curves(series, name))
    held = {job["label"]: job["memory"]["measured"] for job in jobs if job["memory"]["measured"]}
    if held:
        yield Drawing("measured peak memory of rank 0", figures.memory_bars(held, {}))


def _metrics(job: dict[str, Any]) -> Iterator[Drawing]:
    for group, series in groups_of(job["metrics"]).items():
        shown = (
            series
            if not group.startswith("memory")
            else {n: c for n, c in series.items() if n not in (*CATEGORIES, "peak")}
        )
        if shown:
            yield Drawing(group, figures.curves(shown, group))


def _memory(job: dict[str, Any]) -> Iterator[Drawing]:
    memory = job["memory"]
    shares = {"measured": memory["measured"]} if memory["measured"] else {}
    if memory["predicted"]:
        shares["predicted"] = memory["predicted"]["peak_bytes"]
    names = {"formula": "the paper's formula", "ddp": "model states under DDP"}
    lines = {words: memory[name] for name, words in names.items() if memory[name]}
    if shares:
        yield Drawing("peak memory of rank 0", figures.memory_bars(shares, lines))
    if memory["over_time"]:
        peak = sum(memory["predicted"]["peak_bytes"].values()) if memory["predicted"] else None
        yield Drawing("memory over time", figures.memory_over_time(memory["over_time"], peak))


def _communication(job: dict[str, Any]) -> Iterator[Drawing]:
    if job["communication"]:
        moved = {f"{each['kind']}, {each['link']}": each["bytes"] / 1e6 for each in job["communication"]}
        yield Drawing("bytes moved", figures.bars(moved, "MB"))


_PARTS = {"metrics": _metrics, "memory": _memory, "communication": _communication}


def number(value: Any) -> str:
    """Format a number with at most five significant digits."""
    return "" if value is None else f"{value:.5g}"


def rate(job: Mapping[str, Any]) -> str:
    """Return a job's throughput as text, such as "1,200 samples a second"."""
    found = job["throughput"]
    return "" if found is None else f"{found['per_second']:,.0f} {found['counted']} a second"


def duration(seconds: float | None) -> str:
    """Format a duration in seconds if it is below one minute, otherwise in hours, minutes and seconds."""
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


def when(text: str | None) -> str:
    """Format a UTC time that is given as an ISO string."""
    return "" if text is None else f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M:%S} UTC"


def percent(measured: float, predicted: float) -> str:
    """Format the relative error of a prediction, in percent."""
    return f"{100 * (predicted - measured) / measured:+.1f} %" if measured else ""


def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {each.__name__: each for each in (duration, flat, in_bytes, number, rate, when)}
    made.globals["percent"] = percent
    return made.from_string((resources.files(__package__) / "page.html.jinja").read_text())
