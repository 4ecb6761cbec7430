"""Projects to plan: by a class and a batch, or by the Trainer that a script makes."""

from __future__ import annotations

import copy
import inspect
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class Project:
    """What is planned.

    Attributes:
        make_module: makes the LightningModule; called where parameters are made on the meta device.
        batch: as the project's loader gives it, on the CPU.
        settings: of its Trainer, by the argument of ``make_plans``: ``ranks``, ``accumulate``, ``precision``, ``clip``.
    """

    make_module: Callable[[], LightningModule]
    batch: Any
    settings: dict[str, Any] = field(default_factory=dict)


class _FitCalled(BaseException):
    """Ends a script at ``Trainer.fit``: no ``except Exception`` of the script catches it."""


def of_script(script: Path, arguments: list[str]) -> Project:
    """The project that a script trains, which is run up to its first ``Trainer.fit``; no device need exist.

    Args:
        script: of Python.
        arguments: of the script's command line.

    Raises:
        ValueError: if there is no such script, it ends without a call of ``Trainer.fit``, or its loader is empty.
    """
    if not script.is_file():
        raise ValueError(f"{str(script)!r} must be a script, package.module:Name, or name=value of a configuration")
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

    with _trainers_on_this_machine() as made, patch.object(Trainer, "fit", fit), _run_as(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except (_FitCalled, SystemExit):
            pass
    if not given:
        raise ValueError(f"{script} ended without a call of Trainer.fit, so there is nothing to plan")
    model = getattr(given["model"], "_orig_mod", given["model"])
    batch = first_batch(given["data"] if given["data"] is not None else model)
    model.to("meta")
    return Project(lambda: copy.deepcopy(model), batch, settings_of(made[given["trainer"]]))


def first_batch(data: Any) -> Any:
    """The first batch that a data module, a loader, or a module with loaders of its own gives for training.

    Raises:
        ValueError: if there is none.
    """
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        if hasattr(data, "setup"):
            data.setup("fit")
        data = data.train_dataloader()
    for batch in data:
        return move_data_to_device(batch, torch.device("cpu"))
    raise ValueError("The loader of training batches is empty, so there is no batch to plan with.")


def settings_of(trainer: dict[str, Any]) -> dict[str, Any]:
    """What a plan takes over of a Trainer's arguments."""
    settings: dict[str, Any] = {}
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, (list, tuple)):
        devices = len(devices)
    if isinstance(devices, int) or (isinstance(devices, str) and devices.isdigit()):
        settings["ranks"] = int(devices) * nodes
    names = {"accumulate_grad_batches": "accumulate", "precision": "precision", "gradient_clip_val": "clip"}
    return settings | {names[name]: trainer[name] for name in names if trainer.get(name) is not None}


@contextmanager
def _trainers_on_this_machine() -> Iterator[dict[Trainer, dict[str, Any]]]:
    """Context in which every Trainer is made for one process on the CPU; gives the arguments that each was given."""
    made: dict[Trainer, dict[str, Any]] = {}
    make, here = Trainer.__init__, {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
    signature = inspect.signature(make)

    @wraps(make)
    def make_here(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(trainer, *args, **kwargs).arguments
        made[arguments.pop("self")] = dict(arguments)
        make(trainer, **{**arguments, **here, "precision": "32-true", "plugins": None})

    with patch.object(Trainer, "__init__", make_here):
        yield made


@contextmanager
def _run_as(script: Path, arguments: list[str]) -> Iterator[None]:
    """Context with the command line and the path of modules that a script has; what it prints goes to stderr."""
    with (
        patch.object(sys, "argv", [str(script), *arguments]),
        patch.object(sys, "path", [str(script.parent), *sys.path]),
        redirect_stdout(sys.stderr),
    ):
        yield
