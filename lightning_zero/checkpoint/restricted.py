"""Reading pickles without running what they name: DCP's metadata, and files of ``torch.save``."""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumMeta
from typing import Any

import torch

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
    # where torch 2.1 and before had them
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}


class ForbiddenClassError(ValueError):
    """A pickle names a class or function that is not among those allowed."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # of Python 3.11.0 to 3.11.3, which pickle members of enumerations so
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            # only ever shown, and a WindowsPath cannot be made elsewhere
            return pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath
        raise ForbiddenClassError(f"{module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration, in the place of any attribute of anything."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise ForbiddenClassError("builtins.getattr")
    return kind[name]


def load_dcp_metadata(data: bytes) -> Any:
    """The ``Metadata`` in a ``.metadata`` file of ``torch.distributed.checkpoint``.

    Raises:
        ForbiddenClassError: if it names anything else; that has not been imported or called.
        Exception: of many classes, if it is damaged.
    """
    return _MetadataUnpickler(io.BytesIO(data)).load()


def load_torch(file: Any, *, weights_only: bool | None = None, mmap: bool = False) -> Any:
    """``torch.load`` on the CPU. OmegaConf's containers are allowed beside what torch allows.

    Args:
        file: a path, or a stream.
        weights_only: ``False`` unpickles whatever is in it: for files of those one trusts.
        mmap: as of ``torch.load``; takes a path.

    Raises:
        ForbiddenClassError: naming what is not allowed, and where it lies.
        Exception: of many classes, if the file is damaged.
    """
    if weights_only is False:
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=False)
    with _omegaconf_allowed():
        try:
            return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except pickle.UnpicklingError as error:
            forbidden = torch.serialization.get_unsafe_globals_in_checkpoint(_rewound(file))
            if not forbidden:
                raise
            raise ForbiddenClassError(_told(forbidden, _rewound(file))) from error


def _rewound(file: Any) -> Any:
    if hasattr(file, "seek"):
        file.seek(0)
    return file


def _told(forbidden: list[str], file: Any) -> str:
    places = _places(file, set(forbidden))
    classes = sorted(forbidden)
    found = ", ".join(f"{name} at {places[name]!r}" if name in places else name for name in classes)
    imports = "; ".join("from {} import {}".format(*name.rsplit(".", 1)) for name in classes)
    allowed = ", ".join(name.rsplit(".", 1)[1] for name in classes)
    return (
        f"it holds objects of classes that are not loaded unless you allow them: {found}. If you trust them, write "
        f"'{imports}; torch.serialization.add_safe_globals([{allowed}])' before loading, or give weights_only=False "
        "if you trust whoever wrote all of it"
    )


@contextmanager
def _omegaconf_allowed() -> Iterator[None]:
    """What OmegaConf's containers consist of, allowed within it. They resolve nothing while they are loaded."""
    from omegaconf import base, nodes
    from omegaconf.dictconfig import DictConfig
    from omegaconf.listconfig import ListConfig

    kinds: list[Any] = [
        kind for kind in vars(nodes).values() if isinstance(kind, type) and issubclass(kind, nodes.ValueNode)
    ]
    kinds += [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, collections.defaultdict]
    kinds += [bool, bytes, dict, float, int, list, str, tuple]
    kinds += [(pathlib.PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")]  # of Python 3.13
    kinds += [
        (getattr(typing, name), f"typing.{name}") for name in ("Any", "Dict", "List", "Optional", "Tuple", "Union")
    ]
    own = torch.serialization.get_safe_globals()
    new = [kind for kind in dict.fromkeys(kinds) if kind not in own]
    with torch.serialization.safe_globals(new):
        yield


class _Anything:
    """In the place of every object while it is only asked where it lies: takes whatever a pickle does, does nothing."""

    kind: str
    items: list[Any]

    def __new__(cls, *args: Any) -> _Anything:
        self = object.__new__(cls)
        self.items = list(args)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.items.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append(value)

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    def __hash__(self) -> int:
        return id(self)


class _Finder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Anything,), {"kind": f"{module}.{name}"})

    def persistent_load(self, _: Any) -> Any:
        return None


def _places(file: Any, wanted: set[str]) -> dict[str, str]:
    """Where in a file's dictionaries objects of some classes lie first, by class, as far as it can be told."""
    found: dict[str, str] = {}
    seen: set[int] = set()

    def visit(value: Any, path: str) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, _Anything) and kind.kind in wanted:
            found.setdefault(kind.kind, path)
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                visit(item, path)
        elif isinstance(value, _Anything):
            for item in value.items:
                visit(item, path)

    try:
        reader = torch._C.PyTorchFileReader(file)
        visit(_Finder(io.BytesIO(reader.get_record("data.pkl"))).load(), "")
    except Exception:  # the error says what is not allowed all the same
        pass
    return found
