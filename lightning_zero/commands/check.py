"""Find invalid configuration values before any process is started; each error is one line that names the key."""

import importlib.util
import inspect
import math
import os
import re
from collections.abc import Callable
from typing import Any, get_type_hints

from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_zero.io.annotations import check_value
from lightning_zero.io.text import suggestion


class JobFailed(Exception):
    """A job cannot be started, or one of its ranks has failed or was killed."""

    exit_code = 1


class ConfigError(JobFailed):
    """A mistake in the config; the message is one line that names the key."""

    exit_code = 2


LEAST: dict[str, tuple[Any, int]] = {
    **dict.fromkeys(("model.warmup_steps", "data.workers"), (int, 0)),
    **dict.fromkeys(("model.width", "model.depth", "model.heads", "model.context"), (int, 1)),
    **dict.fromkeys(("data.context", "data.batch_size", "data.max_bytes"), (int, 1)),
    **dict.fromkeys(("optimizer.lr", "optimizer.weight_decay", "optimizer.momentum"), (float, 0)),
    **dict.fromkeys(("trainer.num_nodes", "trainer.accumulate_grad_batches"), (int, 1)),
    "trainer.gradient_clip_val": (float | None, 0),
    "trainer.check_val_every_n_epoch": (int | None, 1),
}
"""Types and smallest values of settings whose objects accept others, which cause errors once processes have started."""

_Rule = tuple[Callable[[Any], bool], str]

_ABOVE_0: _Rule = (lambda v: type(v) in (int, float) and v > 0, "a number above 0")

RULES: dict[str, _Rule] = {
    "seed": (lambda v: type(v) is int and 0 <= v < 2**32, "an integer from 0 to 4294967295"),
    "model.float8": (
        lambda v: v in (None, "tensorwise", "rowwise", "rowwise_with_gw_hp"),
        "null or a recipe of torchao: tensorwise, rowwise or rowwise_with_gw_hp",
    ),
    "model.prompt": (lambda v: isinstance(v, str) and v != "", "a non-empty string"),
    "optimizer.betas": (
        lambda v: isinstance(v, ListConfig) and len(v) > 1 and all(type(b) in (int, float) and 0 <= b < 1 for b in v),
        "two or more numbers from 0 to below 1",
    ),
    "data.validation_percent": (lambda v: type(v) in (int, float) and 0 < v < 100, "a number between 0 and 100"),
    "trainer.val_check_interval": _ABOVE_0,
    "trainer.devices": (lambda v: v == "auto" or (type(v) is int and v >= 1), '"auto" or an integer of at least 1'),
}
"""Rules that neither a type nor ``LEAST`` expresses, for values that would also cause errors late."""


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
    _check_values(resolved)
    if resolved.resume is not None:
        _check_checkpoint(str(resolved.resume))
    if resolved.stage.get("_target_", "").endswith(".DDPStrategy"):
        _check_ddp(resolved.stage)
    if not resolved.trainer.get("enable_progress_bar", True):
        resolved.callbacks.pop("progress", None)  # Lightning rejects this callback with enable_progress_bar=false
    _choose_devices(resolved.trainer)
    _check_packages(resolved)
    _check_made(resolved)
    return resolved


def _check_checkpoint(path: str) -> None:
    """Check that there is a checkpoint at a path or URL; only a local one is opened."""
    from lightning_zero.checkpoint.files import Files
    from lightning_zero.checkpoint.pickles import UnsafeFileError
    from lightning_zero.checkpoint.reading import open_checkpoint

    try:
        files = Files(path)
        exists = files.exists
        if exists and files.is_local:
            open_checkpoint(path)
    except UnsafeFileError:
        pass  # whether the checkpoint's objects are read depends on the strategy
    except Exception as error:  # libraries for object stores raise errors of their own
        raise ConfigError(f"resume={path}: {in_one_line(error)}") from error
    if not exists:
        raise ConfigError(f"resume={path}: no such checkpoint")


def _check_ddp(stage: DictConfig) -> None:
    """Check that DDP has the given options, since it would refuse them only once processes have started."""
    from lightning.pytorch.strategies import DDPStrategy
    from torch.nn.parallel import DistributedDataParallel

    from lightning_zero.strategies.trainer import ZeroStrategy

    for group, verb in (("offload", "offload"), ("resilience", "keep its state")):
        if stage.get(group) is not None:
            raise ConfigError(f"{group}: DDP cannot {verb}: write {group}=none, or stage=1, 2 or 3")
    known = [name for kind in (DDPStrategy, DistributedDataParallel) for name in inspect.signature(kind).parameters]
    for name in sorted({*stage} - {"_target_", "offload", "resilience", *known}):
        if name in inspect.signature(ZeroStrategy).parameters:
            raise ConfigError(f"stage.{name}: DDP has no such option: write stage=1, 2 or 3")
        raise ConfigError(_unknown(f"stage.{name}", known))


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


