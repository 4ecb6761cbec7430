"""Stream of whole tensors: the next tensors are gathered while user code works with the last ones."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.counters import Ledger
from lightning_zero.engine.comm.tensor_parallel import in_full
from lightning_zero.engine.compat import nbytes_of
from lightning_zero.engine.init.quantised_layers import quantised_layers
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.identity import inner_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import gathered
from lightning_zero.engine.tensor.wrapper import read_by

# -- peft's adapters, merged into one layer's weights at a time, without changing the layer ----------------------------


_ADVICE = "leave out merge_adapters=True, or call peft's merge_and_unload after the run"


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of peft's models, around a model whose layers have adapters."""
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def adapters_in(module: nn.Module) -> tuple[list[str], dict[str, nn.Module]]:
    """The prefixes of names within peft's models, and the outermost layers with adapters by their prefixes.

    Raises:
        ValueError: if there are adapters that no layer's weights can include.
    """
    wrappers: list[str] = []
    layers: dict[str, nn.Module] = {}
    owners: dict[int, str] = {}  # the prefix of the layer that changes a parameter
    for name, inner in module.named_modules():
        prefix = f"{name}." if name else ""
        if any(map(prefix.startswith, layers)):
            continue
        if is_wrapper(inner):
            wrappers.append(f"{prefix}base_model.model.")
            if not hasattr(inner, "merge_and_unload"):
                raise ValueError(f"{type(inner).__name__} has adapters that are not part of layers: {_ADVICE}.")
        if hasattr(inner, "get_base_layer"):
            owners |= dict.fromkeys(map(id, inner.parameters()), prefix)
        if hasattr(inner, "get_base_layer") or hasattr(inner, "unload_and_optionally_merge_module"):
            layers[prefix] = inner
            if any(quantised_layers(inner)):
                raise ValueError(f"The adapters of {name} cannot be merged, since it is quantised: {_ADVICE}.")
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not name.startswith(prefix := owners.get(id(parameter), "")):
            raise ValueError(f"The adapters of {prefix[:-1]} change a weight that is tied to {name}: {_ADVICE}.")
    return wrappers, layers


