"""Manifest of a run: the settings to repeat it and, once it has ended, its duration, memory and communication."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_zero.checkpoint.commit import Destination
from lightning_zero.engine import compat
from lightning_zero.io.plain import name_of, plain

NAME = "manifest.json"
_LOW_PRECISION = ("Float8Linear", "Linear4bit", "Linear8bitLt")


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
        self._path = f"{folder}/{NAME}"  # the folder may be a URL
        config, strategy = self._config, trainer.strategy
        kinds = [type(layer).__name__ for layer in pl_module.modules()]
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
                "low_precision_layers": Counter(name for name in kinds if name in _LOW_PRECISION),
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


# -- fingerprints of training data, of which large ones are read only in part ------------------------------------------


MOST_BYTES = 2**30  # maximum number of bytes read from files
MOST_SAMPLES = 2_000  # maximum number of samples read from a dataset
SAMPLE_BYTES = 2**26  # fewer samples are read, but at least ``LEAST_SAMPLES``, if they would exceed this
LEAST_SAMPLES = 16
_BLOCK = 2**20


def fingerprint_of_files(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Fingerprint files, including all files in folders, by relative path, size and content.

    Beyond ``MOST_BYTES`` in total, only the beginning of large files is read.

    Raises:
        FileNotFoundError: if a path does not exist.
    """
    found: list[tuple[str, Path]] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"data={path} is neither a file nor a folder")
        folder, files = (path, path.rglob("*")) if path.is_dir() else (path.parent, [path])
        found += [(file.relative_to(folder).as_posix(), file) for file in files if file.is_file()]
    found.sort(key=lambda each: each[0])
    sizes = [file.stat().st_size for _, file in found]
    most = MOST_BYTES if sum(sizes) <= MOST_BYTES else MOST_BYTES // len(found)
    digest = hashlib.blake2b(digest_size=16)
    for (name, file), size in zip(found, sizes):
        _update(digest, (name.encode(), size.to_bytes(8, "little")))
        left = most
        with file.open("rb") as stream:
            while block := stream.read(min(_BLOCK, left)):
                left -= _update(digest, (block,))
    method = "BLAKE2b of file names, sizes and contents"
    return {"fingerprint": digest.hexdigest(), "method": method, "files": len(found), "bytes": sum(sizes)}


def fingerprint_of_datasets(datasets: Sequence[Any]) -> dict[str, Any]:
    """Fingerprint datasets by their lengths and by evenly spread samples, as ``dataset[index]`` returns them.

    As transforms may be random, the generators of Python, NumPy and torch are seeded before reading, and their states
    are restored afterwards. ``fingerprint`` is None if a dataset cannot be indexed.
    """
    digest, length = hashlib.blake2b(digest_size=16), 0
    for dataset in datasets:
        has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if isinstance(dataset, IterableDataset) or not has_index:
            why = f"{type(dataset).__name__} cannot be indexed: pass its files as RunManifest(data=[...])"
            return {"fingerprint": None, "method": why}
        _update(digest, (len(dataset).to_bytes(8, "little"),))
        length += len(dataset)
        with isolate_rng():
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            # the first sample's size determines how many samples are read
            size = _update(digest, _parts_of(dataset[0])) if len(dataset) else 1
            count = min(len(dataset), max(LEAST_SAMPLES, min(MOST_SAMPLES, SAMPLE_BYTES // size)))
            for index in range(1, count):
                _update(digest, _parts_of(dataset[index * len(dataset) // count]))
    method = "BLAKE2b of evenly spread samples and the number of samples"
    return {"fingerprint": digest.hexdigest(), "method": method, "samples": length}


def _update(digest: Any, parts: Iterable[bytes]) -> int:
    """Add parts to a hash, each with its length, so that "ab", "c" differ from "a", "bc"; return their total length."""
    total = 0
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
        total += len(part)
    return total


def _parts_of(value: Any) -> Iterator[bytes]:
    """Yield a sample's structure, types, shapes and values."""
    yield type(value).__name__.encode()
    if isinstance(value, Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "__array_interface__") and np.asarray(value).dtype != object:  # of NumPy or PIL
        array = np.asarray(value)
        yield str((array.dtype, array.shape)).encode()
        yield array.tobytes()
    elif isinstance(value, (Mapping, list, tuple)) or is_dataclass(value):
        if is_dataclass(value):
            value = [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, Mapping):
            value = [part for key in sorted(value, key=str) for part in (key, value[key])]
        yield str(len(value)).encode()
        for each in value:
            yield from _parts_of(each)
    else:
        yield value if isinstance(value, bytes) else pickle.dumps(value, protocol=4)
