"""Restricted unpickling of DCP's metadata and of ``torch.save`` files: runs none of the code that they name."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import re
import typing
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import EnumMeta
from typing import Any

import torch

from lightning_zero.checkpoint.named import Use, uses_in

_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # their module in torch 2.1 and before
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

NOT_RUN = "None of its code was run. Do not load the file in another way"


class ForbiddenClassError(ValueError):
    """A pickle names a class or function that is not allowed."""


class CodeToRunError(ForbiddenClassError):
    """A pickle names code that has no place in a checkpoint; its message must not suggest a way to load the file."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickles enum members by getattr
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            # for display only: a WindowsPath cannot be created on other systems
            return pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath
        raise ForbiddenClassError(f"{module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """Safe replacement of ``getattr`` that returns members of enumerations only."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise ForbiddenClassError("builtins.getattr")
    return kind[name]


def load_dcp_metadata(data: bytes) -> Any:
    """Load the ``Metadata`` from a ``.metadata`` file of ``torch.distributed.checkpoint``.

    Raises:
        ForbiddenClassError: if the file names any other class, which is then neither imported nor called.
        Exception: of various classes, if the file is damaged.
    """
    return _MetadataUnpickler(io.BytesIO(data)).load()


def load_torch(
    file: Any, *, weights_only: bool | None = None, mmap: bool = False, may_have_configuration: bool = True
) -> Any:
    """``torch.load`` on the CPU that also allows OmegaConf's containers.

    Args:
        file: a path, or a stream.
        weights_only: ``False`` unpickles any object: only for trusted files.
        mmap: as in ``torch.load``; requires a path.
        may_have_configuration: False excludes OmegaConf, whose import takes 4 MB.

    Raises:
        ForbiddenClassError: naming what is not allowed, and where; a ``CodeToRunError`` if loading it would run code.
        Exception: of various classes, if the file is damaged.
    """
    if weights_only is False:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
    with _omegaconf_allowed() if may_have_configuration else nullcontext():
        try:
            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "weights_only" not in str(error):
                raise
            if hasattr(file, "seek"):
                file.seek(0)
            # torch's own message advises an option that would run the file's code
            refused: Exception = _refusal(file) or type(error)(_without_advice(str(error)))
        raise refused


def with_way_out(error: ForbiddenClassError) -> str:
    """Return the error's message with the advice to pass ``weights_only=False``, for callers that accept it."""
    if isinstance(error, CodeToRunError):
        return str(error)
    return f"{error}, or pass weights_only=False if you trust the source of the file"


def _refusal(file: Any) -> ForbiddenClassError | None:
    """Return the error for a file that names classes that are not allowed; None if it names no such class."""
    uses, is_complete = uses_in(file)
    unsafe = _not_allowed(uses)
    running = [use for use in unsafe if use.runs_code]
    if running:
        calls = [f"it would call {use}" if use.is_called else f"it names {use}" for use in running]
        return CodeToRunError(f"loading it would run code: {', '.join(calls)}. {NOT_RUN}; use another checkpoint")
    if not unsafe:
        return None
    found = ", ".join(map(str, unsafe))
    if not is_complete:
        return CodeToRunError(
            f"it contains objects of classes that are not allowed ({found}), and its other contents cannot be "
            f"determined, as in files that hide code. {NOT_RUN}"
        )
    imports = "; ".join(f"from {use.module} import {use.name.partition('.')[0]}" for use in unsafe)
    allowed = ", ".join(use.name for use in unsafe)
    return ForbiddenClassError(
        f"it contains objects of classes that are loaded only if you allow them: {found}. Loading them runs their "
        f"code. If you know that all of them belong to your project or its libraries, write '{imports}; "
        f"torch.serialization.add_safe_globals([{allowed}])' before loading"
    )


def _not_allowed(uses: list[Use]) -> list[Use]:
    """Filter the names that torch refuses. torch only answers for a file, so a file with the names is created."""
    named = b"".join(f"c{use.module}\n{use.name}\n".encode() for use in uses if "\n" not in use.kind)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + named + b"N.")
        made.writestr("archive/version", "3\n")
    archive.seek(0)
    unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(archive))
    return sorted((use for use in uses if use.kind in unsafe or "\n" in use.kind), key=lambda use: use.kind)


def _without_advice(text: str) -> str:
    """Remove torch's advice on how to load the file all the same from its message."""
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    advice = re.compile(r"weights_only|trust|arbitrary code|safe_globals|Weights only load|^WeightsUnpickler error:$")
    sentences = re.split(r"(?<=[.:])\s+", text)
    return " ".join(each for each in sentences if not advice.search(each)).strip() or "it cannot be unpickled"


@contextmanager
def _omegaconf_allowed() -> Iterator[None]:
    """Context that allows the classes in OmegaConf's containers, which resolve no interpolation on loading."""
    from omegaconf import base, nodes
    from omegaconf.dictconfig import DictConfig
    from omegaconf.listconfig import ListConfig

    kinds: list[Any] = [
        kind for kind in vars(nodes).values() if isinstance(kind, type) and issubclass(kind, nodes.ValueNode)
    ]
    kinds += [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, collections.defaultdict]
    kinds += [bool, bytes, dict, float, int, list, str, tuple]
    kinds += [(pathlib.PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")]  # Python 3.13
    kinds += [(getattr(typing, name), f"typing.{name}") for name in "Any Dict List Optional Tuple Union".split()]
    own = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([kind for kind in dict.fromkeys(kinds) if kind not in own]):
        yield
