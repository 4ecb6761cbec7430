"""Summary of a sweep: a table and comparison.json that compare its jobs."""

import json
from collections import Counter
from collections.abc import Mapping
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
    from lightning_zero.reporting.results import DETAILS, figures

    jobs = _jobs(folder)
    written = folder / "comparison.json"
    written.write_text(json.dumps(jobs, indent=1))
    found = {}
    for label, results in jobs.items():
        found[label] = {"status": "failed"} if results is None else {"status": "succeeded", **figures(results)}
    headings = dict.fromkeys(heading for values in found.values() for heading in values if heading not in DETAILS)
    rows = [("job", *headings)]
    rows += [(label, *(values.get(heading, "") for heading in headings)) for label, values in found.items()]
    show(rows, right=range(2, len(rows[0])))
    print("comparison", written)
    print("curves lightning-zero report", folder, flush=True)
    return written


def _jobs(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return the results of jobs (None for a failed job), labelled by the overrides in which the jobs differ."""
    from lightning_zero.reporting.records import OVERRIDES, overrides_of

    files = sorted(folder.glob(f"*/{OVERRIDES}"), key=lambda file: (len(file.parts[-3]), file))
    labels = labels_of({job: overrides_of(job) for job in (file.parent.parent for file in files)}, folder)
    results = {label: job / "results.json" for job, label in labels.items()}
    return {label: json.loads(file.read_text()) if file.exists() else None for label, file in results.items()}


def labels_of(overrides: Mapping[Path, list[str]], folder: Path) -> dict[Path, str]:
    """Label each job by the overrides that differ between jobs, and by its path if these overrides are not unique."""
    common = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    own = {
        job: " ".join(override for override in given if override not in common).replace('"', "")
        for job, given in overrides.items()
    }
    times = Counter(own.values())
    return {
        job: label if label and times[label] == 1 else f"{label} {job.relative_to(folder)}".strip()
        for job, label in own.items()
    }
