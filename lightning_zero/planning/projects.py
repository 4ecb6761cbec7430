"""Projects to plan or probe: a module, its batches and the Trainer's settings, for example from a script."""

from __future__ import annotations

import copy
import importlib
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.nn import Parameter

from lightning_zero.planning.fake_run import packages


@dataclass(frozen=True)
class Project:
    """A project to plan or probe.

    Attributes:
        make_module: returns the LightningModule; for a plan, it is called with the meta device as the default device.
        batches: returns an iterator over training batches, as the project's loader returns them, on the CPU.
        settings: the Trainer's settings as arguments of ``make_plans``: ``ranks``, ``machines``, ``accumulate``,
            ``precision`` and ``clip``, as far as they are known.
    """

    make_module: Callable[[], LightningModule]
    batches: Callable[[], Iterator[Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> Any:
        """The first batch.

        Raises:
            ValueError: if there is no batch.
        """
        for batch in self.batches():
            return batch
        raise ValueError("The loader of training batches is empty, so there is no batch to plan with.")


class _FitCalled(BaseException):
    """Ends a script at ``Trainer.fit``; an ``except Exception`` in the script does not catch it."""


def of_script(script: Path, arguments: list[str]) -> Project:
    """Run a script up to its first ``Trainer.fit``, and return its project. Devices that it requests need not exist.

    Args:
        script: path of a Python script.
        arguments: the script's command-line arguments.

    Raises:
        ValueError: if there is no such script, or it ends without a call to ``Trainer.fit``.
    """
    if not script.is_file():
        raise ValueError(
            f"there is no script {str(script)!r}: pass a script's path, package.module:Name or Hydra overrides"
        )
    given: dict[str, Any] = {}

    def fit(
        trainer: Trainer,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **_: Any,
    ) -> None:
        given.update(model=model, data=datamodule or train_dataloaders, trainer=trainer)
        raise _FitCalled

    made: dict[Any, dict[str, Any]] = {}
    with _run_as(script, arguments), ExitStack() as patches:
        with suppress(ImportError):
            importlib.import_module("pytorch_lightning")  # the script may import it
        for trainer_class in (package.Trainer for package in packages()):
            patches.enter_context(_made_on_this_machine(trainer_class, made))
            patches.enter_context(patch.object(trainer_class, "fit", fit))
        with suppress(_FitCalled, SystemExit):
            runpy.run_path(str(script), run_name="__main__")
    if not given:
        raise ValueError(f"{script} ended without a call to Trainer.fit, so there is nothing to plan")
    model = getattr(given["model"], "_orig_mod", given["model"])
    data = given["data"] if given["data"] is not None else model
    return Project(lambda: copied(model), partial(batches_of, data), settings_of(made[given["trainer"]]))


def copied(module: LightningModule) -> LightningModule:
    """Copy a module; if the default device is the meta device, the copy's tensors are on it."""
    memo: dict[int, Any] = {}
    if torch.get_default_device().type == "meta":
        for tensor in (*module.parameters(), *module.buffers()):
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            memo[id(tensor)] = Parameter(empty, tensor.requires_grad) if isinstance(tensor, Parameter) else empty
    return copy.deepcopy(module, memo)


def batches_of(data: Any) -> Iterator[Any]:
    """Yield, on the CPU, the training batches of a data module, a module with its own loaders, or loaders themselves.

    A collection of loaders, such as a dict, yields collections of their batches, as in ``Trainer.fit``.
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        if hasattr(data, "setup"):
            data.setup("fit")
        data = data.train_dataloader()
    is_combined = isinstance(data, tuple(package.utilities.CombinedLoader for package in packages()))
    for batch, _, _ in data if is_combined else CombinedLoader(data, "max_size_cycle"):
        yield move_data_to_device(batch, torch.device("cpu"))


def settings_of(trainer: dict[str, Any]) -> dict[str, Any]:
    """Convert a Trainer's arguments to ``Project.settings``."""
    settings: dict[str, Any] = {}
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]  # "0," is device 0, as in Lightning
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    # like "auto", -1 means all devices of a machine, whose number is unknown
    if (isinstance(devices, int) and devices != -1) or (isinstance(devices, str) and devices.strip().isdigit()):
        settings |= {"ranks": int(devices) * nodes, "machines": nodes}
    names = {"accumulate_grad_batches": "accumulate", "precision": "precision", "gradient_clip_val": "clip"}
    return settings | {names[name]: trainer[name] for name in names if trainer.get(name) is not None}


@contextmanager
def _made_on_this_machine(trainer_class: Any, made: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Context in which every Trainer runs one process on the CPU; ``made`` receives the arguments of each Trainer."""
    make, here = trainer_class.__init__, {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    signature = inspect.signature(make)

    @wraps(make)
    def make_here(trainer: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(trainer, *args, **kwargs).arguments
        made[arguments.pop("self")] = dict(arguments)
        make(trainer, **{**arguments, **here, "precision": "32-true", "plugins": None})

    with patch.object(trainer_class, "__init__", make_here):
        yield


@contextmanager
def _run_as(script: Path, arguments: list[str]) -> Iterator[None]:
    """Context that sets a script's command line and module search path, and sends its output to stderr."""
    with (
        patch.object(sys, "argv", [str(script), *arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        redirect_stdout(sys.stderr),
    ):
        yield
