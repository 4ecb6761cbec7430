"""Deferred parameters: on the meta device, with values that usually stay in a file until the module is sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_zero.engine.compat import DisableTorchFunctionSubclass, tree_leaves
from lightning_zero.engine.tensor.identity import become
from lightning_zero.engine.tensor.lazy_tensor import in_memory


class Promised(nn.Parameter):
    """A parameter on the meta device with a reference to its future values. Changing its dtype reads nothing.

    Any other use of its values before the module is sharded (a derived parameter, an initialiser, a resized embedding)
    turns it into an ordinary parameter, whose memory is that of the file until it is written to.

    Attributes:
        promised: the values, in the parameter's shape and any dtype; None while there are none.
    """

    promised: Tensor | None
    is_meta = False  # if True, torch would drop values copied to it

    @classmethod
    def of(cls, shape_and_dtype: Tensor, promised: Tensor | None, requires_grad: bool) -> Promised:
        parameter = cls(torch.empty_like(shape_and_dtype, device="meta"), requires_grad)
        parameter.promised = promised
        return parameter

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunctionSubclass():
            if not _needs_no_values(function, args, kwargs):
                for argument in tree_leaves((args, kwargs)):
                    if isinstance(argument, Promised) and argument.promised is not None:
                        argument._become(in_memory(argument.promised.detach()).to(argument.dtype))
            return function(*args, **kwargs)

    def copy_(self, values: Tensor, non_blocking: bool = False) -> Promised:
        self._become(values.detach().to(self.dtype).expand(self.shape).clone())
        return self

    def _become(self, values: Tensor) -> None:
        become(self, nn.Parameter(values, self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> Promised:
        if id(self) not in memo:
            memo[id(self)] = Promised.of(self, self.promised, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Promised.of, (torch.empty_like(self), self.promised, self.requires_grad)


# Any other function or attribute of a tensor counts as a use of its values.
_WITHOUT_VALUES = set(
    """
    shape size numel nelement dim ndim ndimension stride storage_offset is_contiguous dtype element_size itemsize layout
    is_floating_point is_complex is_signed device get_device is_cpu is_cuda is_mps is_xpu is_xla is_sparse is_quantized
    is_nested is_mkldnn is_inference requires_grad requires_grad_ is_leaf retains_grad grad grad_fn names __len__
    _version _backward_hooks _post_accumulate_grad_hooks register_hook register_post_accumulate_grad_hook
    empty_like zeros_like ones_like full_like rand_like randn_like new_empty new_zeros new_ones new_full
    _has_compatible_shallow_copy_type
    """.split()
)
_CONVERSIONS = {"to", "type", "half", "bfloat16", "float", "double"}


def _needs_no_values(function: Any, args: Any, kwargs: Any) -> bool:
    is_attribute = function.__name__ in ("__get__", "__set__")
    name = function.__self__.__name__ if is_attribute else function.__name__
    if name == "data":  # ``Module.to()`` sets it to the converted tensor
        return function.__name__ == "__set__" and is_on_meta(args[1])
    if name in _CONVERSIONS:
        options = (*args[1:], *kwargs.values())
        return all(option is None or isinstance(option, (torch.dtype, torch.memory_format, bool)) for option in options)
    return name in _WITHOUT_VALUES


def promise(parameter: nn.Parameter, values: Tensor | None) -> None:
    """Move a parameter to the meta device until it is sharded, and then give it these values."""
    become(parameter, Promised.of(parameter, values, parameter.requires_grad))


def values_of(tensor: Tensor) -> Tensor | None:
    """The present or future values of a parameter or buffer; None on the meta device if no values are known."""
    if isinstance(tensor, Promised):
        return tensor.promised
    return None if is_on_meta(tensor) else tensor


def is_on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def awaits_values(module: nn.Module) -> bool:
    """Whether any parameter or buffer is on the meta device."""
    return any(is_on_meta(tensor) for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


@contextmanager
def parameters_await_values() -> Iterator[None]:
    """Context in which modules create parameters, and nothing else, on the meta device until values are loaded."""

    def await_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter:
            promise(parameter, None)

    hook = register_module_parameter_registration_hook(await_values)
    try:
        yield
    finally:
        hook.remove()


_may_wait: ContextVar[bool] = ContextVar("values may wait", default=False)


@contextmanager
def values_may_wait() -> Iterator[None]:
    """Context for code that makes a module for an engine to shard: values loaded into it may stay in their files."""
    token = _may_wait.set(True)
    try:
        yield
    finally:
        _may_wait.reset(token)


def may_values_wait() -> bool:
    return _may_wait.get()


class _StandIn(nn.Parameter):
    """Replaces a tensor while a state dict is loaded, and records what would be copied to it."""

    taken: Tensor | None = None

    def copy_(self, values: Tensor, non_blocking: bool = False) -> _StandIn:
        self.taken = values
        return self


@dataclass
class Place:
    """A parameter or persistent buffer, the dictionary that holds it, and its stand-in."""

    holder: dict[str, Any]
    attribute: str
    tensor: Tensor
    stand_in: _StandIn


@contextmanager
def taking_values(module: nn.Module, of: Callable[[Tensor], bool]) -> Iterator[list[Place]]:
    """Context in which ``load_state_dict`` leaves the chosen tensors unchanged and records their new values instead.

    The state dict is still read by torch, with the module's own hooks, and can be rejected with nothing changed.
    """
    stand_ins: dict[int, _StandIn] = {}
    places = []
    for holder in (holder for inner in module.modules() for holder in (inner._parameters, inner._buffers)):
        for attribute, tensor in holder.items():
            if tensor is not None and of(tensor):
                if id(tensor) not in stand_ins:
                    shape_and_dtype = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    stand_ins[id(tensor)] = _StandIn(shape_and_dtype, requires_grad=False)
                places.append(Place(holder, attribute, tensor, stand_ins[id(tensor)]))
    for place in places:
        place.holder[place.attribute] = place.stand_in
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter in the checkpoint to a meta")
            yield places
    finally:
        for place in places:
            place.holder[place.attribute] = place.tensor


def give_values(places: list[Place], *, wait: bool) -> None:
    """Give tensors the values that ``taking_values`` recorded. No communication, not even for sharded tensors.

    With ``wait`` parameters on the meta device stay there until the module is sharded, as ``Promised`` ones always do;
    otherwise they take the memory of the values, or a copy where the dtype differs.
    """
    with torch.no_grad():
        for place in places:
            tensor, values = place.tensor, place.stand_in.taken
            if values is None:
                continue
            if not is_on_meta(tensor):
                tensor.copy_(values)
            elif not isinstance(tensor, nn.Parameter):
                place.holder[place.attribute] = values.to(tensor.dtype, copy=True)
            elif wait or isinstance(tensor, Promised):
                promise(tensor, values.detach())
            else:
                become(tensor, nn.Parameter(in_memory(values.detach()).to(tensor.dtype), tensor.requires_grad))
            place.stand_in.taken = None  # once only, although a tied tensor has several places
