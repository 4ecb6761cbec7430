"""List the classes and functions that a pickle names, and whether loading would run code; imports and calls nothing."""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lightning_zero.engine.compat import PyTorchFileReader

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
"""Packages from which a checkpoint has no reason to name anything but plain values."""

_NAMES_THAT_RUN_CODE = set(
    """
    __import__ Popen check_call check_output eval exec execfile getoutput getstatusoutput import_module load_inline
    popen rmtree run_module run_path runstring system
    """.split()
)
"""Names that run code, whichever package they come from."""

_CALLS_THAT_RUN_CODE = {"call", "compile", "getattr", "load", "loads", "open", "remove", "run", "unlink", "unpickle"}


@dataclass
class Use:
    """A class or function that a pickle names.

    Attributes:
        module, name: where it would be imported from.
        place: dotted path of its first occurrence in the file's dictionaries; empty if unknown.
        is_called: whether loading would call it as a function.
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
        """Whether it is known to have no place in a checkpoint. Other classes may run code as well."""
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
        """Return the named object if its module is already imported and has that name, else None."""
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
    """Metaclass of stand-ins; records whether a stand-in is called like a function or created like an object."""

    use: Use

    def __call__(cls, *args: Any) -> Any:
        cls.use.is_called = True
        return super().__call__(*args)


class _Anything(metaclass=_Kind):
    """Stand-in for every object while a file is inspected: accepts all of pickle's operations and ignores them."""

    use = Use("", "")
    items: list[Any]

    def __new__(cls, *args: Any) -> _Anything:
        self = object.__new__(cls)
        self.items = list(args)
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Anything:
        raise NotImplementedError  # the result of a call is unknown, and so is the effect of calling it

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
        # as Python's own unpickler: older pickle protocols use the names of Python 2
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        if (module, name) not in self._found:
            self._found[module, name] = _Kind("_Named", (_Anything,), {"use": Use(module, name)})
        return self._found[module, name]

    def persistent_load(self, _: Any) -> Any:
        return None


def uses_in(file: Any) -> tuple[list[Use], bool]:
    """Return the classes and functions that a ``torch.save`` or ``pickle`` file names, and whether those are all.

    Args:
        file: a path, or a stream at its start.
    """
    found: dict[tuple[str, str], _Kind] = {}
    values: list[Any] = []
    is_complete = True
    try:
        pickled = _pickled(file)
        try:
            # Files of torch before 1.6 contain a magic number, a version and system information before the checkpoint.
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
