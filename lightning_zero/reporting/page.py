"""A report's page, an HTML file without scripts or external resources, and a run's model card. All data is escaped."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_zero.io.plain import as_html, as_markdown, on_one_line
from lightning_zero.io.sizes import in_bytes
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
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1100px; margin: auto;
  padding: 1rem; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #eee; vertical-align: top; }
section { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 1rem; }
figure { margin: 0; } img { width: 100%; } summary { cursor: pointer; font-weight: 600; }
</style>
"""


def page_of(runs: Sequence[Run], title: str) -> str:
    """Return a page with a table of the runs, a figure for each metric, and the records of each run."""
    rows = [
        {"job": run.name, "overrides": " ".join(run.overrides), "status": _status_of(run), **_last_of(run)}
        for run in runs
    ]
    columns = dict.fromkeys(name for row in rows for name in row)
    parts = [f"<title>{as_html(title)}</title></head><body><h1>{as_html(title)}</h1>"]
    parts.append(_table([list(columns), *([row.get(name, "") for name in columns] for row in rows)]))
    parts.append(f"<section>{''.join(_figures(runs))}</section>")
    for run in runs:
        parts.append(f"<details{' open' * (len(runs) == 1)}><summary>{as_html(run.name)}</summary>")
        parts += [f"<h3>{as_html(name)}</h3>{_table(rows)}" for name, rows in _tables_of(run)]
        parts.append("</details>")
    return f"{_HEAD}{''.join(parts)}</body></html>\n"


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


def _status_of(run: Run) -> str:
    return dict(_flat(run.manifest)).get("end.status", "no end was recorded")


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


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each entry in nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text_of(value: Any, name: str = "") -> str:
    """A value as text; its name says whether it is a number of bytes."""
    return in_bytes(value) if type(value) is int and _BYTES.search(name) else on_one_line(value)


def _figures(runs: Sequence[Run]) -> Iterator[str]:
    names = dict.fromkeys(name for run in runs for name in _last_of(run)) | dict.fromkeys(runs[0].metrics)
    for name in list(names)[:_MOST_FIGURES]:
        image = _image_of({run.name: run.metrics[name] for run in runs if name in run.metrics})
        yield f'<figure><figcaption>{as_html(name)}</figcaption><img alt="{as_html(name)}" src="{image}"></figure>'


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


def _table(rows: Sequence[Sequence[Any]]) -> str:
    cells = ("".join(f"<td>{as_html(value)}</td>" for value in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
