"""`lightning-zero report`: a page and a model card about a run, or about the jobs of a sweep."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

from lightning_zero.commands.parsing import Parser
from lightning_zero.commands.showing import print_json


def main(arguments: list[str]) -> int:
    parsed = parser().parse_args(arguments)
    from lightning_zero.reporting.records import ReportError, read_runs
    from lightning_zero.reporting.summary import Declared, summarize

    try:
        if not parsed.json:
            _check_packages()
        if parsed.carbon_intensity is not None and parsed.power_watts is None:
            raise ReportError("--carbon-intensity requires --power-watts: CO2 is carbon intensity times energy")
        runs = read_runs(parsed.folder)
        declared = Declared(parsed.price_per_hour, parsed.power_watts, parsed.carbon_intensity)
        summary = summarize(runs, declared, parsed.prediction)
        if parsed.json:
            print_json(summary)
            return 0
        for path in _write(summary, parsed.folder, [run.folder for run in runs], parsed.output or parsed.folder):
            print(path)
    except ReportError as error:
        print(f"lightning-zero report: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> Parser:
    made = Parser(
        prog="lightning-zero report",
        description="Write report.html and a model card, README.md, about a run or the jobs of a sweep.",
    )
    made.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="folder of a run, or of a sweep with its jobs")
    made.add_argument("--output", type=Path, help="folder to write to (default: RUN_FOLDER)")
    made.add_argument(
        "--price-per-hour", type=_above_0, metavar="PRICE", help="hourly price of a rank's device, to compute the cost"
    )
    made.add_argument(
        "--power-watts", type=_above_0, metavar="WATTS", help="power of a rank's device, to compute the energy"
    )
    made.add_argument(
        "--carbon-intensity", type=_above_0, metavar="GRAMS", help="grams of CO2 per kWh, to compute the emissions"
    )
    made.add_argument("--no-prediction", dest="prediction", action="store_false", help="omit predicted memory")
    made.add_argument("--json", action="store_true", help="print the data of the page as JSON, and write no files")
    return made


def _above_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def _check_packages() -> None:
    from lightning_zero.reporting.records import ReportError

    missing = [name for name in ("huggingface_hub", "jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        packages = f"package {missing[0]} is" if len(missing) == 1 else f"packages {', '.join(missing)} are"
        raise ReportError(f'the {packages} missing: pip install "lightning_zero[report]"')


def _write(summary: dict[str, Any], root: Path, folders: list[Path], output: Path) -> list[Path]:
    """Write the page and, for each job with records, a card in the job's subfolder of ``output``; return all paths."""
    from lightning_zero.reporting import card, page
    from lightning_zero.reporting.records import ReportError

    cards = [output / folder.relative_to(root) / card.NAME for folder in folders]
    for path in cards:
        if not card.may_write(path):
            raise ReportError(f"{path} exists and was not written by this command: choose another folder with --output")
    html = output / "report.html"
    output.mkdir(parents=True, exist_ok=True)
    html.write_text(page.render(summary, f"Report on {root.resolve().name}"), encoding="utf-8")
    written = [html]
    for job, path in zip(summary["jobs"], cards):
        if job["status"] != "no records":
            card.write(job, path)
            written.append(path)
    return written
