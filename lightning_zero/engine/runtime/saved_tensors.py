"""Saved-tensor hooks: regather parameters that backward needs; also copies of released values that outlive forward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import (
    hooks_on_top,
    never_traced,
    pop_hooks,
    push_hooks,
    set_eval_frame,
    tree_map_only,
)
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.wrapper import WrapperTensor


class SavedTensors:
    """Gathers a unit again when backward unpacks a saved tensor of it whose buffer was released.

    Usually the hook on the gradient of a unit's output has gathered the unit already. The exceptions are tensors that
    leave the unit in another way (a loss kept as an attribute), and graphs that are used twice.

    Args:
        buckets: those whose buffers are released between uses are watched.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self._watching: list[Any] = []
        released = [bucket for bucket in buckets if not bucket.is_replicated]
        self._bucket_of = {bucket.full.untyped_storage()._cdata: bucket for bucket in released}

    def watch(self) -> None:
        """Start to watch the tensors that autograd saves."""
        if not self._bucket_of:
            return
        outer = hooks_on_top()
        bucket_of, showing = self._bucket_of, self._bucket_showing

        # Called for every saved tensor, often more than a thousand times a step, so its time counts.
        @never_traced
        def pack(tensor: Tensor) -> Any:
            compiler = set_eval_frame(None)  # not by ``untraced``, to save one call
            try:
                if type(tensor) is Tensor and tensor.layout is torch.strided:
                    bucket = bucket_of.get(tensor.untyped_storage()._cdata)
                else:
                    bucket = showing(tensor)
                if bucket is None and outer is not None:
                    return outer[0](tensor)
                saved = tensor.detach(), tensor._version, bucket
                return tuple.__new__(Saved, saved)  # in half the time of ``Saved(...)``
            finally:
                set_eval_frame(compiler)

        @never_traced
        def unpack(packed: Any) -> Tensor:
            compiler = set_eval_frame(None)
            try:
                return packed.unpack() if type(packed) is Saved else outer[1](packed)
            finally:
                set_eval_frame(compiler)

        pack.outer = outer
        push_hooks(pack, unpack)
        self._watching.append((pack, unpack))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context without the hooks that ``watch`` pushed, unless hooks of the user are on top of them."""
        aside = self.stop()
        try:
            yield
        finally:
            for hooks in reversed(aside):
                push_hooks(*hooks)
                self._watching.append(hooks)

    def stop(self) -> list[Any]:
        """Remove the hooks of every ``watch``, unless hooks of the user are on top of them; returns those removed."""
        stopped = []
        while self._watching and hooks_on_top() == self._watching[-1]:
            stopped.append(self._watching.pop())
            pop_hooks()
        return stopped

    def outlive(self, output: Any) -> Any:
        """A module's output, with tensors over buffers that are about to be released replaced by copies."""
        if isinstance(output, Tensor):  # as of most modules
            return output if self._bucket_showing(output) is None else output.clone()
        if any(self._bucket_showing(tensor) is not None for tensor in tensors_in(output)):
            return tree_map_only(Tensor, lambda t: t if self._bucket_showing(t) is None else t.clone(), output)
        return output

    def outlive_attributes(self, attributes: Attributes) -> None:
        """The same for attributes that a forward has set, such as ``self.row = self.weight[0]``."""
        for holder, name in attributes.that_may_hold_tensors():
            kept = self.outlive(holder[name])
            if kept is not holder[name]:
                holder[name] = kept

    def _bucket_showing(self, tensor: Tensor) -> Bucket | None:
        if tensor.layout is not torch.strided or isinstance(tensor, WrapperTensor) or not self._bucket_of:
            return None
        return self._bucket_of.get(tensor.untyped_storage()._cdata)

    def unwatch(self) -> None:
        """Remove the hooks of the last ``watch``."""
        if self._bucket_of:
            pop_hooks()
            self._watching.pop()


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}


class Attributes:
    """Attributes of a module and its submodules that a forward may set to tensors."""

    def __init__(self, module: nn.Module) -> None:
        # Numbers, strings and flags from the constructor are skipped, which leaves few attributes.
        self._found = [(weakref.ref(inner), *_others(vars(inner))) for inner in module.modules()]

    def that_may_hold_tensors(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Attributes that may hold tensors now, directly or in lists, tuples and dictionaries."""
        for position, (reference, names, count) in enumerate(self._found):
            module = reference()
            if module is None:
                continue
            holder = vars(module)
            if len(holder) != count:
                names, count = _others(holder)
                self._found[position] = reference, names, count
            for name in names:
                if isinstance(holder.get(name), (Tensor, list, tuple, dict)):
                    yield holder, name


def _others(holder: dict[str, Any]) -> tuple[list[str], int]:
    names = [
        name
        for name, value in holder.items()
        if name not in _OF_EVERY_MODULE and not isinstance(value, (bool, int, float, str))
    ]
    return names, len(holder)


class Saved(NamedTuple):
    """A tensor saved by autograd, stored as autograd itself would without hooks.

    Attributes:
        tensor: detached: a node that saved its own output would be a reference cycle otherwise.
        version: the tensor's version when it was saved.
        bucket: the bucket whose buffer holds it, if the buffer may be released meanwhile.
    """

    tensor: Tensor
    version: int
    bucket: Bucket | None

    @classmethod
    def of(cls, tensor: Tensor, bucket: Bucket | None = None) -> Saved:
        return cls(tensor.detach(), tensor._version, bucket)

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it has been written to since it was saved.
        """
        if self.bucket is not None:
            self.bucket.gather()
            self.bucket.wait()
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


def changed_in_place(shape: torch.Size, found: int, expected: int) -> RuntimeError:
    """The error that autograd itself raises."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"tensor of shape {tuple(shape)} is at version {found}; expected version {expected} instead."
    )


def is_watched_by_others() -> bool:
    """Whether saved-tensor hooks of others are active: of a checkpointed region, or of ``save_on_cpu``."""
    hooks = hooks_on_top()
    while hooks is not None and hasattr(hooks[0], "outer"):  # ours, which pass other tensors on to the outer hooks
        hooks = hooks[0].outer
    return hooks is not None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, dictionaries (ModelOutput too) and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