def _check_values(config: DictConfig) -> None:
    """Check values against ``RULES`` and ``LEAST``, and the Trainer's arguments against its type hints.

    The Trainer itself checks some arguments late or never. Values of nodes such as callbacks are checked when they are
    instantiated.
    """
    from lightning.pytorch import Trainer

    of_trainer = {f"trainer.{name}": (hint, None) for name, hint in get_type_hints(Trainer.__init__).items()}
    kinds: dict[str, tuple[Any, int | None]] = {**dict.fromkeys(RULES, (Any, None)), **of_trainer, **LEAST}
    for key, (kind, least) in kinds.items():
        group, _, name = key.rpartition(".")
        node = config[group] if group else config
        if not isinstance(node, DictConfig):
            raise ConfigError(f"{group}={node}: expected a mapping")
        if name not in node:
            continue
        value = node[name]
        if value == math.inf:
            raise ConfigError(f"{key}={value} must be a finite number.")
        accepts, expected = RULES.get(key, (None, ""))
        if accepts is not None and not accepts(value):
            raise ConfigError(f"{key}={value} must be {expected}.")
        if isinstance(value, (DictConfig, ListConfig)):
            continue
        is_whole = isinstance(value, float) and value.is_integer()  # 1e3 is a float in YAML
        try:
            check_value(key, int(value) if is_whole else value, kind, least)
        except ValueError as error:
            raise ConfigError(str(error)) from None


# For each ``_target_``: the package that it imports, and the extra of lightning_zero that installs this package.
EXTRAS = {
    "lightning_zero.zoo.digits.DigitsData": ("sklearn", "demo"),
    **{f"pytorch_optimizer.{name}": ("pytorch_optimizer", "optimizers") for name in ("Lion", "Muon", "SOAP")},
    "bitsandbytes.optim.AdamW8bit": ("bitsandbytes", "optimizers"),
    "lightning.pytorch.loggers.TensorBoardLogger": ("tensorboard", "tensorboard"),
    "lightning.pytorch.loggers.WandbLogger": ("wandb", "wandb"),
    "lightning.pytorch.loggers.MLFlowLogger": ("mlflow", "mlflow"),
}


def _check_packages(config: DictConfig) -> None:
    """Check that the packages the config needs are installed. If TensorBoard is missing, log to a CSV file instead."""
    from lightning.pytorch.utilities import rank_zero_info

    if config.model.get("float8") is not None and importlib.util.find_spec("torchao") is None:
        raise ConfigError('precision: the package torchao is missing: pip install "lightning_zero[optimizers]"')
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
    """Check that the folder and all objects can be created, and our own data read; the model is on the meta device."""
    import torch

    from lightning_zero.planning.fake_run import quiet

    def make_data(data: DictConfig) -> None:
        made = instantiate(data)
        if data._target_.startswith("lightning_zero."):
            made.setup("fit")  # a project's own hooks may need a Trainer, which calls them in the ranks

    def make_model(model: DictConfig) -> None:
        with torch.device("meta"):
            instantiate(model)

    def make_callbacks(callbacks: DictConfig) -> list[Any]:
        return [instantiate(callback) for callback in callbacks.values()]

    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    makers: dict[str, Callable[[Any], Any]] = {
        "folder": lambda folder: os.makedirs(folder, exist_ok=True),
        "data": make_data,
        "model": make_model,
        "optimizer": lambda optimizer: instantiate(optimizer)([{"params": [parameter], "use_muon": False}]),
        "stage": instantiate,
        "logger": instantiate,  # also creates MLflow's database, which the ranks would otherwise all create at once
        "callbacks": make_callbacks,
        "trainer": lambda trainer: instantiate(trainer, callbacks=make_callbacks(config.callbacks), logger=False),
    }
    with quiet():  # the training process will print these messages
        for group, make in makers.items():
            try:
                make(config[group])
            except _REFUSALS as error:
                raise ConfigError(_with_key(error, group, config)) from error


# Exceptions that constructors raise for invalid values.
_REFUSALS = (InstantiationException, ArithmeticError, ValueError, TypeError, LookupError, OSError, RuntimeError)


def _with_key(error: Exception, group: str, config: DictConfig) -> str:
    """Return the error as one line that begins with the invalid key, or the node for which it was raised."""
    text = in_one_line(error)
    if re.match(r"\w+=|offload: ", text):  # the message already names the key, as in: heads=3 must ...
        return f"{group}.{text}"
    found = re.search(r"^full_key: (.+)$", str(error), flags=re.MULTILINE)
    key = found[1] if found else group
    if unknown := re.search(r"unexpected keyword argument '(\w+)'", text):
        known = inspect.signature(get_object(OmegaConf.select(config, key)._target_)).parameters
        return _unknown(f"{key}.{unknown[1]}", known)
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
