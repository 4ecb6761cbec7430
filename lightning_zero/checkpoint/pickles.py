"""Scan a pickle before it is unpickled: what it names and calls, and how much memory and time it takes.

torch's restricted unpickler decides which classes may be named. It does not limit what a small file may take:
containers that contain one another many times over, calls that allocate any number of bytes, or indices far beyond the
end of the memo.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Iterable
from typing import IO, Any

_DEPTH = 100  # maximum levels of nesting, since functions that walk through a checkpoint are recursive
_REPETITIONS = 2**18  # maximum number of repeated values, in addition to one for each byte of the pickle
_KEYS = 10**4  # maximum number of large integers and of tuples as keys: arbitrarily many may have the same hash
_BYTES, _BYTES_PER_BYTE = 2**24, 64  # maximum estimated size of the values: a fixed number, and some for each byte read


class UnsafeFileError(ValueError):
    """A file contains more than data, or takes far more memory or time than its size justifies."""

    @classmethod
    def of(cls, what: str) -> UnsafeFileError:
        return cls(f"{what}. Do not load this file unless you trust its source")


class _Name(str):
    """The dotted name of a class or function that a pickle names."""


class _Node:
    """A container or object that a pickle makes: by a kind of container, or by a class or function of a dotted name."""

    parts: tuple[Any, ...] = ()  # the elements of a tuple
    weight = 1  # number of values in it, counted each time that they occur
    depth = 1  # levels of nesting
    is_used = False  # whether another container contains this one, which must then not change: weights would be wrong
    tuples = 0  # number of tuples that a list contains

    def __init__(self, made_by: str) -> None:
        self.made_by = made_by


class Scan:
    """A scan of a pickle.

    Args:
        own: names that the reader allows by default. Of these, only those that make plain values may be called. Calls
            of other names, which the user has allowed, are not restricted.

    Attributes:
        names: dotted names of all classes and functions to which the pickle refers.
        value: the pickled value if it is a number or a text, otherwise a stand-in.
    """

    def __init__(self, own: Collection[str] = ()) -> None:
        self.names: set[str] = set()
        self.value: Any = None
        self._own = own
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._repetitions = self._keys = 0

    def run(self, pickled: bytes | IO[bytes]) -> Scan:
        """Scan a pickle; a stream is then at the pickle's end.

        Raises:
            UnsafeFileError: if unpickling would do more than create plain values, or take too much memory or time.
            ValueError: if this is not a pickle.
        """
        stack, memo, size = self._stack, dict[int, Any](), 0
        begin = 0 if isinstance(pickled, bytes) else pickled.tell()
        try:
            opcodes: Iterable[tuple[Any, Any, Any]] = pickletools.genops(pickled)
            for opcode, argument, position in opcodes:
                act, estimate = _OPCODES[opcode.name]
                size += estimate
                if size > _BYTES and size > _BYTES + _BYTES_PER_BYTE * (position - begin):
                    raise UnsafeFileError.of("it takes far more memory than its size justifies")
                if act == "push":
                    stack.append(argument)
                elif act == "put":
                    index = len(memo) if argument is None else argument
                    if index > position - begin:
                        raise UnsafeFileError.of("its memo indices are far larger than the number of its values")
                    memo[index] = stack[-1]
                elif act == "get":
                    stack.append(value := memo[argument])
                    self._repetitions += value.weight if type(value) is _Node else 0
                    if self._repetitions > _REPETITIONS + position - begin:
                        raise UnsafeFileError.of("its values contain one another many times over")
                elif act is not None:
                    act(self, argument)
            self.value = stack.pop()
        except UnsafeFileError:
            raise
        except (AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
            raise ValueError(f"it is not a pickle of plain values ({type(error).__name__}: {error})") from None
        return self

    def _push(self, kind: str, values: Iterable[Any] = ()) -> _Node:
        node = _Node(kind)
        self._add(node, values)
        self._stack.append(node)
        return node

    def _add(self, node: _Node, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) is not _Node:
                node.weight += 1
                continue
            value.is_used = True
            node.weight += value.weight
            if value.depth >= node.depth:
                node.depth = value.depth + 1
        if node.depth > _DEPTH:
            raise UnsafeFileError.of(f"its values are nested more than {_DEPTH} levels deep")

    def _since_mark(self) -> list[Any]:
        return self._last(len(self._stack) - self._marks.pop())

    def _last(self, count: int) -> list[Any]:
        first = len(self._stack) - count
        if first < (self._marks[-1] if self._marks else 0):
            raise IndexError("empty stack")
        values = self._stack[first:]
        del self._stack[first:]
        return values

    def _fill(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not _Node:
            raise UnsafeFileError.of("it changes an object that it has not made")
        if target.is_used:
            raise UnsafeFileError.of("it contains values that contain themselves")
        self._add(target, values)
        if target.made_by == "list":
            target.tuples += sum(map(_has_known_hash, values))
        else:
            self._count_keys(sum(map(_has_known_hash, values[::2])))

    def _tuple(self, values: list[Any]) -> None:
        self._push("tuple", values).parts = tuple(values)

    def _name(self, module: str, name: str) -> None:
        # as in Python's own unpickler: older pickle protocols use Python 2 names
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self._stack.append(_Name(f"{module}.{name}"))
        self.names.add(f"{module}.{name}")

    def _long(self, number: int) -> None:
        self._count_keys(number.bit_length() > 63)
        self._stack.append(number)

    def _count_keys(self, count: int) -> None:
        self._keys += count
        if self._keys > _KEYS:
            raise UnsafeFileError.of(f"it contains more than {_KEYS} keys that may all have the same hash")

    def _storage(self) -> None:
        (identifier,) = self._last(1)
        if type(identifier) is not _Node or identifier.made_by != "tuple" or identifier.weight > 16:
            raise UnsafeFileError.of("it refers to something other than the values of a tensor")
        self._push("storage")

    def _call(self, *, is_class: bool) -> None:
        called, arguments = self._last(2)
        self._check_call(called, arguments, is_class)
        self._push(called, [arguments])

    def _check_call(self, called: Any, arguments: Any, is_class: bool) -> None:
        if type(called) is not _Name or type(arguments) is not _Node or arguments.made_by != "tuple":
            raise UnsafeFileError.of("it calls an object that it has made")
        if called == "torch._tensor._rebuild_from_type_v2":  # calls its first argument
            function, _, inner, *_ = arguments.parts
            self._check_call(function, inner, is_class=False)
        elif called in self._own or called.startswith("omegaconf."):
            self._count_keys(sum(part.tuples for part in arguments.parts if type(part) is _Node))
            if not _makes_plain_values(called, arguments.parts, is_class):
                raise UnsafeFileError.of(f"it calls {called}, which no checkpoint needs")

    def _build(self) -> None:
        target, state = self._last(2)
        made_by = target.made_by if type(target) is _Node else ""
        if "." not in made_by or (made_by in self._own and made_by.startswith("torch.")):
            raise UnsafeFileError.of("it changes an object that it has not made")
        self._add(target, [state])
        self._stack.append(target)


def _has_known_hash(value: Any) -> bool:
    """Whether a value is a tuple with numbers, for which other tuples with the same hash can be found."""
    return type(value) is _Node and value.made_by == "tuple" and not all(type(part) is str for part in value.parts)


_REBUILD = "torch._utils._rebuild_"
_PLAIN = set(
    """
    builtins.complex builtins.set collections.Counter collections.OrderedDict collections.defaultdict
    pathlib.PosixPath pathlib._local.PosixPath torch.Size torch.device torch.serialization._get_layout
    """.split()
)


def _makes_plain_values(called: str, arguments: tuple[Any, ...], is_class: bool) -> bool:
    """Whether a call makes an object whose size in memory is at most that of its arguments."""
    if called == "_codecs.encode":  # makes bytes; codecs other than this one may multiply their size
        return arguments[1:] == ("latin1",)
    if called in ("builtins.bytearray", "builtins.bytes"):  # given a number, these allocate as many bytes
        return all(type(argument) is _Node and argument.made_by == "_codecs.encode" for argument in arguments)
    if called.startswith(_REBUILD):
        return "_device_tensor_" not in called  # these copy a tensor, whose shape may be far larger than its storage
    return called in _PLAIN or (is_class and called.startswith("omegaconf."))


# What to do for an opcode, and how many bytes its value takes in memory, as an estimate.
_OPCODES: dict[str, tuple[Any, int]] = {name: (None, 0) for name in ("PROTO", "FRAME", "STOP")}
_OPCODES |= dict.fromkeys(["NONE", "NEWTRUE", "NEWFALSE", "BININT1"], ("push", 8))
_OPCODES |= dict.fromkeys(["BININT", "BININT2", "BINFLOAT"], ("push", 40))
_OPCODES |= dict.fromkeys(["BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING"], ("push", 64))
_OPCODES |= dict.fromkeys(["SHORT_BINBYTES", "BINBYTES", "BINBYTES8"], ("push", 48))
_OPCODES |= dict.fromkeys(["BINPUT", "LONG_BINPUT"], ("put", 100))
_OPCODES |= {"MEMOIZE": ("put", 16), "BINGET": ("get", 8), "LONG_BINGET": ("get", 8)}
_ACTS: dict[str, tuple[Callable[[Scan, Any], Any], int]] = {
    "LONG1": (Scan._long, 48),
    "EMPTY_LIST": (lambda scan, _: scan._push("list"), 80),
    "EMPTY_DICT": (lambda scan, _: scan._push("dict"), 80),
    "EMPTY_TUPLE": (lambda scan, _: scan._push("tuple"), 8),
    "MARK": (lambda scan, _: scan._marks.append(len(scan._stack)), 80),
    "TUPLE": (lambda scan, _: scan._tuple(scan._since_mark()), 64),
    "TUPLE1": (lambda scan, _: scan._tuple(scan._last(1)), 64),
    "TUPLE2": (lambda scan, _: scan._tuple(scan._last(2)), 64),
    "TUPLE3": (lambda scan, _: scan._tuple(scan._last(3)), 64),
    "APPEND": (lambda scan, _: scan._fill(scan._last(1)), 16),
    "APPENDS": (lambda scan, _: scan._fill(scan._since_mark()), 16),
    "SETITEM": (lambda scan, _: scan._fill(scan._last(2)), 200),
    "SETITEMS": (lambda scan, _: scan._fill(scan._since_mark()), 200),
    "GLOBAL": (lambda scan, text: scan._name(*text.split(" ", 1)), 8),
    "STACK_GLOBAL": (lambda scan, _: scan._name(*scan._last(2)), 8),
    "BINPERSID": (lambda scan, _: scan._storage(), 400),
    "REDUCE": (lambda scan, _: scan._call(is_class=False), 500),
    "NEWOBJ": (lambda scan, _: scan._call(is_class=True), 200),
    "BUILD": (lambda scan, _: scan._build(), 100),
}
_OPCODES |= _ACTS
