"""Summary of a sweep: a table, a plot and comparison.json that compare its jobs."""

import json
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from lightning_zero.monitoring.report import held_at_peak, make_console, plot_losses


class CompareJobs(Callback):
    """Hydra callback that records the folder of a sweep.

    Hydra calls ``on_multirun_end`` only if no job failed, but the remaining jobs are to be compared also after a
    failure. So the command itself calls ``compare`` when the sweep is over.
    """

    folder: ClassVar[Path | None] = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        CompareJobs.folder = Path(config.hydra.sweep.dir).absolute()


def compare(folder: Path) -> None:
    """Print the table and write ``comparison.png`` and ``comparison.json`` for the jobs in a sweep's ``folder``."""
    from rich.table import Table

    jobs = _jobs(folder)
    done = {label: results for label, results in jobs.items() if results is not None}
    table = Table(title=f"{len(done)} of {len(jobs)} jobs")
    table.add_column("job", overflow="fold")
    for name in dict.fromkeys(name for results in done.values() for name in _columns(results)):
        table.add_column(name, justify="right")
    for label, results in jobs.items():
        said = {} if results is None else _columns(results)
        table.add_row(label, *(said.get(str(column.header), "failed") for column in table.columns[1:]))
    make_console().print(table)

    (folder / "comparison.json").write_text(json.dumps(jobs, indent=1))
    print("comparison", folder / "comparison.json")
    if done:
        plot_losses(folder / "comparison.png", done)
        print("plot", folder / "comparison.png", flush=True)


def _columns(results: dict[str, Any]) -> dict[str, str]:
    """Return a job's results by column heading."""
    loss, rate, psi = results["training_loss"], results["per_second"], results["communicated_psi"]
    states, buffers = held_at_peak(results)
    return {
        "training loss": "" if loss is None else f"{loss:.3f}",
        **{name: f"{value:.3g}" for name, value in results["validation"].items() if name != "loss"},
        f"{results['counted']}/s": "" if rate is None else f"{rate:.0f}",
        "states MB": f"{states / 1e6:.1f}",
        "formula MB": "" if results["formula_bytes"] is None else f"{results['formula_bytes'] / 1e6:.1f}",
        "buffers MB": f"{buffers / 1e6:.1f}",
        "DDP MB": "" if results["ddp_bytes"] is None else f"{results['ddp_bytes'] / 1e6:.1f}",
        "Psi/step": "not counted" if psi is None else f"{psi:.2f}",
    }


def _jobs(folder: Path) -> dict[str, dict[str, Any] | None]:
    """Return each job's results, or None if it failed, by the overrides in which the jobs differ."""
    overrides = {}
    for file in sorted(folder.glob("*/.hydra/overrides.yaml"), key=lambda file: (len(file.parts[-3]), file)):
        overrides[file.parent.parent] = [str(override) for override in OmegaConf.load(file)]
    common = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    jobs = {}
    for job, given in overrides.items():
        label = " ".join(override for override in given if override not in common).replace('"', "") or job.name
        file = job / "results.json"
        jobs[label] = json.loads(file.read_text()) if file.exists() else None
    return jobs
