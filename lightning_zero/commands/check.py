"""Find invalid configuration values before any process is started; each error is one line that names the group."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class JobFailed(Exception):
    """A job cannot be started, or one of its ranks has failed or was killed."""

    exit_code = 1


class ConfigError(JobFailed):
    """A mistake in the config; the message is one line."""

    exit_code = 2


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
    for group, verb in (("offload", "offload"), ("compression", "compress"), ("resilience", "keep its state")):
        if resolved.stage.get(group) is not None and resolved.stage._target_.endswith(".DDPStrategy"):
            raise ConfigError(f"{group}: DDP cannot {verb}: write {group}=none, or stage=1, 2 or 3")
    if not resolved.trainer.get("enable_progress_bar", True):
        resolved.callbacks.pop("progress", None)  # Lightning rejects this callback with enable_progress_bar=false
    _choose_devices(resolved.trainer)
    _check_packages(resolved)
    _check_made(resolved)
    return resolved


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
    """Check that the data can be read and all objects can be created; the model is created on the meta device."""
    import torch

    from lightning_zero.planning.fake_run import quiet

    def make_data(data: DictConfig) -> Any:
        made = instantiate(data)
        made.setup()
        return made.train_dataloader(), made.val_dataloader()

    def make_model(model: DictConfig) -> None:
        with torch.device("meta"):
            instantiate(model)

    def make_callbacks(callbacks: DictConfig) -> list[Any]:
        return [instantiate(callback) for callback in callbacks.values()]

    parameter = torch.nn.Parameter(torch.empty(1, device="cpu"))
    makers: dict[str, Callable[[DictConfig], Any]] = {
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
                raise ConfigError(f"{group}: {in_one_line(error)}") from error


# Exceptions that constructors raise for invalid values.
_REFUSALS = (InstantiationException, ArithmeticError, ValueError, TypeError, LookupError, OSError, RuntimeError)


def in_one_line(error: BaseException) -> str:
    """The message of an error, in which Hydra names the key, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
