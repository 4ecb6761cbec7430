"""Where the values of a module's parameters and buffers come from; all ranks agree on this before sharding."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.tensor_parallel import is_dtensor, own_share
from lightning_zero.engine.compat import FakeTensor
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.init.deferred_param import is_on_meta
from lightning_zero.engine.init.quantised_layers import awaits_quantisation
from lightning_zero.engine.state.extensions import Extension
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor, Write
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.io.text import listed

_MEMORY, _NOWHERE = "memory", "nowhere"


class Source(NamedTuple):
    """Source of the values of one parameter or buffer."""

    values: Tensor | None  # this rank's values, if it has any
    everywhere: bool  # whether every rank reads its part from the same file; otherwise rank 0 broadcasts its values
    is_new: bool  # whether no rank has values, so that the module has to initialise them
    writes: Sequence[Write] = ()  # user code's writes to a new tensor
    initialised_by: Sequence[str] = ()  # initialisers that have written to a new lazy tensor on rank 0
    is_lost: bool = False  # whether rank 0's code has written to a new tensor, which does not record writes
    lacks_values: bool = False  # whether rank 0's code has written only a part of the values


def check_ordinary(module: nn.Module, *, may_be_divided: bool) -> None:
    """Raise a ValueError if a parameter is neither an ordinary tensor nor, if ``may_be_divided``, a DTensor."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, ShardedTensor):
            raise ValueError(
                f"{name} is sharded already: a module can have only one engine at a time. If an earlier run left it "
                "sharded, write after_fit='full' in that run, or load that run's checkpoint into a new module; "
                "otherwise close the other engine first."
            )
        if is_dtensor(parameter) and not may_be_divided:
            raise ValueError(
                f"{name} is a DTensor, but parameters must be ordinary tensors: remove fully_shard(...) or "
                "distribute_tensor(...); or, for tensor parallelism, set tensor_parallel_size."
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name} is not initialised yet: run a batch through the lazy module first.")
        if awaits_quantisation(parameter):
            raise ValueError(
                f"{name} has no values that could be quantised: load them in configure_model, with "
                "lightning_zero.load_weights(model, path), or make the layer outside of torch.device('meta')."
            )
        if (kind := _kind_without_flat_values(own_share(parameter))) is not None:
            raise ValueError(
                f"{name} is {kind}, which cannot be divided into shards: train ordinary parameters (and quantise them "
                "after the run, for example). Quantised layers of bitsandbytes are supported: "
                "lightning_zero.load_weights(model, path, quantize='nf4') makes them in configure_model."
            )


def _kind_without_flat_values(parameter: Tensor) -> str | None:
    """Describe a parameter whose values are not just the elements of an ordinary tensor; None for others."""
    cls = type(parameter)
    is_known = isinstance(parameter, (LazyTensor, FakeTensor))
    is_plain = cls is Tensor or (issubclass(cls, nn.Parameter) and cls.__torch_dispatch__ is Tensor.__torch_dispatch__)
    if not is_known and not is_plain:
        return f"of the tensor subclass {cls.__module__}.{cls.__qualname__}"
    if parameter.layout is not torch.strided:
        return f"a tensor of layout {parameter.layout}"
    return f"a quantised tensor ({parameter.dtype})" if parameter.is_quantized else None


