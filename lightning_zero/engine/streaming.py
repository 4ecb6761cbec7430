"""Stream of whole tensors: the next tensors are gathered while user code works with the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero.engine.adapters import Named, layers_with_adapters, merge, without_wrappers
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.tensor_parallel import in_full
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.ledger import Ledger
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import gathered


class Part(NamedTuple):
    """Tensors of a state dict that are needed together.

    Attributes:
        sources: the tensors by name, perhaps sharded.
        outputs: tensors with the names, shapes and dtypes of the results.
        compute: computes the results from the whole sources, which it may overwrite; None if these are the results.
    """

    sources: Sequence[Named]
    outputs: Sequence[Named]
    compute: Callable[[Sequence[Named]], Iterable[Named]] | None = None


def parts_of(module: nn.Module, merge_adapters: bool) -> list[Part]:
    """The parts of a module's state dict: each tensor, or all tensors of a layer whose adapters are to be merged.

    Raises:
        ValueError: if adapters cannot be merged.
    """
    state = [(name, value) for name, value in module.state_dict().items() if isinstance(value, Tensor)]
    if not merge_adapters:
        return [Part([each], [each]) for each in state]
    original, layers = without_wrappers(module), layers_with_adapters(module)
    parts = []
    for prefix, run in groupby(state, lambda item: next(filter(item[0].startswith, layers), None)):
        if prefix is None:
            parts += [Part([(name, value)], [(original(name), value)]) for name, value in run]
            continue
        sources = list(run)
        on_meta = [(name, torch.empty(value.shape, dtype=value.dtype, device="meta")) for name, value in sources]
        compute = partial(merge, layers[prefix], prefix, original)
        parts.append(Part(sources, list(compute(on_meta)), compute))
    return parts


def ranks_of(parts: Iterable[Part]) -> tuple[int, int, Callable[[Any], list[Any]]]:
    """This rank among the ranks that hold the parts, the number of these ranks, and their all-gather of objects."""
    if (bucket := _bucket_of(source for part in parts for source in part.sources)) is not None:
        everyone = bucket.communicator.everyone
        return everyone.rank, everyone.size, everyone.control.gather_objects
    size = process_group.world_size()
    return process_group.rank(), size, process_group.all_gather_objects if size > 1 else lambda value: [value]


def results(
    parts: Sequence[tuple[Part, Collection[str]]], max_bytes: int, dtype: torch.dtype | None
) -> Iterator[Named]:
    """Yield results of parts, in new memory; see ``iter_full_parameters``. Collective.

    Args:
        parts: the same on every rank, each with the names of the results that this rank receives.
    """
    is_merged = any(part.compute is not None for part, _ in parts)
    whole = _stream([each for part, _ in parts for each in part.sources], max_bytes, None if is_merged else dtype)
    for part, names in parts:
        sources = list(islice(whole, len(part.sources)))
        if names and part.compute is not None:
            made = dict(part.compute(sources))
        else:
            made = {name: value for (name, _), (_, value) in zip(part.outputs, sources)}
        del sources
        for name in names:
            value = made.pop(name)
            yield name, value.to(_converted(value, dtype))


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype to which a tensor is converted: only floating-point numbers of 16 bits or more change theirs."""
    changes = dtype is not None and tensor.is_floating_point() and tensor.itemsize > 1
    return dtype if dtype is not None and changes else tensor.dtype


def _bucket_of(tensors: Iterable[Named]) -> Bucket | None:
    return next((tensor.slot.bucket for _, tensor in tensors if isinstance(tensor, ShardedTensor)), None)


def _stream(tensors: Sequence[Named], max_bytes: int, dtype: torch.dtype | None) -> Iterator[Named]:
    """Yield the tensors whole, in new memory. Collective."""
    bucket, left = _bucket_of(tensors), deque(tensors)
    ledger = bucket.ledger if bucket is not None else Ledger()
    begun: deque[tuple[str, int, Callable[[], Tensor]]] = deque()
    held = last = 0  # bytes of the tensors begun and of the last one yielded, which the caller still refers to
    try:
        while left or begun:
            if left and (len(begun) < 2 or held <= max_bytes // 2):  # several at once, since the ranks meet before
                what = f"the stream of weights from '{left[0][0]}'"
                with bucket.rendezvous.met(what) if bucket is not None else nullcontext(), torch.no_grad():
                    while left:
                        name, tensor = left[0]
                        to = _converted(tensor, dtype)
                        nbytes = tensor.numel() * to.itemsize
                        if begun and held + nbytes > max_bytes:
                            break
                        left.popleft()
                        begun.append((name, nbytes, _begin(tensor, to)))
                        held += nbytes
                        ledger.add("gathered", nbytes)
            held -= last
            ledger.add("gathered", -last)
            name, last, wait = begun.popleft()
            yield name, wait()
    finally:
        for _, _, wait in begun:  # other ranks depend on gathers that have begun
            with suppress(RuntimeError):
                wait()
        ledger.add("gathered", -held)


def _begin(tensor: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Begin to copy or gather a tensor into new memory; the result ends it."""
    if not isinstance(tensor, ShardedTensor):
        copied = in_full(gathered(tensor)).to(dtype, copy=True)
        return lambda: copied
    has_finer_masters = tensor.at_rest().dtype != tensor.dtype
    value = None if has_finer_masters and dtype != tensor.dtype else tensor.whole_at_hand()
    if value is not None:
        at_hand = value.detach().to(dtype, copy=True)
        return lambda: at_hand
    slot: Any = tensor.slot
    share = slot.begin_share(tensor.local.to(dtype, copy=slot.bucket.layout.world_size == 1))
    return lambda: slot.bucket.communicator.tensor.whole(share(), slot.share)
