"""Saved-tensor hooks that gather parameters again for backward, and copies of outputs that outlast their buffer."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.compat import (
    FLAT_WEIGHTS,
    address_of,
    hooks_on_top,
    local_memory,
    pop_hooks,
    push_hooks,
    untraced,
)
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import slot_of
from lightning_zero.engine.tensor.wrapper import WrapperTensor


class SavedTensors:
    """Gathers a unit again when backward unpacks one of its saved tensors after the unit was released.

    Usually the hook on the gradient of the unit's output has already gathered the unit, but not if a tensor leaves the
    unit in another way (such as a loss stored as an attribute), or if a graph is used twice.

    Args:
        buckets: all buckets. A saved tensor is watched only if it lies in a buffer that is released between uses.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self._watching: list[Any] = []
        released = [bucket for bucket in buckets if not bucket.is_replicated]
        self._bucket_of = {address_of(bucket.full.untyped_storage()): bucket for bucket in released}

    def watch(self) -> None:
        """Push saved-tensor hooks. No effect if no buffer is ever released."""
        if not self._bucket_of:
            return
        outer = hooks_on_top()
        bucket_of, showing = self._bucket_of, self._bucket_showing

        # Called for every saved tensor, often more than a thousand times a step, so speed matters.
        @untraced
        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.layout is torch.strided:
                bucket = bucket_of.get(address_of(tensor.untyped_storage()))
            else:
                bucket = showing(tensor)
                if bucket is None and (slot := slot_of(tensor)) is not None and slot.read_as_data is not None:
                    # its module has replaced ``data``; without hooks, backward uses what a parameter's data is by then
                    bucket, tensor = slot.bucket, tensor.detach()
                    tensor.data = bucket.segment_view(slot.index)
            if bucket is None and outer is not None:
                return outer[0](tensor)
            return tuple.__new__(
                Saved, (tensor.detach(), tensor._version, bucket)
            )  # takes half the time of ``Saved(...)``

        @untraced
        def unpack(packed: Any) -> Tensor:
            return packed.unpack() if type(packed) is Saved else outer[1](packed)

        pack.outer = outer
        push_hooks(pack, unpack)
        self._watching.append((pack, unpack))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Context in which the hooks that ``watch`` pushed are removed, unless user hooks are on top of them."""
        aside = self.stop()
        try:
            yield
        finally:
            for hooks in reversed(aside):
                push_hooks(*hooks)
                self._watching.append(hooks)

    def stop(self) -> list[Any]:
        """Remove the hooks of every ``watch``, unless user hooks are on top of them, and return the removed hooks."""
        stopped = []
        while self._watching and hooks_on_top() == self._watching[-1]:
            stopped.append(self._watching.pop())
            pop_hooks()
        return stopped

    def outlive(self, output: Any) -> Any:
        """Return a module's output, with copies of the tensors that lie in buffers that are about to be released."""
        if isinstance(output, Tensor):  # the common case
            return output if self._bucket_showing(output) is None else _copied(output)
        if any(self._bucket_showing(tensor) is not None for tensor in tensors_in(output)):
            return with_tensors(output, lambda t: t if self._bucket_showing(t) is None else _copied(t))
        return output

    def outlive_attributes(self, modules: Iterable[weakref.ref[nn.Module]]) -> None:
        """Apply ``outlive`` to attributes that a forward of modules has set, such as ``self.row = self.weight[0]``."""
        for reference in modules:
            if (module := reference()) is None:
                continue
            for holder, name in _that_may_hold_tensors(module):
                kept = self.outlive(holder[name])
                if kept is not holder[name]:
                    holder[name] = kept

    def _bucket_showing(self, tensor: Tensor) -> Bucket | None:
        if tensor.layout is not torch.strided or isinstance(tensor, WrapperTensor) or not self._bucket_of:
            return None
        return self._bucket_of.get(address_of(local_memory(tensor).untyped_storage()))

    def unwatch(self) -> None:
        """Remove the hooks of the last ``watch``."""
        if self._bucket_of:
            pop_hooks()
            self._watching.pop()


def _copied(view: Tensor) -> Tensor:
    """Copy a view of a buffer. Under ``inference_mode``, too, a view of an ordinary tensor is an ordinary tensor."""
    if torch.is_inference_mode_enabled() and not view.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return view.clone()
    return view.clone()


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {FLAT_WEIGHTS}


def _that_may_hold_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield holder and name of a module's buffers, and of its attributes that are tensors, lists, tuples or dicts."""
    holder = vars(module)
    for name in [name for name in holder if name not in _OF_EVERY_MODULE]:
        if isinstance(holder[name], (Tensor, list, tuple, dict)):
            yield holder, name
    if buffers := holder.get("_buffers"):
        for name in list(buffers):
            yield buffers, name


class Saved(NamedTuple):
    """A tensor saved by autograd, stored as autograd itself would store it without hooks.

    Attributes:
        tensor: the saved tensor, detached, since otherwise a node and its saved output would form a reference cycle.
        bucket: the bucket whose buffer holds the tensor, if the buffer may be released before backward; else None.
    """

    tensor: Tensor
    version: int
    bucket: Bucket | None

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version

    def unpack(self) -> Tensor:
        """Return the tensor; gather its bucket first if there is one.

        Raises:
            RuntimeError: autograd's usual error, if the tensor has been written to since it was saved.
        """
        if self.bucket is not None:
            self.bucket.gather()
            self.bucket.wait()
        if not self.is_unchanged:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead."
            )
        return self.tensor


def is_watched_by_others() -> bool:
    """Whether other code's saved-tensor hooks are active, such as those of activation checkpointing."""
    hooks = hooks_on_top()
    while hooks is not None and hasattr(hooks[0], "outer"):  # skip the engine's hooks, which call the outer hooks
        hooks = hooks[0].outer
    return hooks is not None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, sets, mappings (such as ``ModelOutput``) and dataclasses."""
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


def with_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Replace the tensors that ``tensors_in`` yields: in place in mutable objects, whose classes may be the user's."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [with_tensors(item, replace) for item in value]
        if isinstance(value, list):
            value[:] = items
        elif isinstance(value, set):
            value.clear()
            value.update(items)
        else:
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
    elif isinstance(value, MutableMapping):
        for key, item in list(value.items()):
            value[key] = with_tensors(item, replace)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                # not ``setattr``, which a frozen dataclass refuses
                object.__setattr__(value, field.name, with_tensors(getattr(value, field.name), replace))
    return value
