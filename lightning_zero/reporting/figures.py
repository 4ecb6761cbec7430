"""A report's figures, as SVG to embed in a page. Requires matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_zero.reporting.records import Curve
from lightning_zero.reporting.summary import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 500
"""Maximum number of points drawn per curve; a longer curve is thinned evenly."""

_LINES = ("-", "--", ":")
# Text is stored in the SVG as text, not as paths. A `$` in a name is not parsed as the start of a formula.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lightning_zero",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "lines.markersize": 3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def curves(series: Mapping[str, Curve], title: str) -> str:
    """Draw curves over steps, with a legend unless the only curve's name is the title."""
    with _figure(list(series)) as (axes, done):
        for number, (name, curve) in enumerate(series.items()):
            steps, values = zip(*_thinned(curve))
            dots = "o" if len(steps) < 20 else None
            axes.plot(
                steps, values, color=f"C{number % 10}", linestyle=_LINES[number // 10 % 3], marker=dots, label=name
            )
        _name_steps(axes)
        if list(series) != [title]:
            _legend(axes)
    return done()


def memory_over_time(over_time: Mapping[str, Curve], predicted: float | None) -> str:
    """Draw bytes by category over steps as stacked areas, with lines for the peak so far and the predicted peak."""
    names = [name for name in CATEGORIES if name in over_time]
    at_step = {name: dict(_thinned(curve)) for name, curve in over_time.items()}
    steps = sorted(set.intersection(*map(set, at_step.values())))
    sums = (sum(at_step[name][step] for name in names) for step in steps)
    unit, scale = _unit(max([predicted or 0.0, *at_step.get("peak", {}).values(), *sums]))
    with _figure([*names, "peak so far", "predicted peak"]) as (axes, done):
        heights = [[at_step[name][step] / scale for step in steps] for name in names]
        axes.stackplot(steps, heights, labels=names, alpha=0.8)
        if "peak" in at_step:
            axes.plot(steps, [at_step["peak"][step] / scale for step in steps], color="black", label="peak so far")
        if predicted is not None:
            axes.axhline(predicted / scale, color="black", linestyle="--", label="predicted peak")
        _name_steps(axes)
        axes.set_ylabel(unit)
        _legend(axes)
    return done()


def memory_bars(bars: Mapping[str, Mapping[str, float]], lines: Mapping[str, float]) -> str:
    """Draw a stacked bar of categories for each entry of ``bars``, and a line across all bars for each of ``lines``."""
    unit, scale = _unit(max([*(sum(shares.values()) for shares in bars.values()), *lines.values()]))
    categories = [name for name in CATEGORIES if any(shares.get(name) for shares in bars.values())]
    with _figure([*categories, *lines], list(bars)) as (axes, done):
        ends = [0.0] * len(bars)
        for name in categories:
            lengths = [shares.get(name, 0) / scale for shares in bars.values()]
            axes.barh(list(bars), lengths, left=ends, height=0.6, label=name)
            ends = [end + length for end, length in zip(ends, lengths)]
        for (name, value), style in zip(lines.items(), _LINES[1:]):
            axes.axvline(value / scale, color="black", linestyle=style, label=name)
        _name_bars(axes, unit)
        _legend(axes)
    return done()


def bars(values: Mapping[str, float], unit: str) -> str:
    """Draw a bar for each value."""
    with _figure([], list(values)) as (axes, done):
        axes.barh(list(values), list(values.values()), height=0.6)
        _name_bars(axes, unit)
    return done()


@contextmanager
def _figure(named: Sequence[str], rows: Sequence[str] = ()) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Yield axes in the reports' style, and a function that returns the figure as SVG once the context has ended.

    Args:
        named: legend entries, for which room is left under the axes.
        rows: names of bars, each of which adds to the height.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot, which may need a display

    height = 0.45 * len(rows) + 1.0 if rows else 2.8
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.2, height + 0.2 * len(named) / _columns(named)), layout="constrained")
        drawn: list[str] = []
        yield figure.add_subplot(), lambda: drawn[0]
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        drawn.append(_for_a_page(file.getvalue()))


def _for_a_page(svg: str) -> str:
    """Remove an SVG's header, the ids that all figures share, and the size, which the page sets."""
    tag, rest = svg[svg.index("<svg") :].split(">", 1)
    ids = r' id="(?:figure|axes|patch|matplotlib\.axis|xtick|ytick|line2d|text|legend)_\d+"'
    return re.sub(r' (?:width|height)="[^"]*"', "", tag) + ">" + re.sub(ids, "", rest)


def _thinned(curve: Curve) -> Sequence[tuple[int, float]]:
    """Return at most ``POINTS`` of a curve's points, including the first and the last."""
    if len(curve) <= POINTS:
        return curve
    return [curve[round(index * (len(curve) - 1) / (POINTS - 1))] for index in range(POINTS)]


def _unit(most: float) -> tuple[str, float]:
    """Return the largest unit of at most ``most`` bytes, and that unit's size in bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= scale:
            return unit, scale
    return "B", 1.0


def _name_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _name_bars(axes: Axes, unit: str) -> None:
    axes.set_xlabel(unit)
    axes.invert_yaxis()  # the first bar on top
    axes.grid(axis="y", visible=False)


def _legend(axes: Axes) -> None:
    """Draw the legend under the axes, where it hides no curve."""
    lines, names = axes.get_legend_handles_labels()
    axes.figure.legend(lines, names, loc="outside lower center", ncols=_columns(names), frameon=False, fontsize=9)


def _columns(names: Sequence[str]) -> int:
    return max(1, min(3, 60 // (max(map(len, names), default=0) + 6)))