def check_frozen(scripted: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a parameter of a TorchScript module is trained; see ``torchscript_parameters``."""
    trained = [name for name, parameter in scripted.items() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"{listed(trained)}: trained parameters of a TorchScript module, but only frozen ones are supported, since "
            "they cannot be sharded. Freeze them, with parameter.requires_grad_(False) for each; or train the original "
            "module, and call torch.jit.script or torch.jit.trace after the run; or use strategy='ddp'."
        )


def check_dtypes(module: nn.Module, config: EngineConfig) -> None:
    """Raise a ValueError if ``masters=False`` has no effect on a module, or if parameters are in fp16."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if config.masters or not dtypes or (torch.bfloat16 in dtypes and torch.float16 not in dtypes):
        return
    found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    raise ValueError(
        f"masters=False updates bf16 parameters in place, but the module's parameters are in {found}. Write "
        "precision='bf16-true' (in plain torch, module.bfloat16()), or leave masters=False out."
    )


def check_float8(module: nn.Module, device: torch.device) -> None:
    """Raise a ValueError if torchao's layers are to multiply float8 matrices on a GPU that cannot."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return
    for name, layer in module.named_modules():
        if type(layer).__module__ == "torchao.float8.float8_linear" and not layer.config.emulate:
            raise ValueError(
                f"{name} multiplies float8 matrices, which this GPU cannot. Pass emulate=True to torchao's "
                "Float8LinearConfig, or leave its layers out."
            )


def first_device(module: nn.Module) -> torch.device:
    """The device of the first parameter with values; the CPU if none has values."""
    return next((p.device for p in module.parameters() if not is_on_meta(p)), torch.device("cpu"))


def agree_on_sources(
    module: nn.Module,
    communicator: Communicator,
    extension_of: Mapping[nn.Parameter, Extension],
    rounding_options: str | None,
) -> dict[str, Source]:
    """The source of each parameter's and buffer's values, by name; all ranks make the same choices. Collective.

    Rank 0's values are used, except that each rank itself reads parameters whose values all ranks have left in the same
    file. A tensor that is on the meta device on all ranks is new.

    Raises:
        ValueError: on every rank, if modules differ between ranks, or if other ranks have values that rank 0 lacks.
    """
    values = {}
    writes: dict[str, Sequence[Write]] = {}
    # By name: (properties that must be equal on all ranks, origin of the values, earlier initialisation)
    mine: dict[str, tuple[str, Any, Any]] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found = values[name] = None if is_on_meta(tensor) else own_share(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        stored = found.lazy_values.origin if is_parameter and isinstance(found, LazyTensor) else None
        origin = _NOWHERE if found is None else stored or _MEMORY
        writes[name] = (tensor.lazy_values.writes if isinstance(tensor, LazyTensor) else None) or ()
        is_trained = is_parameter and tensor.requires_grad
        kind = f"{tuple(tensor.shape)} in {tensor.dtype}, {'trained' if is_trained else 'not trained'}"
        if isinstance(tensor, nn.Parameter) and tensor in extension_of:
            kind += f", gathered in {extension_of[tensor].dtype}"
        if is_trained and rounding_options is not None:
            kind += f" with {rounding_options}"
        if writes[name]:
            kind += f", written to {len(writes[name])} times"
        initialised_by = sorted(tensor.lazy_values.initialised_by) if isinstance(tensor, LazyTensor) else ()
        lacks_values = isinstance(tensor, LazyTensor) and tensor.lacks_values
        mine[name] = kind, origin, (initialised_by, found is None and _has_lost_writes(tensor), lacks_values)
    # Usually all ranks agree, so hashes are compared first; the descriptions are gathered only if hashes differ.
    control = communicator.everyone
    everywhere = [mine] if control.is_alike(repr(mine)) else control.gather_objects(mine)
    _check_alike(everywhere)
    sources, missing = {}, {}
    for name, found in values.items():
        origins = [theirs[name][1] for theirs in everywhere]
        first, is_alike = origins[0], len(set(origins)) == 1
        if first == _NOWHERE and not is_alike:
            missing[name] = [rank for rank, origin in enumerate(origins) if origin != _NOWHERE]
        is_new = is_alike and first == _NOWHERE
        from_file = is_alike and first not in (_MEMORY, _NOWHERE)
        sources[name] = Source(found, from_file, is_new, writes[name], *everywhere[0][name][2])
    if missing:
        raise ValueError(
            f"{listed(missing)}: on the meta device on rank 0, but with values on rank(s) "
            f"{next(iter(missing.values()))}. Every rank starts with rank 0's values: load values on rank 0, on every "
            "rank, or on no rank."
        )
    return sources


def _has_lost_writes(tensor: Tensor) -> bool:
    has_counter = not (isinstance(tensor, LazyTensor) or is_dtensor(tensor) or tensor.is_inference())
    return has_counter and tensor._version > 0


def check_recorded(sources: Mapping[str, Source]) -> None:
    """Raise a ValueError on every rank if writes on rank 0 have not been recorded, or left a tensor without values."""
    if lost := [name for name, source in sources.items() if source.is_new and source.is_lost]:
        raise ValueError(
            f"{listed(lost)}: written to on the meta device, where writes are recorded only within configure_model() "
            "and init_module(). Create the module there, for an Engine within "
            "lightning_zero.engine.deferred_param.parameters_await_values(), or outside of torch.device('meta')."
        )
    if lacking := [name for name, source in sources.items() if source.lacks_values]:
        raise ValueError(
            f"{listed(lacking)}: made without values (empty_init=True, or on the meta device), then written only in "
            "part. Write all values; or write within torch.device('meta'): such writes follow the initialisation."
        )


def _check_alike(everywhere: list[dict[str, tuple[str, Any, Any]]]) -> None:
    described = [[f"{name} is {kind}" for name, (kind, *_) in theirs.items()] for theirs in everywhere]
    for rank, theirs in enumerate(described):
        for first, other in zip_longest(described[0], theirs, fillvalue="no further tensor is there"):
            if first != other:
                raise ValueError(
                    f"The module differs between ranks: {first} on rank 0, but {other} on rank {rank}. Construct the "
                    "same module, with the same options and in the same order, on every rank."
                )


# -- tensors that share memory with a parameter ------------------------------------------------------------------------


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

    Sharding moves each parameter to a flat buffer; other tensors over its former memory would keep the initial values.

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