def merged(layer: nn.Module, prefix: str, names: Sequence[str], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """The state dict of a layer's base after the adapters have been merged, in a copy of the layer.

    Args:
        prefix: of the names, and of the result's.
        values: the whole tensors of the layer's state dict, which may be overwritten.
    """
    memo: dict[int, Any] = {id(buffer): buffer.to(values[0].device) for buffer in layer.buffers()}
    state = layer.state_dict(prefix=prefix, keep_vars=True)
    for name, value in zip(names, values):
        memo[id(state[name])] = nn.Parameter(value, False) if isinstance(state[name], nn.Parameter) else value
    try:
        copied: Any = copy.deepcopy(layer, memo)
        with torch.no_grad():
            if hasattr(copied, "unload_and_optionally_merge_module"):
                base = copied.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                copied.merge()
                base = copied.get_base_layer()
    except Exception as error:
        raise ValueError(f"The adapters of {prefix[:-1]} cannot be merged ({error}): {_ADVICE}.") from error
    return base.state_dict(prefix=prefix)


# -- the stream --------------------------------------------------------------------------------------------------------


Named = tuple[str, Tensor]


class Part(NamedTuple):
    """Tensors of a state dict that are gathered together.

    Attributes:
        results: names, and tensors with the shapes and dtypes, of what ``compute`` makes of the whole sources.
        compute: returns the results in a dict; None if the sources are the results.
    """

    sources: Sequence[Named]
    results: Sequence[Named]
    compute: Callable[[list[Tensor]], dict[str, Tensor]] | None = None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a wrapper that has the same state dict but other names of modules, such as Fabric's."""
    inner = getattr(module, "module", None)
    return inner if isinstance(inner, nn.Module) and [*inner.state_dict()] == [*module.state_dict()] else module


def has_adapters(module: nn.Module) -> bool:
    """Whether a module contains a model with adapters of peft."""
    return any(map(is_wrapper, module.modules()))


def parts_of(module: nn.Module, merge_adapters: bool) -> list[Part]:
    """The parts of a module's state dict: each tensor, or all tensors of a layer whose adapters are merged.

    Raises:
        ValueError: if adapters cannot be merged.
    """
    state = [(name, value) for name, value in module.state_dict().items() if isinstance(value, Tensor)]
    wrappers, layers = adapters_in(unwrapped(module)) if merge_adapters else ([], {})

    def original(name: str) -> str:
        for wrapper in reversed(wrappers):  # from the innermost
            name = name.replace(wrapper, wrapper.removesuffix("base_model.model."), 1)
        return name

    parts = []
    for prefix, run in groupby(state, lambda item: next(filter(item[0].startswith, layers), None)):
        if prefix is None:
            parts += [Part([(name, value)], [(original(name), value)]) for name, value in run]
            continue
        sources = list(run)
        compute = partial(merged, layers[prefix], prefix, [name for name, _ in sources])
        on_meta = compute([torch.empty(value.shape, dtype=value.dtype, device="meta") for _, value in sources])
        parts.append(Part(sources, [(original(name), value) for name, value in on_meta.items()], compute))
    return parts


def stream(parts: Sequence[Part], max_bytes: int) -> Iterator[Named]:
    """Yield the results of parts, in new memory. Collective; see ``iter_full_parameters``."""
    whole = whole_tensors([source for part in parts for source in part.sources], max_bytes)
    for part in parts:
        made = list(islice(whole, len(part.sources)))
        if part.compute is not None:
            made = list(part.compute(made).values())
        for name, _ in part.results:
            yield name, made.pop(0)


def exhausted(whole: Iterator[Named]) -> Iterator[Named]:
    """Yield nothing, after all that the iterator yields has been dropped."""
    deque(whole, maxlen=0)
    yield from ()


def ranks_of(parts: Sequence[Part]) -> tuple[int, int, Callable[[Any], list[Any]]]:
    """This rank among the ranks that stream the parts, the number of these ranks, and their all-gather of objects."""
    if (bucket := _bucket_of(source for part in parts for _, source in part.sources)) is not None:
        everyone = bucket.communicator.everyone
        return everyone.rank, everyone.size, everyone.gather_objects
    return process_group.rank(), process_group.world_size(), process_group.all_gather_objects


def _bucket_of(tensors: Iterable[Tensor]) -> Bucket | None:
    return next((tensor.slot.bucket for tensor in tensors if isinstance(tensor, ShardedTensor)), None)


def whole_tensors(tensors: Sequence[Named], max_bytes: int) -> Generator[Tensor, None, None]:
    """Yield whole tensors, in new memory. Each begins to be gathered as soon as ``max_bytes`` allows. Collective."""
    bucket, left = _bucket_of(tensor for _, tensor in tensors), deque(tensors)
    ledger = bucket.ledger if bucket is not None else Ledger()
    begun: deque[tuple[int, Callable[[], Tensor]]] = deque()
    held = last = 0  # bytes of the tensors begun and of the last one yielded, to which the caller still refers
    try:
        while left or begun:
            if not begun:  # the next tensor is large, or the first
                ledger.add("gathered", -last)
                held = last = 0
            if left and (len(begun) < 2 or held <= max_bytes // 2):  # several at once, since the ranks meet before
                what = f"the stream of weights from '{left[0][0]}'"
                with bucket.communicator.rendezvous.met(what) if bucket is not None else nullcontext(), torch.no_grad():
                    while left and (not begun or held + nbytes_of(left[0][1]) <= max_bytes):
                        _, tensor = left.popleft()
                        begun.append((nbytes_of(tensor), _begin(tensor)))
                        held += nbytes_of(tensor)
                        ledger.add("gathered", nbytes_of(tensor))
            held -= last
            ledger.add("gathered", -last)
            last, wait = begun.popleft()
            yield wait()
    finally:
        for _, wait in begun:  # other ranks depend on gathers that have begun
            with suppress(RuntimeError):
                wait()
        ledger.add("gathered", -held)


class InOrder:
    """Reader of sharded tensors that are read in the order of a stream. Other reads, as by views of them, gather."""

    def __init__(self, tensors: Sequence[Named], values: Iterator[Tensor]) -> None:
        self._left, self._values = deque(tensor for _, tensor in tensors), values

    def whole(self, tensor: ShardedTensor) -> Tensor:
        with read_by(None):
            if not self._left or tensor is not self._left[0]:
                return tensor.whole()
            self._left.popleft()
            return next(self._values)

    def states(self, _: Any) -> dict[Any, dict[str, Any]]:
        raise NotImplementedError("the stream has no optimizer states")


def _begin(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy or gather a tensor into new memory; the result ends it."""
    value = tensor.whole_at_hand() if isinstance(tensor, ShardedTensor) else in_full(gathered(inner_of(tensor)))
    if value is None:
        slot: Any = tensor.slot  # type: ignore[attr-defined]
        share = slot.begin_share(tensor.local.to(tensor.dtype))  # type: ignore[attr-defined]
        return lambda: slot.bucket.communicator.tensor.whole(share(), slot.share)
    copied = value.detach().clone()
    return lambda: copied
