"""Manifest of a run: the settings to repeat it and, once it has ended, its duration, memory and communication."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_zero.engine import Engine
from lightning_zero.reporting.fingerprint import datasets_of, fingerprint_of_datasets, fingerprint_of_files
from lightning_zero.version import __version__

NAME = "manifest.json"
FORMAT = 1


class RunManifest(Callback):
    """Writes ``manifest.json`` on rank 0 when training begins, and completes it when training ends.

    The manifest contains the configuration, the git commit of the working directory, the installed packages, the
    machine, seeds, the strategy with its options, and a fingerprint of the training data. When training ends, the
    duration of the fit and the engine's memory and communication are added. ``lightning-zero report`` reads the file.

    Arguments:
        folder: where to write the manifest; by default the logger's folder, or the Trainer's ``default_root_dir``.
        data: files or folders that rank 0 reads to fingerprint them. By default, samples of the training dataset are
            fingerprinted, which calls ``dataset[index]`` once more for each sample.
        config: the configuration, such as Hydra's; by default the saved hyperparameters of the module and the data
            module.

    Raises:
        FileNotFoundError: in ``fit``, if a path in ``data`` does not exist.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        data: Iterable[str | Path] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
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
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._manifest = {
            "lightning_zero_manifest": FORMAT,
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": plain(sys.argv),
            "config": plain(self._config if self._config is not None else _hyperparameters(trainer, pl_module)),
            "git": commit_of(Path.cwd()),
            "packages": installed_packages(),
            "machine": machine(),
            "seeds": {"seed_everything": _number(os.environ.get("PL_GLOBAL_SEED")), "torch": torch.initial_seed()},
            "ranks": trainer.world_size,
            "nodes": trainer.num_nodes,
            "strategy": _strategy(trainer),
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "resumed_from": trainer.ckpt_path and str(trainer.ckpt_path),
            "model": {
                "class": _name(type(pl_module)),
                "hyperparameters": plain(dict(pl_module.hparams)),
                "parameters": sum(parameter.numel() for parameter in pl_module.parameters()),
            },
            "data": self._fingerprint(trainer),
        }
        self._write()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._manifest is not None and "batch" not in self._manifest:
            self._manifest["batch"] = shapes_of(batch)
            self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        self._end(
            trainer,
            status="completed",
            **({} if engine is None else _of_engine(engine)),
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer, status=f"ended by {type(exception).__name__}")

    def _end(self, trainer: Trainer, **found: Any) -> None:
        if self._manifest is None or "end" in self._manifest:
            return
        seconds = time.monotonic() - self._began
        self._manifest["end"] = {"seconds": seconds, "steps": trainer.global_step, **found}
        if torch.cuda.is_available():
            device = trainer.strategy.root_device
            self._manifest["end"]["device_peak_bytes"] = {
                "allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.max_memory_reserved(device),
            }
        self._write()

    def _fingerprint(self, trainer: Trainer) -> dict[str, Any]:
        datasets = datasets_of(trainer.train_dataloader)
        names = {"class": ", ".join(_name(type(dataset)) for dataset in datasets)}
        try:
            found = fingerprint_of_datasets(datasets) if self._data is None else self._of_files
        except Exception as error:  # raised by the user's dataset; training must continue without a fingerprint
            found = {"fingerprint": None, "method": f"{type(error).__name__}: {error}"}
        return names | found

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._manifest, indent=1))


