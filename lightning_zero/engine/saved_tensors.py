"""What autograd saved of parameters that are released before it is needed again, and what else outlives a forward."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.compilation import never_traced, set_eval_frame
from lightning_zero.engine.sharded_tensor import Handle


class SavedTensors:
    """Gathers a unit again when backward needs a saved value of it that is not there.

    As a rule the gradient of a unit's output has announced its backward. Where something else leaves a unit (a loss
    kept as an attribute), or a graph is used twice, the saved tensor itself asks.

    Args:
        buckets: those whose buffers are released between their uses are watched for.
    """

    def __init__(self, buckets: list[Bucket]) -> None:
        self._watching: list[Any] = []
        self._bucket_of = {bucket.full.untyped_storage()._cdata: bucket for bucket in buckets if not bucket.replicated}

    def watch(self) -> None:
        """Look at what autograd saves from here on."""
        if not self._bucket_of:
            return
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        bucket_of, showing = self._bucket_of, self._bucket_showing

        # Called for whatever autograd saves, a thousand times a step and more: each line here is a part of a step.
        @never_traced
        def pack(tensor: Tensor) -> Any:
            compiler = set_eval_frame(None)  # not by ``untraced``: one call less
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
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        self._watching.append((pack, unpack))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Without what ``watch`` began, as far as no hooks of the user's came on top of it."""
        aside = self.stop()
        try:
            yield
        finally:
            for hooks in reversed(aside):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
                self._watching.append(hooks)

    def stop(self) -> list[Any]:
        """End what every ``watch`` began, as far as no hooks of the user's came on top of it; what that was."""
        stopped = []
        while self._watching and torch._C._autograd._top_saved_tensors_default_hooks(False) == self._watching[-1]:
            stopped.append(self._watching.pop())
            torch._C._autograd._pop_saved_tensors_default_hooks()
        return stopped

    def outlive(self, output: Any) -> Any:
        """An output of a module, with copies of the tensors in it that show parameters, which are about to go."""
        if isinstance(output, Tensor):  # as of most modules
            return output if self._bucket_showing(output) is None else output.clone()
        if any(self._bucket_showing(tensor) is not None for tensor in tensors_in(output)):
            return tree_map_only(Tensor, lambda t: t if self._bucket_showing(t) is None else t.clone(), output)
        return output

    def outlive_attributes(self, attributes: Attributes) -> None:
        """The same for what a forward has kept as attributes, such as ``self.row = self.weight[0]``."""
        for holder, name in attributes.that_may_hold_tensors():
            kept = self.outlive(holder[name])
            if kept is not holder[name]:
                holder[name] = kept

    def _bucket_showing(self, tensor: Tensor) -> Bucket | None:
        if tensor.layout is not torch.strided or isinstance(tensor, Handle) or not self._bucket_of:
            return None
        return self._bucket_of.get(tensor.untyped_storage()._cdata)

    def unwatch(self) -> None:
        """Stop what the last ``watch`` began."""
        if self._bucket_of:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._watching.pop()


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_flat_weights"}


class Attributes:
    """The attributes of a module and of those in it, of which a forward may make some tensors."""

    def __init__(self, module: nn.Module) -> None:
        # Numbers, words and flags of the constructor stay what they are: of others of a module there are few.
        self._found = [(weakref.ref(inner), *_others(vars(inner))) for inner in module.modules()]

    def that_may_hold_tensors(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where tensors may be now, directly or in lists, tuples and dictionaries."""
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
    """What autograd has saved, as it keeps it itself where there are no hooks.

    Attributes:
        tensor: without its graph: an output that its own node has saved would be a cycle.
        version: of its values, when they were saved.
        bucket: in whose buffer it is, if that may be released meanwhile.
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
            RuntimeError: if it has been written to since.
        """
        if self.bucket is not None:
            self.bucket.gather()
            self.bucket.wait()
        if self.tensor._version != self.version:
            raise changed_in_place(self.tensor.shape, self.tensor._version, self.version)
        return self.tensor


def changed_in_place(shape: torch.Size, found: int, expected: int) -> RuntimeError:
    """Autograd's own error."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"tensor of shape {tuple(shape)} is at version {found}; expected version {expected} instead."
    )


def is_watched_by_others() -> bool:
    """Whether saved tensors are somebody else's now: a checkpointed region's around, or of ``save_on_cpu``."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    while hooks is not None and hasattr(hooks[0], "outer"):  # ours, which hand on what is theirs
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
