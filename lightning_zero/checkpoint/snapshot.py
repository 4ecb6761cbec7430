"""Copy a checkpoint as pickling would, so that training can continue while the copy is written."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Container
from typing import Any

from torch import Tensor

from lightning_zero.checkpoint.saving import is_dense
from lightning_zero.engine.tensor.sharded_tree import is_in_parts


def snapshot(value: Any, constant: Container[Tensor] = ()) -> Any:
    """Return a copy of a picklable value, with the contents that a pickle written now would have.

    ``copy.deepcopy`` would refuse tensors computed by autograd, and drop attributes of parameters.

    Args:
        constant: tensors that will not change, and need not be copied.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, constant)
    pickler.dump(value)
    stream.seek(0)
    return _Unpickler(stream, pickler.tensors).load()


class _Pickler(pickle.Pickler):
    """Copies tensors, and pickles each tensor's position in the list of copies."""

    def __init__(self, stream: io.BytesIO, constant: Container[Tensor]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._constant = constant
        self._memo: dict[int, Any] = {}  # of deep copies: storages that tensors share are copied once
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no id in ``_numbers`` is used again

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self._alive.append(value)
            self.tensors.append(value if value in self._constant else self._copy_of(value))
        return self._numbers[id(value)]

    def _copy_of(self, tensor: Any) -> Tensor:
        if is_in_parts(tensor):
            return tensor.ordinary()
        leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
        if not is_dense(leaf):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        copied = copy.deepcopy(leaf, self._memo)
        copied.__dict__.update(tensor.__dict__)
        return copied


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        return self._tensors[number]
