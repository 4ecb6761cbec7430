"""Unpickle DCP metadata and ``torch.save`` files with allowed classes only, and list the classes that a file names."""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import re
import sys
import typing
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import EnumMeta
from types import ModuleType
from typing import Any

import torch

from lightning_zero.engine.compat import PyTorchFileReader

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
    # in torch 2.1 and earlier, these classes were in this module
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}

NOT_RUN = "None of the file's code was run. Do not load the file by other means"


class ForbiddenClassError(ValueError):
    """A pickle names a class or function that is not allowed."""


class CodeToRunError(ForbiddenClassError):
    """Loading a file may run code that no checkpoint needs; the message must not suggest a way to load the file."""


class BoundMethodError(CodeToRunError):
    """A file contains bound methods, which are pickled as calls of ``getattr``; such calls can also run code."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickle enum members as calls of getattr
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            # pure paths suffice for display, and a concrete WindowsPath cannot be created on other systems
            return pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath
        raise ForbiddenClassError(f"{module}.{name}")


def _member(kind: Any, name: Any) -> Any:
    """Safe replacement for ``getattr`` that only returns members of enumerations."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise ForbiddenClassError("builtins.getattr")
    return kind[name]


def load_dcp_metadata(data: bytes) -> Any:
    """Load the ``Metadata`` from a ``.metadata`` file of ``torch.distributed.checkpoint``.

    Raises:
        ForbiddenClassError: if the file names a class that is not allowed; the class is neither imported nor called.
        Exception: of various classes, if the file is damaged.
    """
    return _MetadataUnpickler(io.BytesIO(data)).load()


def load_torch(
    file: Any, *, weights_only: bool | None = None, mmap: bool = False, may_have_configuration: bool = True
) -> Any:
    """Call ``torch.load`` with tensors on the CPU and, by default, OmegaConf's containers allowed.

    Args:
        file: a path, or a stream.
        weights_only: ``False`` unpickles objects of any class; only for trusted files.
        mmap: see ``torch.load``; requires a path.
        may_have_configuration: whether to allow OmegaConf's containers, whose import takes 4 MB.

    Raises:
        ForbiddenClassError: if the file names forbidden classes; a ``CodeToRunError`` if loading would run code.
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
            # torch's own message recommends an option that would run the file's code
            refused: Exception = _refusal(file) or type(error)(_without_advice(str(error)))
        raise refused


def with_way_out(error: ForbiddenClassError) -> str:
    """Return the error's message, with the advice to pass ``weights_only=False`` unless loading would run code."""
    if isinstance(error, BoundMethodError):
        return f"{error}. Do not load this file unless you trust its source; if you do, pass weights_only=False"
    if isinstance(error, CodeToRunError):
        return str(error)
    return f"{error}, or pass weights_only=False if you trust the source of the file"


def _refusal(file: Any) -> ForbiddenClassError | None:
    """Return the error for a file that contains forbidden classes; None if it contains none."""
    uses, is_complete = uses_in(file)
    unsafe = _not_allowed(uses)
    running = [use for use in unsafe if use.runs_code]
    if running:
        if all(use.kind == "builtins.getattr" for use in running):
            return BoundMethodError(f"it contains bound methods: {', '.join(map(str, running))}")
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
        f"it contains objects of classes that are loaded only if you allow them: {found}. Loading runs code of "
        f"these classes. If you know that all of them belong to your project or its libraries, write '{imports}; "
        f"torch.serialization.add_safe_globals([{allowed}])' before loading"
    )


def _not_allowed(uses: list[Use]) -> list[Use]:
    """Return the uses that torch refuses. The names are put into a file in memory, since torch only checks files."""
    named = b"".join(f"c{use.module}\n{use.name}\n".encode() for use in uses if "\n" not in use.kind)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + named + b"N.")
        made.writestr("archive/version", "3\n")
    archive.seek(0)
    unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(archive))
    return sorted((use for use in uses if use.kind in unsafe or "\n" in use.kind), key=lambda use: use.kind)


def _without_advice(text: str) -> str:
    """Remove from torch's message the advice on loading the file anyway."""
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    advice = re.compile(r"weights_only|trust|arbitrary code|safe_globals|Weights only load|^WeightsUnpickler error:$")
    sentences = re.split(r"(?<=[.:])\s+", text)
    return " ".join(each for each in sentences if not advice.search(each)).strip() or "it cannot be unpickled"


@contextmanager
def _omegaconf_allowed() -> Iterator[None]:
    """Context in which torch may load OmegaConf's containers; loading does not resolve their interpolations."""
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


# -- what a pickle names -----------------------------------------------------------------------------------------------

_VALUES = {
    "_codecs": "encode",
    "argparse": "Namespace",
    "array": "_array_reconstructor array",
    "builtins": "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple",
    "collections": "ChainMap Counter OrderedDict UserDict UserList defaultdict deque",
    "copyreg": "_reconstructor",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "io": "BytesIO StringIO",
    "ipaddress": "IPv4Address IPv4Network IPv6Address IPv6Network",
    "logging": "getLogger",
    "operator": "itemgetter",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "random": "Random",
    "re": "_compile",
    "time": "struct_time",
    "types": "MappingProxyType SimpleNamespace",
    "uuid": "UUID",
    "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
}
"""Callables of the standard library that create plain values; any other callable may have side effects."""

