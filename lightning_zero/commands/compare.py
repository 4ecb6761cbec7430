"""Summary of a sweep: a table and comparison.json that compare its jobs."""

import json
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_zero.io.tables import show


class CompareJobs(Callback):
    """Hydra callback that records the folder of a sweep.

    ``commands.train`` calls ``compare`` when the sweep is over. Hydra would call ``on_multirun_end`` only if no job
    failed, but the other jobs should be compared after a failure, too.
    """

    folder: ClassVar[Path | None] = None
    report: ClassVar[Path | None] = None  # path of a job's results.json or a sweep's comparison.json

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        CompareJobs.folder = Path(config.hydra.sweep.dir).absolute()


def compare(folder: Path) -> Path:
    """Print the table and write ``comparison.json`` for the jobs in a sweep's ``folder``.

    Returns:
        The path of ``comparison.json``.
    """
    from lightning_zero.reporting.records import read_runs
    from lightning_zero.reporting.results import DETAILS, figures

    runs = read_runs(folder)
    common = set.intersection(*(set(run.overrides) for run in runs)) if runs else set()
    jobs = {" ".join([run.name, *(each for each in run.overrides if each not in common)]): run.results for run in runs}
    written = folder / "comparison.json"
    written.write_text(json.dumps(jobs, indent=1))
    found = {}
    for label, results in jobs.items():
        found[label] = {"status": "succeeded", **figures(results)} if results else {"status": "failed"}
    headings = dict.fromkeys(heading for values in found.values() for heading in values if heading not in DETAILS)
    rows = [("job", *headings)]
    rows += [(label, *(values.get(heading, "") for heading in headings)) for label, values in found.items()]
    show(rows, right=range(2, len(rows[0])))
    print("comparison", written)
    print("curves lightning-zero report", folder, flush=True)
    return written
