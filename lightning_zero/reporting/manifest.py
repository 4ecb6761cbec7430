"""Manifest of a run: the settings to repeat it and, once it has ended, its duration, memory and communication."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.engine import compat
from lightning_zero.io.annotations import check_arguments
from lightning_zero.io.plain import name_of, plain
from lightning_zero.reporting.fingerprint import fingerprint_of_datasets, fingerprint_of_files

NAME = "manifest.json"


class RunManifest(Callback):
    """Writes ``manifest.json`` on rank 0 when training begins, and completes it when training ends.

    The manifest contains what is needed to repeat the run and, when training ends, the duration of the fit and the
    engine's memory and communication. ``lightning-zero report`` reads the file.

    Arguments:
        folder: where to write the manifest; by default the logger's folder, or the Trainer's ``default_root_dir``.
        data: files or folders that rank 0 reads to fingerprint them. By default, samples of the training dataset are
            fingerprinted, which calls ``dataset[index]`` once more for each sample.
        config: the configuration, such as Hydra's; by default the saved hyperparameters of the module and the data
            module.

    Raises:
        ValueError: if an argument has a wrong type.
        FileNotFoundError: in ``fit``, if a path in ``data`` does not exist.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        data: Iterable[str | Path] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(RunManifest.__init__, locals(), "RunManifest")
        self._folder, self._data, self._config = folder, data, config
        self._manifest: dict[str, Any] | None = None  # stays None on all ranks but 0
        self._began = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._began, self._manifest = time.monotonic(), None
        if self._data is not None and trainer.is_global_zero:
            self._of_files = fingerprint_of_files(self._data)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = self._folder or trainer.log_dir or trainer.default_root_dir  # reading log_dir is collective
        if not trainer.is_global_zero:
            return
        self._path = Path(folder) / NAME
        config, strategy = self._config, trainer.strategy
        about_strategy: dict[str, Any] = {"class": name_of(type(strategy))}
        if config is None:
            parts = {"model": pl_module, "data": getattr(trainer, "datamodule", None)}
            config = {name: dict(part.hparams) for name, part in parts.items() if part is not None}
        if getattr(strategy, "engine", None) is not None:
            about_strategy |= plain(strategy.options) | plain(strategy.config)  # type: ignore[attr-defined]
        self._manifest = {
            "lightning_zero_manifest": 1,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": plain(sys.argv),
            "config": plain(config),
            "git": commit_of(Path.cwd()),
            "packages": installed_packages(),
            "machine": machine(),
            "seeds": {"seed_everything": os.environ.get("PL_GLOBAL_SEED"), "torch": torch.initial_seed()},
            "ranks": trainer.world_size,
            "nodes": trainer.num_nodes,
            "strategy": about_strategy,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "resumed_from": trainer.ckpt_path and str(trainer.ckpt_path),
            "model": {
                "class": name_of(type(pl_module)),
                "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            },
            "data": self._fingerprint(trainer),
        }
        self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        self._end(trainer, "completed", {} if engine is None else {"engine": asdict(engine.report())})

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer, f"ended by {type(exception).__name__}", {})

    def _end(self, trainer: Trainer, status: str, found: dict[str, Any]) -> None:
        if self._manifest is None or "end" in self._manifest:
            return
        seconds = time.monotonic() - self._began
        self._manifest["end"] = {"status": status, "seconds": seconds, "steps": trainer.global_step, **found}
        self._write()

    def _write(self) -> None:
        with Destination(self._path).replacing() as file:
            file.write(json.dumps(self._manifest, indent=1).encode())

    def _fingerprint(self, trainer: Trainer) -> dict[str, Any]:
        datasets = [getattr(loader, "dataset", loader) for loader in compat.tree_leaves(trainer.train_dataloader)]
        try:
            found = fingerprint_of_datasets(datasets) if self._data is None else self._of_files
        except Exception as error:  # raised by the user's dataset; training must continue without a fingerprint
            found = {"fingerprint": None, "method": f"{type(error).__name__}: {error}"}
        return {"class": ", ".join(name_of(type(dataset)) for dataset in datasets), **found}


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder's git repository, with "-dirty" if tracked files differ; None if git fails."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.strip()
    return None


def installed_packages() -> dict[str, str]:
    """Versions of Python and of every installed distribution, by name."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    return {"python": platform.python_version()} | dict(sorted(found.items(), key=lambda item: item[0].lower()))


def machine() -> dict[str, Any]:
    """The platform, processors and GPUs, and the version of CUDA."""
    return {
        "platform": platform.platform(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }
