"""`lightning-zero train`: a Hydra app that trains one model or, with -m, a sweep of models, and writes reports."""

import argparse
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_zero.commands.check import JobFailed, check, in_one_line
from lightning_zero.commands.projects import quote_stage
from lightning_zero.commands.showing import Parser, print_json
from lightning_zero.io.text import print_table

# torch and Lightning are imported within functions: help and --cfg do not need them.

COMPARISON = "comparison.json"

_PATIENCE = 10.0
"""Seconds that ranks other than 0 wait after an error: torchrun ends all ranks, even rank 0, once one has failed."""


def train(config: DictConfig) -> None:
    """Run one job on this rank: train, validate and, on rank 0, write the report."""
    from hydra.utils import instantiate
    from lightning.pytorch import Trainer, seed_everything

    from lightning_zero.callbacks.monitor import ZeroMonitor
    from lightning_zero.engine import engine_of
    from lightning_zero.reporting import RunManifest, results

    # Validating on several ranks is intended, and Lightning itself causes the treespec warning with torch 2.13.
    for message in ("Using `DistributedSampler`", r"`isinstance\(treespec", ".*does not have many workers"):
        warnings.filterwarnings("ignore", message=message)
    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    model = instantiate(config.model)
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    callbacks.append(RunManifest(config.folder, config=config))
    monitor = next((callback for callback in callbacks if isinstance(callback, ZeroMonitor)), None)
    if monitor is None:  # the report needs a monitor
        callbacks.insert(0, monitor := ZeroMonitor())
    if monitor.length_fn is None and hasattr(model, "counted"):
        monitor.length_fn = model.count
    trainer: Trainer = instantiate(config.trainer, callbacks=callbacks, logger=instantiate(config.logger) or False)

    trainer.fit(model, data, ckpt_path=config.resume)
    validated = trainer.validate(model, data, verbose=False) if trainer.enable_validation else []
    metrics: dict[str, float] = {name: value for each in validated for name, value in each.items()}  # each loader's

    is_sharded = engine_of(model) is not None  # if so, all ranks must call sample()
    sample = model.sample() if hasattr(model, "sample") and (trainer.is_global_zero or is_sharded) else None
    if trainer.is_global_zero:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        results.write_report(Path(config.folder), results.collect(trainer, monitor, metrics, best), sample)


def compare(written: Path) -> None:
    """Print a table of the jobs in a sweep's folder, and write their results to a JSON file in this folder."""
    from lightning_zero.reporting.records import read_runs
    from lightning_zero.reporting.results import DETAILS, figures

    runs = read_runs(written.parent)
    common = set.intersection(*(set(run.overrides) for run in runs)) if runs else set()
    jobs = {
        " ".join([run.name, *(each for each in run.overrides if each not in common)]).replace('"', ""): run.results
        for run in runs
    }
    written.write_text(json.dumps(jobs, indent=1))
    found = {}
    for label, results in jobs.items():
        found[label] = {"status": "succeeded", **figures(results)} if results else {"status": "failed"}
    headings = dict.fromkeys(heading for values in found.values() for heading in values if heading not in DETAILS)
    rows = [("job", *headings)]
    rows += [(label, *(values.get(heading, "") for heading in headings)) for label, values in found.items()]
    print_table(rows, right=range(2, len(rows[0])))
    print("comparison", written)
    print("curves lightning-zero report", written.parent, flush=True)


def job(config: DictConfig, reports: list[Path | None]) -> float | None:
    """Run one Hydra job: check the config, then train in this process if it is a rank, otherwise launch ranks.

    Args:
        reports: receives the path of what ``main`` prints at the end: the sweep's comparison or, once a single job has
            ended, its results; None until then.

    Returns:
        The validation metric named by ``objective``, for a sweeper to minimize; None if there is no such metric.
    """
    from lightning_zero.commands.ranks import launch, ranks_exist

    about = HydraConfig.get()
    is_of_sweep = about.mode is RunMode.MULTIRUN
    reports.append(Path(about.runtime.cwd, about.sweep.dir, COMPARISON) if is_of_sweep else None)
    try:
        resolved = check(config)
        if ranks_exist():
            train(resolved)
        else:
            launch(train, resolved)
    except JobFailed as error:
        complain(str(error))
        if is_of_sweep:
            raise  # Hydra continues with the sweep's other jobs and raises this error at the end
        raise SystemExit(error.exit_code) from None  # for other exceptions Hydra prints two more lines
    results = Path(resolved.folder) / "results.json"
    if not is_of_sweep:
        reports[0] = results
    if not results.exists():
        return None
    metrics = json.loads(results.read_text())["validation"]
    if metrics and resolved.objective not in metrics:
        complain(
            f"objective={resolved.objective} is not one of the validation metrics, so a search finds nothing to "
            f"minimize. Write objective={' or objective='.join(sorted(metrics))}."
        )
    return metrics.get(resolved.objective)


