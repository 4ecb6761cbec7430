"""Check a pickle before torch's restricted unpickler reads it: what it names and calls, and how its values are nested.

The unpickler decides which classes may be named, but not what a small file may take: values that contain one another
many times over, or calls that allocate any number of bytes.
"""

from __future__ import annotations

import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Collection, Iterable
from typing import IO, Any

_DEPTH = 100  # maximum levels of nesting, since functions that walk through a checkpoint are recursive
_REPETITIONS = 2**18  # maximum number of repeated values, in addition to one for each byte of the pickle


class UnsafeFileError(ValueError):
    """A file contains more than data, or takes far more memory or time than its size justifies."""

    @classmethod
    def of(cls, what: str) -> UnsafeFileError:
        return cls(f"{what}. Do not load this file unless you trust its source")


class _Name(str):
    """The dotted name of a class or function that a pickle names."""


class _Node:
    """A container or object that a pickle makes, by a kind of container or by a call of a dotted name."""

    __slots__ = ("depth", "is_used", "made_by", "parts", "weight")

    def __init__(self, made_by: str, parts: tuple[Any, ...]) -> None:
        self.made_by = made_by
        self.parts = parts
        self.weight = 1  # the number of values in it, counted each time that they occur
        self.depth = 1  # levels of nesting
        self.is_used = False  # whether another node contains this one, which must then not change
        self.add(parts)

    def add(self, values: Iterable[Any]) -> None:
        for value in values:
            if type(value) is not _Node:
                self.weight += 1
                continue
            value.is_used = True
            self.weight += value.weight
            self.depth = max(self.depth, value.depth + 1)
        if self.depth > _DEPTH:
            raise UnsafeFileError.of(f"its values are nested more than {_DEPTH} levels deep")


def scan(pickled: IO[bytes], own: Collection[str], names: set[str]) -> None:
    """Check a pickle; the stream is then at the pickle's end.

    Args:
        own: names that the reader allows by default. Of these, only those that make plain values may be called. Calls
            of other names, which the user has allowed, are not restricted.
        names: receives the dotted names of the classes and functions in the pickle, even if an error is raised.

    Raises:
        UnsafeFileError: if unpickling would do more than create plain values, or take too much memory or time.
        ValueError: if this is not a pickle.
    """
    try:
        _scan(pickled, own, names)
    except UnsafeFileError:
        raise
    except (AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise ValueError(f"it is not a pickle of plain values ({type(error).__name__}: {error})") from None


def _scan(pickled: IO[bytes], own: Collection[str], names: set[str]) -> None:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    begin, repetitions = pickled.tell(), 0
    opcodes: Iterable[tuple[Any, Any, Any]] = pickletools.genops(pickled)
    for opcode, argument, position in opcodes:
        kind = opcode.name
        if kind == "MARK":
            marks.append(len(stack))
        elif "PUT" in kind or kind == "MEMOIZE":
            index = len(memo) if argument is None else argument
            if index > position - begin:  # Python's unpickler allocates memory up to this index
                raise UnsafeFileError.of("its memo indices are far larger than the number of its values")
            memo[index] = stack[-1]
        elif "GET" in kind:
            stack.append(value := memo[argument])
            repetitions += value.weight if type(value) is _Node else 0
            if repetitions > _REPETITIONS + position - begin:
                raise UnsafeFileError.of("its values contain one another many times over")
        else:
            count = len(opcode.stack_before)
            if pickletools.markobject in opcode.stack_before:
                count += len(stack) - marks.pop() - 2
            first = len(stack) - count
            if first < (marks[-1] if marks else 0):
                raise IndexError("empty stack")
            taken = tuple(stack[first:])
            del stack[first:]
            if "GLOBAL" in kind:
                # as in Python's own unpickler: older pickle protocols use Python 2 names
                module, name = taken or argument.split(" ", 1)
                module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
                names.add(f"{module}.{name}")
                stack.append(_Name(f"{module}.{name}"))
            elif opcode.stack_after:
                stack.append(_made(kind, argument, taken, own))


def _made(kind: str, argument: Any, taken: tuple[Any, ...], own: Collection[str]) -> Any:
    """Return what an operation puts on the stack in place of the values that it takes from it."""
    if kind in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
        target, *values = taken
        if type(target) is not _Node:
            raise UnsafeFileError.of("it changes an object that it has not made")
        if target.is_used and kind != "BUILD":
            raise UnsafeFileError.of("it contains values that contain themselves")
        target.add(values)
        return target
    if kind in ("REDUCE", "NEWOBJ"):
        _check_call(*taken, own=own, is_class=kind == "NEWOBJ")
        return _Node(taken[0], taken[1:])
    if kind in ("DUP", "EMPTY_SET"):  # would repeat a value uncounted, or take 200 times its size in the file
        raise ValueError(f"neither torch.save nor DCP writes {kind}")
    if "TUPLE" in kind:
        return _Node("tuple", taken)
    return _Node(kind, taken) if taken or kind.startswith("EMPTY") else argument


def _check_call(called: Any, arguments: Any, *, own: Collection[str], is_class: bool) -> None:
    if type(called) is not _Name or type(arguments) is not _Node or arguments.made_by != "tuple":
        raise UnsafeFileError.of("it calls an object that it has made")
    if called == "torch._tensor._rebuild_from_type_v2":  # calls its first argument
        function, _, inner, *_ = arguments.parts
        _check_call(function, inner, own=own, is_class=False)
    elif called in own or called.startswith("omegaconf."):
        if not _makes_plain_values(called, arguments.parts, is_class):
            raise UnsafeFileError.of(f"it calls {called}, which no checkpoint needs")


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