def commit_of(folder: Path) -> dict[str, Any] | None:
    """Return the HEAD commit of a folder's git repository, and whether tracked files differ; None if git fails."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain", "--untracked-files=no") != ""}
    except (OSError, subprocess.SubprocessError):
        return None


def installed_packages() -> dict[str, str]:
    """Versions of Python and of every installed distribution, by name."""
    found = {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]}
    return {"python": platform.python_version()} | dict(sorted(found.items(), key=lambda item: item[0].lower()))


def machine() -> dict[str, Any]:
    """The platform, processors and GPUs, and the versions of CUDA and this package."""
    return {
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "lightning_zero": __version__,
    }


_SECRET = re.compile(
    r"(?:^|[._-])(?:password|passwd|secret|(?:api|access|private|secret)[_-]?key|(?:access|auth|hf)[_-]?token)$",
    re.IGNORECASE,
)
_MASK = "***"


def plain(value: Any) -> Any:
    """Convert a value to JSON types. Classes and dtypes become their names, other objects ``{"repr": ...}``.

    Passwords, tokens and API keys, which must not appear in a report, are replaced by ``"***"``. They are recognised by
    the names of settings, and in words of a command: ``api_key=abc``, ``--api-key=abc``, and ``--api-key`` before
    ``abc``.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {
            str(key): _MASK if each is not None and _SECRET.search(str(key)) else plain(each)
            for key, each in value.items()
        }
    if isinstance(value, str):
        name, equals, _ = value.partition("=")
        value = f"{name}={_MASK}" if equals and _SECRET.search(name) else value
        return re.sub(r"(?<=://)[^/@\s]+@", f"{_MASK}@", value)  # user and password in a URL
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, bytes):
        values = list(value)
        return [
            _MASK if _is_secret_option(before, each) else plain(each) for before, each in zip([None, *values], values)
        ]
    if isinstance(value, type):
        return {"class": _name(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (int, float, bool, type(None))):
        return value
    return str(value) if isinstance(value, Path) else {"repr": repr(value)}


def _is_secret_option(word: Any, following: Any) -> bool:
    """Whether two words of a command are an option such as ``--api-key`` and its value."""
    if not isinstance(word, str) or not isinstance(following, str) or following.startswith("-"):
        return False
    return word.startswith("-") and _SECRET.search(word) is not None


def shapes_of(batch: Any) -> Any:
    """Return the structure of a batch, with dtypes and shapes in place of tensors."""
    if isinstance(batch, Tensor):
        return {"tensor": [str(batch.dtype).removeprefix("torch."), list(batch.shape)]}
    if isinstance(batch, Mapping):
        return {"mapping": {str(key): shapes_of(value) for key, value in batch.items()}}
    if isinstance(batch, (list, tuple)):
        return {type(batch).__name__ if type(batch) in (list, tuple) else "tuple": [shapes_of(each) for each in batch]}
    return {"value": plain(batch)}


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _hyperparameters(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    data = getattr(trainer, "datamodule", None)
    return {"model": dict(module.hparams)} | ({} if data is None else {"data": dict(data.hparams)})


def _strategy(trainer: Trainer) -> dict[str, Any]:
    """The strategy's class; for ZeRO also the stage, the transport, and the options that differ from their defaults."""
    strategy: Any = trainer.strategy
    engine = getattr(strategy, "engine", None)
    found: dict[str, Any] = {"class": _name(type(strategy)), "stage": None}
    if engine is not None:
        is_within = engine.communicator.counters.link == "within"
        found["stage"] = strategy.stage
        backend = "gloo" if strategy.root_device.type == "cpu" else "nccl"
        found["transport"] = "shared memory" if is_within else backend
        chosen = {
            field.name: getattr(options, field.name)
            for options in (strategy.config, strategy.options)
            for field in fields(options)
            if field.name != "stage" and getattr(options, field.name) != field.default
        }
        # A timeout is written in seconds, from which, unlike from its text, the option can be restored.
        found["options"] = {
            name: value.total_seconds() if isinstance(value, timedelta) else plain(value)
            for name, value in chosen.items()
        }
    return found


def _of_engine(engine: Engine) -> dict[str, Any]:
    """The engine's report, and the total calls, elements and bytes of its collectives, by kind and link."""
    counters = engine.communicator.counters
    moved = [
        {
            "kind": kind,
            "link": link,
            "calls": calls,
            "elements": counters.elements[kind, link],
            "bytes": counters.bytes[kind, link],
        }
        for (kind, link), calls in sorted(counters.calls.items())
    ]
    return {"engine": asdict(engine.report()), "communication": moved}
