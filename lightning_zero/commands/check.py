"""Find invalid configuration values before any process is started; each error is one line that names the key."""

import importlib.util
import inspect
import logging
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


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Rule = tuple[Callable[[Any], bool], str]
POSITIVE: Rule = (lambda v: _whole(v, 1), "a whole number, 1 or more")
NOT_NEGATIVE: Rule = (lambda v: _whole(v, 0), "a whole number, 0 or more")
ABOVE_0: Rule = (lambda v: _number(v) and v > 0, "a number above 0")

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "64-true")

RULES: dict[str, Rule] = {
    "seed": NOT_NEGATIVE,
    "stage.units": (lambda v: v == "auto" or not isinstance(v, str), '"auto"'),
    "stage.unit_numel": (lambda v: v is None or _whole(v, 0), "a whole number, 0 or more, or null"),
    "stage.prefetch": NOT_NEGATIVE,
    "stage.reduction_buffers": POSITIVE,
    "stage.reduce_dtype": (lambda v: v in (None, "fp32", "bf16", "fp16"), "fp32, bf16, fp16 or null"),
    "stage.activation_checkpointing": (lambda v: v in (None, "units"), "units or null"),
    "model.width": POSITIVE,
    "model.depth": POSITIVE,
    "model.heads": POSITIVE,
    "model.context": POSITIVE,
    "model.warmup_steps": NOT_NEGATIVE,
    "model.prompt": (lambda v: isinstance(v, str) and v != "", "a text of at least one character"),
    "data.context": POSITIVE,
    "data.batch_size": POSITIVE,
    "data.max_bytes": POSITIVE,
    "data.workers": NOT_NEGATIVE,
    "data.validation_percent": (lambda v: _number(v) and 0 < v < 100, "a number between 0 and 100"),
    "optimizer.lr": ABOVE_0,
    "optimizer.weight_decay": (lambda v: _number(v) and v >= 0, "a number, 0 or more"),
    "trainer.accelerator": (lambda v: v in ("cpu", "gpu", "cuda"), "cpu, gpu or cuda"),
    "trainer.precision": (lambda v: v in PRECISIONS, f"one of {', '.join(PRECISIONS)}"),
    "trainer.devices": (lambda v: v == "auto" or _whole(v, 1), 'a whole number, 1 or more, or "auto"'),
    "trainer.num_nodes": POSITIVE,
    "trainer.max_steps": (lambda v: v == -1 or _whole(v, 1), "a whole number, 1 or more, or -1 for no limit"),
    "trainer.val_check_interval": ABOVE_0,
    "trainer.limit_val_batches": ABOVE_0,
    "trainer.accumulate_grad_batches": POSITIVE,
    "trainer.log_every_n_steps": POSITIVE,
}


def check(config: DictConfig) -> DictConfig:
    """Check ``config`` and return it with interpolations resolved.

    Raises:
        ConfigError: A package is missing, a key is misspelt, or a value is invalid.
    """
    for package in ("rich", "matplotlib", *(["sklearn"] if "zoo.digits" in str(config.data) else [])):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"the package {package} is missing: pip install 'lightning_zero[demo]'")
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
    if resolved.stage.get("offload") is not None and "stage" not in resolved.stage:
        raise ConfigError("offload: DDP keeps all on the device: offload=none, or stage=1, 2 or 3")
    if not resolved.trainer.get("enable_progress_bar", True):
        resolved.callbacks.pop("progress", None)  # Lightning rejects one together with enable_progress_bar=false
    _check_targets(resolved, "")
    _check_made(resolved)
    return resolved


def _check_targets(node: Any, key: str) -> None:
    """Check that every ``_target_`` exists and accepts the arguments in the config."""
    from hydra.utils import get_object

    if not isinstance(node, DictConfig):
        return
    for name, child in node.items():
        _check_targets(child, f"{key}.{name!s}" if key else str(name))
    if "_target_" not in node:
        return
    try:
        parameters = inspect.signature(get_object(node._target_)).parameters
    except Exception as error:
        raise ConfigError(f"{key}._target_={node._target_}: {in_one_line(error)}") from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in node:
        if not str(name).startswith("_") and name not in parameters:
            raise ConfigError(_unknown(f"{key}.{name!s}", parameters))


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
