"""`lightning-zero report`: a page and a model card about a run, or about the jobs of a sweep."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zero.commands.showing import Parser, print_json


def main(arguments: list[str]) -> int:
    parsed = parser().parse_args(arguments)
    from lightning_zero.reporting.records import ReportError, read_runs

    try:
        runs = read_runs(parsed.folder)
        if not any(run.manifest or run.results or run.metrics for run in runs):
            raise ReportError(
                f"{parsed.folder} has no records of a run: no manifest.json from RunManifest, no results.json from "
                "lightning-zero train, and no metrics.csv from CSVLogger"
            )
        if parsed.json:
            print_json([run._asdict() | {"folder": str(run.folder)} for run in runs])
            return 0
        for path in _write(runs, parsed.folder, parsed.output or parsed.folder):
            print(path)
    except (ReportError, OSError) as error:
        print(f"lightning-zero report: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="lightning-zero report",
        description="Write report.html and a model card, README.md, about a run or the jobs of a sweep.",
    )
    made.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="folder of a run, or of a sweep with its jobs")
    made.add_argument("--output", type=Path, help="folder to write to (default: RUN_FOLDER)")
    made.add_argument("--json", action="store_true", help="print what the page shows as JSON, and write no files")
    return made


def _write(runs: Sequence[Any], root: Path, output: Path) -> list[Path]:
    """Write the page and, for each run with records, a card in the run's subfolder of ``output``; return all paths."""
    from lightning_zero.checkpoint.commit import Destination
    from lightning_zero.reporting import page
    from lightning_zero.reporting.records import ReportError

    missing = [name for name in ("huggingface_hub", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(f'not installed: {", ".join(missing)}. Run pip install "lightning_zero[report]"')
    texts = {output / "report.html": page.page_of(runs, f"Report on {root.resolve().name}")}
    for run in runs:
        if run.manifest or run.results or run.metrics:
            texts[output / run.folder.relative_to(root) / page.CARD] = page.card_of(run)
    for path in texts:
        if any(each.is_symlink() for each in (path, *path.parents) if each.is_relative_to(output) and each != output):
            raise ReportError(
                f"{path} is a link, or is in a folder that is a link, and is not written: choose another folder with "
                "--output"
            )
        if path.name == page.CARD and path.exists() and page.MARK not in path.read_text(errors="replace"):
            raise ReportError(f"{path} exists and was not written by this command: choose another folder with --output")
    for path, text in texts.items():
        with Destination(path).replacing() as file:
            file.write(text.encode())
    return list(texts)
