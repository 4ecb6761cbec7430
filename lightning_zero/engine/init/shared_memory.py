"""Find tensors that share memory with a trained parameter without being that parameter.

Sharding moves each parameter to a flat buffer. Other tensors over its former memory would then keep the initial values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Lightning keeps a module's arguments here, such as a tensor that a parameter was made from. Forwards do not read them.
HYPERPARAMETERS = ("_hparams", "_hparams_initial")


class _Place(NamedTuple):
    start: int  # address of the first byte
    stop: int
    name: str
    tensor: Tensor

    @property
    def trains(self) -> bool:
        return isinstance(self.tensor, nn.Parameter) and self.tensor.requires_grad


def check_memory(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise a ValueError if another tensor shares memory with a trained parameter of the module.

    The other tensor may be a parameter, a buffer, an attribute of a module (also in a list or dict), or a parameter of
    an optimizer. Tensors may share a storage, such as a flat buffer or a mapped file, if their ranges are disjoint.
    """
    by_device: dict[torch.device, dict[int, _Place]] = {}
    trained = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    for name, tensor in _named_tensors(module, optimizers):
        if not tensor.is_leaf and (parameter := trained.get(id(tensor._base))) is not None:
            warnings.warn(
                f"{name} is a view of {parameter}, made before the module was sharded, and keeps the present values: "
                f"unless each forward assigns it anew, read 'self.{parameter}' itself in the forward.",
                stacklevel=2,
            )
        if _has_memory(tensor):
            start = tensor.data_ptr()
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            stop = start + extent * tensor.element_size()
            by_device.setdefault(tensor.device, {}).setdefault(id(tensor), _Place(start, stop, name, tensor))
    for places in by_device.values():
        reaching: list[_Place] = []  # places that end after the current one starts
        for place in sorted(places.values(), key=lambda place: place.start):
            reaching = [other for other in reaching if other.stop > place.start]
            for other in reaching:
                if place.trains or other.trains:
                    _refuse(*((other, place) if other.trains else (place, other)))
            reaching.append(place)


def _named_tensors(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for prefix, inner in module.named_modules():
        for attribute, value in vars(inner).items():
            # the old ``spectral_norm`` leaves a view of its parameter until the first forward
            if attribute in HYPERPARAMETERS or f"{attribute}_orig" in inner._parameters.keys():
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            for key, item in _items(value):
                if isinstance(item, Tensor):
                    yield f"{name}{key}", item
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"parameter {position} of group {number} of {type(optimizer).__name__}", parameter


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{position}]", item) for position, item in enumerate(value))
    else:
        yield "", value


def _has_memory(tensor: Tensor) -> bool:
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and not tensor.is_nested
    if not is_plain or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0 and tensor.is_leaf  # forwards replace tensors that have a graph


def _refuse(parameter: _Place, other: _Place) -> None:
    if isinstance(other.tensor, nn.Parameter):
        advice = f"To tie them, assign the parameter itself, as in 'self.{other.name} = self.{parameter.name}'"
    else:
        advice = f"Read 'self.{parameter.name}' itself wherever the present values are needed"
    raise ValueError(
        f"{other.name} and {parameter.name} share memory without being one parameter, so training would no longer "
        f"change both. {advice}; or give {other.name} its own memory with '.clone()'."
    )
