"""Find invalid configuration values before any process is started; each error is one line that names the key."""

import importlib.util
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zero.engine.config import suggestion


class ConfigError(Exception):
    """A mistake in the config; the message is one line that names the key."""

    exit_code = 2


Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int) -> Rule:
    return lambda v: type(v) is int and v >= least, f"a whole number, {least} or more"


ABOVE_0: Rule = (lambda v: type(v) in (int, float) and v > 0, "a number above 0")

# Values that the configured objects would accept and fail on later, when processes have been started.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("seed", "model.warmup_steps", "data.workers"), _whole(0)),
    **dict.fromkeys(("model.width", "model.depth", "model.heads", "model.context"), _whole(1)),
    **dict.fromkeys(("data.context", "data.batch_size", "data.max_bytes"), _whole(1)),
    **dict.fromkeys(("trainer.num_nodes", "trainer.accumulate_grad_batches"), _whole(1)),
    **dict.fromkeys(("trainer.val_check_interval", "trainer.limit_val_batches"), ABOVE_0),
    "model.prompt": (lambda v: isinstance(v, str) and v != "", "a text of at least one character"),
    "data.validation_percent": (lambda v: type(v) in (int, float) and 0 < v < 100, "a number between 0 and 100"),
    "trainer.devices": (lambda v: v == "auto" or (type(v) is int and v >= 1), 'a whole number, 1 or more, or "auto"'),
}


def check(config: DictConfig) -> DictConfig:
    """Check ``config`` and return it with interpolations resolved.

    Raises:
        ConfigError: A package is missing, a key is misspelt, or a value is invalid.
    """
    try:
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(in_one_line(error)) from error
    assert isinstance(resolved, DictConfig)

    for key, (accepts, expected) in RULES.items():
        group, _, name = key.rpartition(".")
        node = resolved[group] if group else resolved
        if name in node and not accepts(node[name]):
            raise ConfigError(f"{key}={node[name]}: expected {expected}")
    if resolved.resume is not None and not Path(resolved.resume).exists():
        raise ConfigError(f"resume={resolved.resume}: no such checkpoint")
    if resolved.stage.get("offload") is not None and resolved.stage._target_.endswith(".DDPStrategy"):
        raise ConfigError("offload: DDP cannot offload: write offload=none, or stage=1, 2 or 3")
    if not resolved.trainer.get("enable_progress_bar", True):
        resolved.callbacks.pop("progress", None)  # Lightning rejects one together with enable_progress_bar=false
    _choose_devices(resolved.trainer)
    _check_packages(resolved)
    _check_made(resolved)
    return resolved


def _choose_devices(trainer: DictConfig) -> None:
    """Replace ``accelerator: auto``: all GPUs of this machine, or two processes on its CPU."""
    from torch.cuda import device_count

    if trainer.get("accelerator") != "auto":
        return
    trainer.accelerator = "gpu" if device_count() else "cpu"
    if trainer.accelerator == "cpu" and trainer.devices == "auto":
        trainer.devices = int(os.environ.get("LOCAL_WORLD_SIZE", 2))  # torchrun has started as many


# By target: the package that its object imports, and the extra of this package that installs it.
EXTRAS = {
    "lightning_zero.zoo.digits.DigitsData": ("sklearn", "demo"),
    "lightning.pytorch.loggers.TensorBoardLogger": ("tensorboard", "tensorboard"),
    "lightning.pytorch.loggers.WandbLogger": ("wandb", "wandb"),
    "lightning.pytorch.loggers.MLFlowLogger": ("mlflow", "mlflow"),
}


def _check_packages(config: DictConfig) -> None:
    """Check that what the config names is installed; without TensorBoard, write a CSV file, as Lightning does."""
    from lightning.pytorch.utilities import rank_zero_info

    for group in ("data", "logger"):
        target = config[group].get("_target_")
        package, extra = EXTRAS.get(target, (None, None))
        if package is None or importlib.util.find_spec(package) is not None:
            continue
        missing = f'the package {package} is missing: pip install "lightning_zero[{extra}]"'
        if package != "tensorboard":
            raise ConfigError(f"{group}: {missing}")
        rank_zero_info(f"Metrics are written to a CSV file, because {missing}")
        names = ("save_dir", "name", "version")
        config.logger = {"_target_": "lightning.pytorch.loggers.CSVLogger", **{n: config.logger[n] for n in names}}


def _check_made(config: DictConfig) -> None:
    """Check that the data can be read and all objects can be created; the model is created on the meta device."""
    import torch
    from hydra.utils import instantiate

    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.ERROR)  # the training process repeats its messages about the Trainer
    group = "data"
    try:
        instantiate(config.data).setup()
        group = "model"
        with torch.device("meta"):
            instantiate(config.model)
        group = "optimizer"
        instantiate(config.optimizer)([torch.nn.Parameter(torch.empty(1, device="cpu"))])
        group = "stage"
        instantiate(config.stage)
        group = "callbacks"
        callbacks = [instantiate(callback) for callback in config.callbacks.values()]
        group = "trainer"
        instantiate(config.trainer, callbacks=callbacks, logger=False)
    except (InstantiationException, ValueError, OSError) as error:
        text = in_one_line(error)
        # Errors of the models, the data and offload begin with the argument's name: heads=3 must ...
        raise ConfigError(f"{group}.{text}" if re.match(r"\w+=|offload: ", text) else f"{group}: {text}") from error
    finally:
        lightning.setLevel(level)


def in_one_line(error: BaseException) -> str:
    """Return the first line of the error, without Hydra's explanations, with the key's name."""
    cause = error.__cause__
    if isinstance(error, InstantiationException) and cause is not None:
        return in_one_line(cause)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {_first_line(error)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: no such option; there are {', '.join(error.options)}"
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        if "is not in struct" in str(cause) and cause.parent_node is not None:
            return _unknown(cause.full_key or str(cause.key), cause.parent_node)
        return in_one_line(cause)
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    return _first_line(error)


def _unknown(key: str, known: Any) -> str:
    group, dot, name = key.rpartition(".")
    return f"{key}: no such key; {suggestion(name, [str(k) for k in known], lambda near: f'{group}{dot}{near}')}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
