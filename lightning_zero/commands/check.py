"""Find invalid configuration values before any process is started; each error is one line that names the key."""

import copy
import importlib.util
import inspect
import logging
import math
import operator
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zero.io.names import suggestion


class JobFailed(Exception):
    """A job cannot be started, or one of its ranks has failed or was killed."""

    exit_code = 1


class ConfigError(JobFailed):
    """A mistake in the config; the message is one line that names the key."""

    exit_code = 2


Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int) -> Rule:
    return lambda v: type(v) is int and v >= least, f"a whole number, {least} or more"


ABOVE_0: Rule = (lambda v: type(v) in (int, float) and v > 0, "a number above 0")
NOT_NEGATIVE: Rule = (lambda v: type(v) in (int, float) and 0 <= v < math.inf, "a number, 0 or more")


def _or_null(rule: Rule) -> Rule:
    return lambda v: v is None or rule[0](v), f"{rule[1]}, or null"


def _are_betas(value: Any) -> bool:
    return (
        isinstance(value, ListConfig) and len(value) == 2 and all(type(v) in (int, float) and 0 <= v < 1 for v in value)
    )


# Rules for values that the configured objects accept, but that cause an error later, once processes have started.
RULES: dict[str, Rule] = {
    "seed": (lambda v: type(v) is int and 0 <= v < 2**32, "a whole number, 0 to 4294967295"),
    **dict.fromkeys(("model.warmup_steps", "data.workers"), _whole(0)),
    **dict.fromkeys(("model.width", "model.depth", "model.heads", "model.context"), _whole(1)),
    **dict.fromkeys(("data.context", "data.batch_size", "data.max_bytes"), _whole(1)),
    **dict.fromkeys(("trainer.num_nodes", "trainer.accumulate_grad_batches"), _whole(1)),
    **dict.fromkeys(("trainer.val_check_interval", "trainer.limit_val_batches"), ABOVE_0),
    **dict.fromkeys(("optimizer.lr", "optimizer.weight_decay", "optimizer.momentum"), NOT_NEGATIVE),
    "optimizer.betas": (_are_betas, "two numbers, each 0 or more and below 1"),
    "trainer.gradient_clip_val": _or_null(NOT_NEGATIVE),
    "trainer.check_val_every_n_epoch": _or_null(_whole(1)),
    "model.prompt": (lambda v: isinstance(v, str) and v != "", "a non-empty string"),
    "data.validation_percent": (lambda v: type(v) in (int, float) and 0 < v < 100, "a number between 0 and 100"),
    "trainer.devices": (lambda v: v == "auto" or (type(v) is int and v >= 1), 'a whole number, 1 or more, or "auto"'),
}


