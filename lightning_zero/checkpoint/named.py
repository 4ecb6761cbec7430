"""What a pickle names, and whether loading it would run code, without importing or calling any of it."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

_VALUES = {
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "array": {"_array_reconstructor", "array"},
    "builtins": set(
        "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple".split()
    ),
    "collections": {"ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "functools": {"partial"},
    "io": {"BytesIO", "StringIO"},
    "ipaddress": {"IPv4Address", "IPv4Network", "IPv6Address", "IPv6Network"},
    "logging": {"getLogger"},
    "operator": {"itemgetter"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "random": {"Random"},
    "re": {"_compile"},
    "time": {"struct_time"},
    "types": {"MappingProxyType", "SimpleNamespace"},
    "uuid": {"UUID"},
    "zoneinfo": {"ZoneInfo", "ZoneInfo._unpickle"},
}
"""Of Python's own library, what makes plain values; whatever else a file calls there may do anything."""

_RUN_CODE = set(
    """
    _io _posixsubprocess _winapi asyncio bdb builtins cloudpickle code codeop commands concurrent ctypes dill importlib
    io joblib marshal multiprocessing nt os pdb pickle pip pkgutil posix profile pty pydoc runpy setuptools shutil site
    smtplib socket subprocess sys tempfile timeit trace types urllib webbrowser
    """.split()
)
"""Packages of which a file has no reason to name anything but plain values."""

_NAMES_THAT_RUN_CODE = set(
    """
    __import__ Popen check_call check_output eval exec execfile getoutput getstatusoutput import_module load_inline
    popen rmtree run_module run_path runstring system
    """.split()
)
"""Wherever a package has them from."""

_CALLS_THAT_RUN_CODE = {"call", "compile", "getattr", "load", "loads", "open", "remove", "run", "unlink", "unpickle"}


@dataclass
class Use:
    """A class or function that a pickle names.

    Attributes:
        module, name: where it would be imported from.
        place: where in the file's dictionaries it lies first, dotted; empty where that cannot be told.
        is_called: whether loading would call it, as a function is called.
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
        """Whether it has no place in a checkpoint, as far as that is known. Other classes may run code as well."""
        package, last, found = self.module.partition(".")[0], self.name.rpartition(".")[2], self._loaded()
        is_exception = isinstance(found, type) and issubclass(found, BaseException)
        if self.name in _VALUES.get(self.module, ()) or is_exception:
            return False
        if package in _RUN_CODE or last in _NAMES_THAT_RUN_CODE or not self._is_importable:
            return True
        home = str(getattr(found, "__module__", None)).partition(".")[0]
        if isinstance(found, ModuleType) or home in _RUN_CODE - {"builtins"}:
            return True
        if not self.is_called:
            return False
        if last in _CALLS_THAT_RUN_CODE or package in sys.stdlib_module_names:
            return True
        is_function = not isinstance(found, type) and last[:1].islower()
        return package == "torch" and is_function

    def _loaded(self) -> Any:
        """What the name stands for, if its module has been imported; None if not, or if it has no such name."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            try:
                found = vars(found).get(part)  # no attribute: a module may import something to give it
            except TypeError:
                return None
            if isinstance(found, ModuleType):
                return found  # and reach any code through it
        return found


class _Kind(type):
    """The class of stand-ins; tells whether one is called like a function, or made as an object is."""

    use: Use

    def __call__(cls, *args: Any) -> Any:
        cls.use.is_called = True
        return super().__call__(*args)


class _Anything(metaclass=_Kind):
    """In the place of every object while a file is only looked at: takes whatever a pickle does, does nothing."""

    use = Use("", "")
    items: list[Any]

    def __new__(cls, *args: Any) -> _Anything:
        self = object.__new__(cls)
        self.items = list(args)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Anything:
        raise NotImplementedError  # what a call would give is not known, nor what calling that would do

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
    def __init__(self, file: Any, found: dict[tuple[str, str], _Kind]) -> None:
        super().__init__(file)
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        # as Python itself does: the older forms of pickles have the names of Python 2
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._found:
            self._found[module, name] = _Kind("_Named", (_Anything,), {"use": Use(module, name)})
        return self._found[module, name]

    def persistent_load(self, _: Any) -> Any:
        return None


def uses_in(file: Any) -> tuple[list[Use], bool]:
    """The classes and functions that a file of ``torch.save``, or of ``pickle``, names, and whether these are all.

    Args:
        file: a path, or a stream at its beginning.
    """
    found: dict[tuple[str, str], _Kind] = {}
    values: list[Any] = []
    is_complete = True
    try:
        for pickled in _pickles(file):
            try:
                # a file of torch before 1.6 has a number, another, what wrote it and then the checkpoint
                while len(values) < 4:
                    values.append(_Finder(pickled, found).load())
            except EOFError:
                is_complete = bool(values)
    except Exception:
        is_complete = False
    _find_places(values)
    return [kind.use for kind in found.values()], is_complete


def _pickles(file: Any) -> list[Any]:
    stream = file if hasattr(file, "read") else open(file, "rb")
    try:
        is_archive = zipfile.is_zipfile(stream)
        stream.seek(0)
        if not is_archive:
            return [stream if stream is file else io.BytesIO(stream.read())]
    finally:
        if stream is not file:
            stream.close()
    reader = torch._C.PyTorchFileReader(file if stream is file else os.fspath(file))
    return [io.BytesIO(reader.get_record("data.pkl"))]


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
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = [(item, path) for item in value]
        elif isinstance(value, _Anything):
            inside = [(item, path) for item in value.items]
        waiting += reversed(inside)
