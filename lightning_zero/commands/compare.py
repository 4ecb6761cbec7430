"""Summary of a sweep: a table, a plot and comparison.json that compare its jobs."""

import json
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class CompareJobs(Callback):
    """Hydra callback that records the folder of a sweep.

    Hydra calls ``on_multirun_end`` only if no job failed, but the remaining jobs are to be compared also after a
    failure. So the command itself calls ``compare`` when the sweep is over.
    """

    folder: ClassVar[Path | None] = None
    report: ClassVar[Path | None] = None  # results.json of a job, or comparison.json of a sweep

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        CompareJobs.folder = Path(config.hydra.sweep.dir).absolute()


def compare(folder: Path) -> Path:
    """Print the table and write ``comparison.png`` and ``comparison.json`` for the jobs in a sweep's ``folder``.

    Returns:
        The path of ``comparison.json``.
    """
    from lightning_zero.monitoring.report import missing, plot_losses

    jobs = _jobs(folder)
    done = {label: results for label, results in jobs.items() if results is not None}
    written = folder / "comparison.json"
    written.write_text(json.dumps(jobs, indent=1))
    if note := missing("rich"):
        print("table", note)
    else:
        _print_table(jobs, done)
    print("comparison", written)
    if done:
        print("plot", plot_losses(folder / "comparison.png", done), flush=True)
    return written


def _print_table(jobs: dict[str, dict[str, Any] | None], done: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from lightning_zero.monitoring.report import figures, make_console

    table = Table(title=f"{len(done)} of {len(jobs)} jobs")
    table.add_column("job", overflow="fold")
    names = dict.fromkeys(name for results in done.values() for name in figures(results))
    for name in names:
        table.add_column(name, justify="right")
    for label, results in jobs.items():
        found = {} if results is None else figures(results)
        table.add_row(label, *(found.get(name, "failed") for name in names))
    make_console().print(table)


def _jobs(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return each job's results, or None if it failed, by the overrides in which the jobs differ."""
    from lightning_zero.reporting.records import OVERRIDES, labels_of, overrides_of

    files = sorted(folder.glob(f"*/{OVERRIDES}"), key=lambda file: (len(file.parts[-3]), file))
    labels = labels_of({job: overrides_of(job) for job in (file.parent.parent for file in files)})
    results = {label: job / "results.json" for job, label in labels.items()}
    return {label: json.loads(file.read_text()) if file.exists() else None for label, file in results.items()}
