"""A report's page, an HTML file without scripts or external resources, and a run's model card. All data is escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from lightning_zero.checkpoint.trees import values_in
from lightning_zero.io.plain import as_markdown, on_one_line
from lightning_zero.io.text import in_bytes
from lightning_zero.reporting.records import Curve, Run

CARD = "README.md"
MARK = "<!-- lightning-zero report writes this file anew as long as this line is in it -->"

_PACKAGES = ("python", "torch", "lightning", "pytorch-lightning", "lightning_zero")
_BYTES = re.compile(r"(^|[._])(bytes|peak|at_rest|formula|replicated)([._]|$)")
_MOST_FIGURES, _MOST_POINTS = 24, 500
_DETAILS = ("memory/", "communication/", "time/", "wait/")
"""Prefixes of ZeroMonitor's many metrics, which are drawn last, and not compared."""
# Text stays text, which is searchable, and a "$" in a name does not begin a formula.
_FIGURES = {"svg.fonttype": "none", "svg.hashsalt": "lightning_zero", "text.parse_math": False, "axes.grid": True}


def page_of(runs: Sequence[Run], title: str) -> str:
    """Return a page with a table of the runs, a figure for each metric, and the records of each run."""
    rows = []
    for run in runs:
        status = dict(_flat(run.manifest)).get("end.status", "no end was recorded")
        rows.append({"job": run.name, "overrides": " ".join(run.overrides), "status": status, **_last_of(run)})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    jobs = [columns, *([row.get(name, "") for name in columns] for row in rows)]
    environment = Environment(autoescape=True)
    environment.filters["line"] = on_one_line
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text())
    tables = {run.name: list(_tables_of(run)) for run in runs}
    return template.render(title=title, jobs=jobs, figures=_figures(runs), runs=tables)


def card_of(run: Run) -> str:
    """Return a run's README.md for the Hugging Face Hub: metadata with the metrics, and the run's records."""
    from huggingface_hub import EvalResult, ModelCardData

    known = {name: _text_of(value) for name, value in _flat(run.manifest)}
    model = known.get("model.class", run.name).rpartition(":")[2]
    data = known.get("data.class", "unknown")
    metadata = ModelCardData(
        library_name="lightning",
        tags=["lightning_zero"],
        model_name=model,
        eval_results=[
            EvalResult(
                task_type="other",  # the Hub's value for an unknown task
                dataset_type=data,
                dataset_name=data,
                dataset_revision=known.get("data.fingerprint"),
                metric_type=_text_of(name),
                metric_value=value,
            )
            for name, value in _last_of(run).items()
        ],
    )
    parts = [f"---\n{metadata.to_yaml()}\n---\n{MARK}\n\n# {as_markdown(model)}\n"]
    for name, rows in _tables_of(run):
        shown = [row for row in rows if name != "packages" or row[0] in _PACKAGES]
        lines = (f"| {as_markdown(key)} | {as_markdown(value)} |\n" for key, value in shown)
        parts.append(f"## {as_markdown(name)}\n\n| | |\n| --- | --- |\n{''.join(lines)}")
    return "\n".join(parts)


def _last_of(run: Run) -> dict[str, float]:
    """The last value of each metric."""
    return {name: curve[-1][1] for name, curve in run.metrics.items() if not name.startswith(_DETAILS)}


def _tables_of(run: Run) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the headings of tables, and their rows: a run's results, its manifest's single values and its mappings."""
    mappings = {name: value for name, value in run.manifest.items() if isinstance(value, Mapping)}
    others = {name: value for name, value in run.manifest.items() if name not in mappings}
    for heading, values in {"metrics": _last_of(run), "results": run.results, "run": others, **mappings}.items():
        if values:
            yield heading, [(name, _text_of(value, name)) for name, value in _flat(values)]


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each entry in nested mappings."""
    for path, value in values_in(values, lambda value: isinstance(value, Mapping)):
        if not isinstance(value, Mapping) or not value:
            yield ".".join(path), value


def _text_of(value: Any, name: str = "") -> str:
    """A value as text; its name says whether it is a number of bytes."""
    return in_bytes(value) if type(value) is int and _BYTES.search(name) else on_one_line(value)


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Yield the name of each metric, and the URL of its figure."""
    names = dict.fromkeys(name for run in runs for name in _last_of(run)) | dict.fromkeys(runs[0].metrics)
    for name in list(names)[:_MOST_FIGURES]:
        yield name, _image_of({run.name: run.metrics[name] for run in runs if name in run.metrics})


def _image_of(curves: Mapping[str, Curve]) -> str:
    """Draw curves over steps, and return the URL of an SVG image. A script in an image is not executed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which may need a display

    file = io.BytesIO()
    with rc_context(_FIGURES):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.2, 2.8), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for name, curve in curves.items():
            points = curve[:: len(curve) // _MOST_POINTS + 1]
            dots = "o" if len(points) < 20 else None
            axes.plot(*zip(*points), marker=dots, markersize=3, label=f" {name}")  # "_" first would hide a label
        if len(curves) > 1:
            axes.legend(fontsize=8)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