_RUN_CODE = set(
    """
    _io _posixsubprocess _winapi asyncio bdb builtins cloudpickle code codeop commands concurrent ctypes dill importlib
    io joblib marshal multiprocessing nt os pdb pickle pip pkgutil posix profile pty pydoc runpy setuptools shutil site
    smtplib socket subprocess sys tempfile timeit trace types urllib webbrowser
    """.split()
)
"""Packages that can run code. A checkpoint needs nothing from these packages except the callables in ``_VALUES``."""

_NAMES_THAT_RUN_CODE = set(
    """
    __import__ Popen check_call check_output eval exec execfile getoutput getstatusoutput import_module load_inline
    popen rmtree run_module run_path runstring system
    """.split()
)
"""Names of callables that run code, in any package."""

_CALLS_THAT_RUN_CODE = {"call", "compile", "getattr", "load", "loads", "open", "remove", "run", "unlink", "unpickle"}


@dataclass
class Use:
    """A class or function that a pickle names.

    Attributes:
        module, name: the module from which loading would import the class or function, and its name in the module.
        place: dotted path of its first occurrence in the file's dictionaries; empty if unknown.
        is_called: whether loading would call the class or function.
    """

    module: str
    name: str
    place: str = ""
    is_called: bool = False

    @property
    def kind(self) -> str:
        return f"{self.module}.{self.name}"

    def __str__(self) -> str:
        kind = self.kind if self._is_importable else repr(self.kind)
        return f"{kind} at {self.place!r}" if self.place else kind

    @property
    def _is_importable(self) -> bool:
        return all(part.isidentifier() for part in self.kind.split("."))

    @property
    def runs_code(self) -> bool:
        """Whether the class or function is known to run code. If False, loading may still run code."""
        package, last, found = self.module.partition(".")[0], self.name.rpartition(".")[2], self._loaded()
        is_class = isinstance(found, type)
        if self.name in _VALUES.get(self.module, "").split() or (is_class and issubclass(found, BaseException)):
            return False
        if package in _RUN_CODE or last in _NAMES_THAT_RUN_CODE or not self._is_importable:
            return True
        home = str(getattr(found, "__module__", None)).partition(".")[0]
        if isinstance(found, ModuleType) or home in _RUN_CODE - {"builtins"}:
            return True
        is_torchs_function = package == "torch" and not is_class and last[:1].islower()
        is_library = last in _CALLS_THAT_RUN_CODE or package in sys.stdlib_module_names or is_torchs_function
        return self.is_called and is_library

    def _loaded(self) -> Any:
        """Return the named object if its module is already imported and has this name, otherwise None."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            try:
                found = vars(found).get(part)  # not getattr: a module's __getattr__ may import
            except TypeError:
                return None
            if isinstance(found, ModuleType):
                return found  # any code can be reached through a module
        return found


class _Kind(type):
    """Metaclass of stand-ins for classes and functions; records whether unpickling calls a stand-in."""

    use: Use

    def __call__(cls, *args: Any) -> Any:
        cls.use.is_called = True
        return super().__call__(*args)


class _Anything(metaclass=_Kind):
    """Stand-in for any object in an inspected file; only stores the values that unpickling would pass to the object."""

    use = Use("", "")
    items: list[Any]

    def __new__(cls, *args: Any) -> _Anything:
        self = object.__new__(cls)
        self.items = list(args)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Anything:
        raise NotImplementedError  # this object stands for the unknown result of a call; calling it could do anything

    def append(self, value: Any) -> None:
        self.items.append(value)

    __setstate__ = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)

    def __hash__(self) -> int:
        return id(self)


class _Finder(pickle.Unpickler):
    def __init__(self, file: Any, found: dict[tuple[str, str], _Kind]) -> None:
        super().__init__(file)
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        # as in Python's own unpickler: older pickle protocols use Python 2 names
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._found:
            self._found[module, name] = _Kind("_Named", (_Anything,), {"use": Use(module, name)})
        return self._found[module, name]

    def persistent_load(self, _: Any) -> Any:
        return None


def uses_in(file: Any) -> tuple[list[Use], bool]:
    """Return the classes and functions named in a ``torch.save`` or ``pickle`` file, and whether the list is complete.

    Args:
        file: a path, or a stream at its start.
    """
    found: dict[tuple[str, str], _Kind] = {}
    values: list[Any] = []
    is_complete = True
    try:
        pickled = _pickled(file)
        try:
            # Files from torch before 1.6 begin with a magic number, a version and system information.
            while len(values) < 4:
                values.append(_Finder(pickled, found).load())
        except EOFError:
            is_complete = bool(values)
    except Exception:
        is_complete = False
    _find_places(values)
    return [kind.use for kind in found.values()], is_complete


def _pickled(file: Any) -> Any:
    is_stream = hasattr(file, "read")
    with nullcontext(file) if is_stream else open(file, "rb") as stream:
        is_archive = zipfile.is_zipfile(stream)
        stream.seek(0)
        if not is_archive:
            return stream if is_stream else io.BytesIO(stream.read())
    reader = PyTorchFileReader(file if is_stream else os.fspath(file))
    return io.BytesIO(reader.get_record("data.pkl"))


def _find_places(values: Any) -> None:
    seen: set[int] = set()
    waiting: list[tuple[Any, str]] = [(value, "") for value in values]
    while waiting:
        value, path = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = value if isinstance(value, _Kind) else type(value)
        if isinstance(kind, _Kind):
            kind.use.place = kind.use.place or path
        inside: list[tuple[Any, str]] = []
        if isinstance(value, dict):
            inside = [(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
        elif isinstance(value, (list, tuple, set, frozenset, _Anything)):
            inside = [(item, path) for item in (value.items if isinstance(value, _Anything) else value)]
        waiting += reversed(inside)
