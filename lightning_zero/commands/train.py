"""`lightning-zero train`: a Hydra app that trains one model, or with -m a sweep of models, and writes reports."""

import json
import os
import re
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lightning_zero.commands.check import ConfigError, check, in_one_line
from lightning_zero.commands.compare import CompareJobs, compare
from lightning_zero.commands.launch import RankFailed, launch, ranks_exist, this_rank


def train(config: DictConfig) -> None:
    """Run one job on one rank, from the config to the report."""
    from hydra.utils import instantiate
    from lightning.pytorch import Trainer, seed_everything

    from lightning_zero.monitoring import ZeroMonitor, report

    # Validating on several ranks is intended; the treespec warning comes from Lightning itself with torch 2.13.
    for message in ("Using `DistributedSampler`", r"`isinstance\(treespec", ".*does not have many workers"):
        warnings.filterwarnings("ignore", message=message)
    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    model = instantiate(config.model)
    callbacks = [instantiate(callback) for callback in config.callbacks.values()]
    monitor = next((callback for callback in callbacks if isinstance(callback, ZeroMonitor)), None)
    if monitor is None:  # the report needs one
        callbacks.insert(0, monitor := ZeroMonitor())
    trainer: Trainer = instantiate(config.trainer, callbacks=callbacks, logger=instantiate(config.logger) or False)

    trainer.fit(model, data, ckpt_path=config.resume)
    (metrics,) = trainer.validate(model, data, verbose=False)

    if trainer.is_global_zero:
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        sample = model.sample() if hasattr(model, "sample") else None
        report.write_report(Path(config.folder), report.collect(trainer, monitor, metrics, best), sample)


def job(config: DictConfig) -> float | None:
    """Hydra's function for each job: check the config, then train on existing ranks or launch processes.

    Returns:
        What a sweeper minimizes: the validation metric that ``objective`` names. None on ranks without the report.
    """
    try:
        resolved = check(config)
        if ranks_exist():
            train(resolved)
        else:
            launch(train, resolved)
    except (ConfigError, RankFailed) as error:
        complain(str(error))
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise  # Hydra continues with the sweep's other jobs and raises this at the end
        raise SystemExit(error.exit_code) from None  # for other exceptions Hydra prints two more lines
    results = Path(resolved.folder) / "results.json"
    return json.loads(results.read_text())["validation"].get(resolved.objective) if results.exists() else None


def complain(text: str) -> None:
    if this_rank() == 0:
        print(f"lightning-zero train: {text}", file=sys.stderr, flush=True)


def _quote_stage(argument: str) -> str:
    """stage=1,2 -> stage="1","2": Hydra parses bare numbers as integers, but requires strings as names of options."""
    key, equals, value = argument.partition("=")
    return key + equals + re.sub(r"(?<![\w\"'])(\d+)(?![\w\"'])", r'"\1"', value) if key == "stage" else argument


def main(arguments: list[str]) -> int:
    """Run the app with Hydra's arguments and return the exit code."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing several lines and exiting
    with tempfile.TemporaryDirectory() as nowhere:
        if this_rank() != 0:
            # Ranks started by torchrun or SLURM are one job, whose results go to rank 0's folder only.
            arguments = [*arguments, f"hydra.run.dir={nowhere}", f"hydra.sweep.dir={nowhere}"]
            arguments += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        sys.argv = [sys.argv[0], *map(_quote_stage, arguments)]
        app = hydra.main(config_path="pkg://lightning_zero.conf", config_name="train", version_base="1.3")(job)
        code = 0
        try:
            app()
        except (ConfigError, RankFailed) as error:
            code = error.exit_code
        except (HydraException, OmegaConfBaseException) as error:
            if wants_traceback:
                raise
            complain(in_one_line(error))
            code = 2
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        if CompareJobs.folder is not None and this_rank() == 0:
            compare(CompareJobs.folder)
    return code