def this_rank() -> int:
    """This process's rank, as set by torchrun, SLURM or another launcher; 0 without a launcher."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def complain(text: str) -> None:
    """Print an error on rank 0, for which other ranks wait."""
    if this_rank() == 0:
        print(f"lightning-zero train: {text}", file=sys.stderr, flush=True)
    else:
        time.sleep(_PATIENCE)


def parser() -> Parser:
    """Parser for Hydra's own options and --json."""
    made = Parser(
        "lightning-zero train",
        usage="lightning-zero train [GROUP=OPTION] [KEY=VALUE] ... [options]",
        description="Train a model under ZeRO, and report what it learned, how fast, and in how much memory.",
        parents=[get_args_parser()],
        add_help=False,
    )
    # Hydra's completion is for programs without subcommands, and argparse cannot format its help.
    (completion,) = (action for action in made._actions if "-sc" in action.option_strings)
    completion.help = argparse.SUPPRESS
    made.add_argument("--json", action="store_true", help="print the results of the job, or of a sweep's jobs, as JSON")
    return made


def show_help(overrides: list[str]) -> None:
    """Print options, groups and the configuration. Hydra's own help would take a second longer to find the groups."""
    with hydra.initialize_config_module("lightning_zero.conf", version_base="1.3"):
        config = hydra.compose("train", overrides)
    print(parser().format_help())
    print("groups (GROUP=OPTION):")
    folder = Path(__file__).parents[1] / "conf"
    for group in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "hydra"):
        print(f"  {group.name}: {', '.join(sorted(option.stem for option in group.glob('*.yaml')))}")
    print(f"\nvalues (KEY=VALUE):\n{textwrap.indent(OmegaConf.to_yaml(config), '  ')}")


def main(arguments: list[str]) -> int:
    """Run the app with Hydra's arguments and return the exit code."""
    given = parser().parse_intermixed_args(arguments)  # reports an error in one line; Hydra would print its usage
    options = [argument for argument in arguments if argument not in given.overrides and argument != "--json"]
    arguments = [*options, *given.overrides]  # Hydra accepts no options between overrides
    reports: list[Path | None] = []  # empty until a job has begun
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing several lines and exiting
    with tempfile.TemporaryDirectory() as nowhere:
        if this_rank() != 0:
            # Ranks started by torchrun or SLURM run the same job, whose results go only to the folder of rank 0.
            arguments = [*arguments, f"hydra.run.dir={nowhere}", f"hydra.sweep.dir={nowhere}"]
            arguments += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        sys.argv = ["lightning-zero", *map(quote_stage, arguments)]
        as_app = hydra.main(config_path="pkg://lightning_zero.conf", config_name="train", version_base="1.3")
        app = as_app(lambda config: job(config, reports))
        code = 0
        try:
            if given.help and not (given.config_dir or given.config_path or given.config_name):
                show_help(list(map(quote_stage, given.overrides)))
            else:
                app()
        except JobFailed as error:
            code = error.exit_code
        except (HydraException, OmegaConfBaseException) as error:
            if wants_traceback:
                raise
            complain(in_one_line(error))
            code = 2
        except (YAMLError, UnicodeDecodeError) as error:
            where = given.config_dir or given.config_path or "lightning_zero.conf"
            complain(f"a configuration file in {where} is damaged: {' '.join(str(error).split())}")
            code = 2
        except OSError as error:
            if reports or wants_traceback:
                raise
            complain(f"hydra.{'sweep' if given.multirun else 'run'}.dir: the folder cannot be created: {error}")
            code = 2
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        report = reports[0] if reports and this_rank() == 0 else None
        if report is not None and report.name == COMPARISON:
            compare(report)
        if given.json and report is not None and report.exists():
            print_json(json.loads(report.read_text()))
    return code
