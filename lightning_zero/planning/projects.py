"""Projects to plan or probe: a module, its batches and the Trainer's settings, for example from a script."""

from __future__ import annotations

import copy
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout, suppress
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

    Raises:
        ValueError: if there is no such script, or it ends without a call to ``Trainer.fit``.
    """
    if not script.is_file():
        raise ValueError(
            f"there is no script {str(script)!r}: pass a script's path, package.module:Name or Hydra overrides"
        )

    def fit(
        trainer: Trainer,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        **_: Any,
    ) -> None:
        raise _FitCalled(trainer, model, datamodule or train_dataloaders)

    made: dict[Any, dict[str, Any]] = {}
    with ExitStack() as context:
        context.enter_context(patch.object(sys, "argv", [str(script), *arguments]))
        context.enter_context(patch.object(sys, "path", [str(script.parent), *sys.path]))
        context.enter_context(redirect_stdout(sys.stderr))
        with suppress(ImportError):
            importlib.import_module("pytorch_lightning")  # the script may import it
        for trainer_class in (package.Trainer for package in packages()):
            make = _made_on_this_machine(trainer_class.__init__, made)
            context.enter_context(patch.multiple(trainer_class, __init__=make, fit=fit))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            pass
        except _FitCalled as call:
            trainer, model, data = call.args
            model = getattr(model, "_orig_mod", model)
            data = partial(batches_of, model if data is None else data)
            return Project(lambda: copied(model), data, settings_of(made[trainer]))
    raise ValueError(f"{script} ended without a call to Trainer.fit, so there is nothing to plan")


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


def _made_on_this_machine(make: Callable[..., None], made: dict[Any, dict[str, Any]]) -> Callable[..., None]:
    """A Trainer's ``__init__`` for one process on the CPU; ``made`` receives the arguments of each Trainer."""
    here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}

    @wraps(make)
    def make_here(trainer: Any, **arguments: Any) -> None:
        made[trainer] = arguments
        make(trainer, **{**arguments, **here, "plugins": None})

    return make_here