def check(config: DictConfig) -> DictConfig:
    """Check ``config`` and return it with interpolations resolved.

    Raises:
        ConfigError: if a package is missing, a key is misspelt, or a value is invalid.
    """
    try:
        resolved = OmegaConf.create(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(in_one_line(error)) from error
    assert isinstance(resolved, DictConfig)

    for key, (accepts, expected) in RULES.items():
        group, _, name = key.rpartition(".")
        node = resolved[group] if group else resolved
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{group}={node}: expected a mapping")
        if name in node and not accepts(node[name]):
            raise ConfigError(f"{key}={node[name]}: expected {expected}")
    if resolved.resume is not None:
        _check_exists(str(resolved.resume))
    for group, verb in (("offload", "offload"), ("compression", "compress"), ("resilience", "keep its state")):
        if resolved.stage.get(group) is not None and resolved.stage._target_.endswith(".DDPStrategy"):
            raise ConfigError(f"{group}: DDP cannot {verb}: write {group}=none, or stage=1, 2 or 3")
    if not resolved.trainer.get("enable_progress_bar", True):
        resolved.callbacks.pop("progress", None)  # Lightning rejects this callback with enable_progress_bar=false
    _choose_devices(resolved.trainer)
    _check_types(resolved.trainer)
    _check_packages(resolved)
    _check_made(resolved)
    return resolved


def _check_exists(checkpoint: str) -> None:
    """Check that there is a checkpoint at a local path or an fsspec URL.

    Raises:
        ConfigError: if there is none, or if its file system cannot be reached.
    """
    from lightning_zero.checkpoint.files import Files

    try:
        exists = Files(checkpoint).exists
    except Exception as error:  # libraries for object stores raise errors of their own
        raise ConfigError(f"resume={checkpoint}: cannot be looked up: {in_one_line(error)}") from error
    if not exists:
        raise ConfigError(f"resume={checkpoint}: no such checkpoint")


def _choose_devices(trainer: DictConfig) -> None:
    """Replace ``accelerator: auto`` with the GPU or, if there is none, the CPU.

    On the CPU, ``devices: auto`` becomes torchrun's number of processes or, without torchrun, two.
    """
    from torch.cuda import device_count

    if trainer.get("accelerator") != "auto":
        return
    trainer.accelerator = "gpu" if device_count() else "cpu"
    if trainer.accelerator == "cpu" and trainer.devices == "auto":
        trainer.devices = int(os.environ.get("LOCAL_WORLD_SIZE", 2))


_KINDS: dict[Any, Rule] = {
    bool: (lambda v: v in (True, False), "true or false"),
    int: (lambda v: type(v) is int or (type(v) is float and v.is_integer()), "a whole number"),
    float: (lambda v: type(v) in (int, float), "a number"),
    type(None): (lambda v: v is None, "null"),
}


def _check_types(trainer: DictConfig) -> None:
    """Check the Trainer's arguments against its type hints, since the Trainer checks some arguments late or never.

    Only arguments that must be a bool, an int, a float, None or one of a list of literals are checked here.
    """
    from lightning.pytorch import Trainer

    hints = get_type_hints(Trainer.__init__)
    for name, value in trainer.items():
        rules = _rules_of(hints.get(str(name)))
        if rules and not any(accepts(value) for accepts, _ in rules):
            words = dict.fromkeys(words for _, words in rules)
            if "a number" in words:
                words.pop("a whole number", None)
            *others, last = words
            expected = f"{', '.join(others)} or {last}" if others else last
            raise ConfigError(f"trainer.{name!s}={value!s}: expected {expected}")


def _rules_of(hint: Any) -> list[Rule]:
    """Rules for a type hint; a value must meet at least one. Empty if values of this type are not checked."""
    if get_origin(hint) in (Union, UnionType):
        rules = [_rules_of(member) for member in get_args(hint)]
        return list(chain(*rules)) if all(rules) else []
    if get_origin(hint) is Literal:
        return [(partial(operator.eq, each), str(each)) for each in get_args(hint)]
    return [_KINDS[hint]] if hint in _KINDS else []


# For each ``_target_``: the package that it imports, and the extra of lightning_zero that installs this package.
EXTRAS = {
    "lightning_zero.zoo.digits.DigitsData": ("sklearn", "demo"),
    "lightning_zero.zoo.muon.muon_and_adamw": ("pytorch_optimizer", "optimizers"),
    "pytorch_optimizer.Lion": ("pytorch_optimizer", "optimizers"),
    "pytorch_optimizer.SOAP": ("pytorch_optimizer", "optimizers"),
    "bitsandbytes.optim.AdamW8bit": ("bitsandbytes", "optimizers"),
    "lightning.pytorch.loggers.TensorBoardLogger": ("tensorboard", "tensorboard"),
    "lightning.pytorch.loggers.WandbLogger": ("wandb", "wandb"),
    "lightning.pytorch.loggers.MLFlowLogger": ("mlflow", "mlflow"),
}


def _check_packages(config: DictConfig) -> None:
    """Check that the packages the config needs are installed. If TensorBoard is missing, log to a CSV file instead."""
    from lightning.pytorch.utilities import rank_zero_info

    for group in ("data", "logger", "optimizer"):
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

    def make_model(model: DictConfig) -> None:
        with torch.device("meta"):
            instantiate(model)

    makers: dict[str, Callable[[DictConfig], Any]] = {
        "data": lambda data: instantiate(data).setup(),
        "model": make_model,
        "optimizer": lambda optimizer: instantiate(optimizer)([torch.nn.Parameter(torch.empty(1, device="cpu"))]),
        "stage": instantiate,
        "logger": instantiate,  # also creates MLflow's database, which the ranks would otherwise all create at once
        "callbacks": lambda callbacks: [instantiate(callback) for callback in callbacks.values()],
        "trainer": lambda trainer: instantiate(
            trainer, callbacks=[instantiate(callback) for callback in config.callbacks.values()], logger=False
        ),
    }
    lightning = logging.getLogger("lightning.pytorch")
    level = lightning.level
    lightning.setLevel(logging.ERROR)  # the training process will print these messages
    try:
        for group, make in makers.items():
            try:
                make(config[group])
            except _REFUSALS as error:
                raise ConfigError(_with_key(error, group, config, make)) from error
    finally:
        lightning.setLevel(level)


# Exceptions that constructors raise for invalid values.
_REFUSALS = (InstantiationException, ValueError, TypeError, OSError)


def _with_key(error: Exception, group: str, config: DictConfig, make: Callable[[DictConfig], Any]) -> str:
    """Return the error as one line that begins with the invalid key: the key without which ``make`` succeeds."""
    from hydra.utils import get_object

    text = in_one_line(error)
    if re.match(r"\w+=|offload: ", text):  # the message already names the key, as in: heads=3 must ...
        return f"{group}.{text}"
    found = re.search(r"^full_key: (.+)$", str(error), flags=re.MULTILINE)
    key = found[1] if found else group
    node = OmegaConf.select(config, key)
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", text):
        return _unknown(f"{key}.{unknown[1]}", inspect.signature(get_object(node._target_)).parameters)
    for name, value in node.items():
        if name.startswith("_"):
            continue
        without = copy.deepcopy(config)
        del OmegaConf.select(without, key)[name]
        try:
            make(without[group])
        except _REFUSALS:
            continue
        return f"{key}.{name}={value}: {text}"
    return f"{key}: {text}"


def in_one_line(error: BaseException) -> str:
    """Return the error in one line with the key's name, without Hydra's explanations."""
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
    if isinstance(error, ConfigCompositionException) and cause is None:
        return " ".join(str(error).split())  # the error's later lines contain a remedy
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {_first_line(error)}"
    return _first_line(error)


def _unknown(key: str, known: Any) -> str:
    group, dot, name = key.rpartition(".")
    return f"{key}: no such key; {suggestion(name, [str(k) for k in known], lambda near: f'{group}{dot}{near}')}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
