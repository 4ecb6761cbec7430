"""Deferred parameters: lazy tensors whose values are usually read from a file only when the module is sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_zero.engine.comm.tensor_parallel import is_dtensor
from lightning_zero.engine.compat import replaced
from lightning_zero.engine.init import quantised_layers
from lightning_zero.engine.tensor.identity import inner_of, like, set_contents, wrapper_of
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor, in_memory


def defer(tensor: Tensor, values: Tensor) -> None:
    """Turn a tensor into a lazy tensor with the given values; values on the meta device count as missing."""
    tensor = inner_of(tensor)
    set_contents(tensor, like(tensor, LazyTensor.of(values, tensor.dtype)))


def leave_meta(module: nn.Module) -> None:
    """Give a module's parameters and buffers uninitialised memory on the CPU; tied tensors stay one object."""
    for tensor in map(inner_of, (*module.parameters(), *module.buffers())):
        values = torch.empty_like(tensor, device="cpu", requires_grad=False)
        set_contents(tensor, nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values)
    for _, layer in quantised_layers.quantised_layers(module):
        for holder, name, scale in quantised_layers.scales_of(layer.weight):
            setattr(holder, name, torch.empty_like(scale))
        if hasattr(layer, "state"):  # of 8 bits
            layer.state.CB, layer.state.SCB = layer.weight.detach(), layer.weight.SCB


def is_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def is_deferred(tensor: Tensor) -> bool:
    """Whether a tensor has no memory yet: it is on the meta device, or lazy."""
    return is_on_meta(tensor) or isinstance(tensor, LazyTensor)


def awaits_values(module: nn.Module) -> bool:
    """Whether any parameter or buffer is deferred."""
    return any(is_deferred(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def _is_plain(cls: Any) -> bool:
    """Whether a class is torch's own, or derived from it without another meaning of operators or ``to``."""
    base: Any = nn.Parameter if issubclass(cls, nn.Parameter) else Tensor
    names = ("__torch_function__", "__torch_dispatch__", "to")
    return all(getattr(cls, name) == getattr(base, name) for name in names)


@contextmanager
def parameters_await_values(*, only_on_meta: bool = False) -> Iterator[None]:
    """Context in which new parameters of modules are deferred until they are given values.

    Buffers are deferred only on the meta device.

    Args:
        only_on_meta: whether parameters, too, are deferred only on the meta device.
    """

    def await_values(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is None or isinstance(tensor, LazyTensor) or not _is_plain(type(tensor)):
            return
        if any(cls.__module__.startswith("bitsandbytes.") for cls in type(module).__mro__):
            return  # its constructor makes a parameter of another class from the tensor
        if tensor.is_meta or (isinstance(tensor, nn.Parameter) and not only_on_meta):
            defer(tensor, torch.empty_like(tensor, device="meta"))

    hooks = (
        register_module_parameter_registration_hook(await_values),
        register_module_buffer_registration_hook(await_values),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_may_wait: ContextVar[bool] = ContextVar("values may wait", default=False)


@contextmanager
def values_may_wait() -> Iterator[None]:
    """Context for creating a module that an engine will shard: values loaded into the module may stay in files."""
    token = _may_wait.set(True)
    try:
        yield
    finally:
        _may_wait.reset(token)


def may_values_wait() -> bool:
    return _may_wait.get()


class StandIn(nn.Parameter):
    """Replaces a tensor while a state dict is loaded, and records the values that would be copied to the tensor."""

    replaces: Tensor
    taken: Tensor | None = None

    def copy_(self, values: Tensor, non_blocking: bool = False) -> StandIn:
        self.taken = values
        return self


@contextmanager
def taking_values(module: nn.Module, of: Callable[[Tensor], bool]) -> Iterator[dict[str, StandIn]]:
    """Context in which ``load_state_dict`` records new values for the chosen tensors instead of copying the values.

    torch still runs the module's own hooks and checks the state dict, and can reject it before any tensor is changed.

    Args:
        of: returns whether a tensor is chosen.
    """
    stand_ins: dict[str, StandIn] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if of(tensor):
            shape_and_dtype = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            stand_ins[name] = StandIn(shape_and_dtype, requires_grad=False)
            stand_ins[name].replaces = tensor
    with warnings.catch_warnings(), replaced(module, dict(stand_ins)):
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
        yield stand_ins


def give_values(stand_ins: dict[str, StandIn], *, wait: bool) -> None:
    """Give tensors the values that ``taking_values`` recorded. Nothing is communicated, even for sharded tensors.

    Args:
        wait: whether parameters on the meta device become lazy tensors. Otherwise they share memory with the recorded
            values, or hold a copy if the dtype differs. Lazy parameters always stay lazy.

    Raises:
        ValueError: if a tensor that would take values is a DTensor on the meta device.
    """
    for name, stand_in in stand_ins.items():
        if stand_in.taken is not None and is_dtensor(stand_in.replaces) and is_on_meta(stand_in.replaces):
            raise ValueError(
                f"'{name}' was divided over tensor-parallel ranks on the meta device, and takes no values "
                "there: make the module outside of torch.device('meta'), and load its weights before "
                "parallelize_module()."
            )
    with torch.no_grad():
        for stand_in in stand_ins.values():
            tensor, values = stand_in.replaces, stand_in.taken
            if values is None:
                continue
            if not is_deferred(tensor):
                tensor.copy_(values)
            elif not isinstance(tensor, nn.Parameter):
                set_contents(tensor, in_memory(values.to(tensor.dtype, copy=True)))
            elif quantised_layers.awaits_quantisation(tensor):
                quantised_layers.quantise(tensor, values, wait=wait)
            elif wait or isinstance(tensor, LazyTensor):
                defer(tensor, values)
            else:
                given = wrapper_of(tensor)(in_memory(values.detach()).to(tensor.dtype))
                vars(tensor).update(vars(given))  # attributes of a wrapper, such as its inner tensor
                set_contents(tensor, like(tensor, given))
