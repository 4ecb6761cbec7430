"""Update masters outside ``optimizer.step``: large ones in chunks, and offloaded ones in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.compat import FakeTensor
from lightning_zero.engine.config import LOW_PRECISION
from lightning_zero.engine.offload.states import MASTERS, PARAMETERS
from lightning_zero.engine.offload.updates import DiskUpdate, Update, Updates, on_own_stream
from lightning_zero.engine.optim.compatibility import is_torchs_elementwise
from lightning_zero.engine.optim.kinds import copied, is_by_element
from lightning_zero.engine.optim.master import Master
from lightning_zero.engine.state import rounding
from lightning_zero.engine.state.bucket import Bucket


def gains_by_chunks(kind: type, group: dict[str, Any], values: Tensor) -> bool:
    """Whether an optimizer of this class, with these options, updates the tensor faster in chunks.

    A torch optimizer that is not fused passes over a tensor once for each operation (Adam nine times), and reads a
    tensor larger than the cache from memory each time. Fake tensors are not read, so chunks gain nothing.
    """
    if values.numel() < 2 * rounding.CHUNK_NUMEL or values.device.type != "cpu" or isinstance(values, FakeTensor):
        return False
    return is_torchs_elementwise(kind) and not any(
        group.get(option) for option in ("fused", "foreach", "differentiable", "capturable")
    )


def updated(
    update: Update, master: Master, values: Tensor, gradient: Tensor | None, state: dict[str, Any]
) -> dict[str, Any]:
    """Update values of a master and their state as ``update.act`` does, and return the state.

    If results are rounded stochastically, this is done chunk by chunk, on copies of low-precision values and states in
    the dtype of the update. Otherwise it is done in chunks if that is faster, with bitwise equal results.
    """
    if gradient is None or not (master.rounds or gains_by_chunks(update.kind, update.group, values)):
        return update.act(values, gradient, state)
    plan, flat, flat_gradient = master.bucket.residency.plan, values.view(-1), gradient.view(-1)
    fields = {key: value.view(-1) for key, value in state.items() if is_by_element(key, value, values.shape)}
    small = {key: value for key, value in state.items() if key not in fields}
    after, new_fields = dict(state), dict(fields)
    parts = rounding.chunks(values)
    # one chunk at a time where chunks are copied, so that little memory is needed; otherwise all in one ``step``
    for together in [[part] for part in parts] if master.rounds else [parts]:
        own = [_widened(flat[part], plan.update_dtype) for part in together]
        given = [{key: _widened(value[part], plan.update_dtype) for key, value in fields.items()} for part in together]
        before = [each | {key: copied(value) for key, value in small.items()} for each in given]
        results = update.act_on(own, [flat_gradient[part] for part in together], before)
        for part, chunk, known, result in zip(together, own, given, results):
            if flat.dtype in LOW_PRECISION:
                _write(update, master, part, chunk, flat, "parameter")
            for key, value in result.items():
                if not is_by_element(key, value, chunk.shape):
                    after[key] = value
                    continue
                if key not in new_fields:
                    new_fields[key] = flat.new_empty(flat.shape, dtype=plan.state_dtype_of(value.dtype))
                    after[key] = new_fields[key].view(values.shape)
                if value is not known.get(key) or new_fields[key].dtype in LOW_PRECISION:
                    _write(update, master, part, value, new_fields[key], key)
    return after


def _widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of low-precision values in the dtype of the update; other values unchanged."""
    return values.to(dtype) if values.dtype in LOW_PRECISION else values


def _write(update: Update, master: Master, part: slice, values: Tensor, target: Tensor, what: str) -> None:
    """Write new values of a chunk to a master or its state, rounded stochastically if the target is in bf16."""
    target = target[part]
    if target.dtype in LOW_PRECISION:
        place = slice(master.range.start + part.start, master.range.start + part.stop)
        bits = rounding.random_bits(update.group[rounding.GROUP_KEY], master.bucket.layout, place, what, target.device)
        rounding.round_stochastically(values.float(), target, bits)
    else:
        target.copy_(values)


def update_offloaded(
    optimizer: Optimizer,
    buckets: Mapping[Bucket, Sequence[tuple[int, Master]]],
    gradients: Mapping[Master, Tensor | None],
    own: dict[Any, Any],
) -> None:
    """Start to update the masters of offloaded buckets in a thread, with the current options of their groups.

    Args:
        buckets: each bucket's masters, each preceded by the number of its group.
        own: the entries of the optimizer's state that belong to no parameter, from before the step.
    """
    on_disk: dict[Updates, DiskUpdate] = {}
    try:
        for bucket, masters in buckets.items():
            device, groups = bucket.full.device, optimizer.param_groups
            numbers = {number for number, _ in masters}
            update_of = {number: Update.of(optimizer, groups[number], device, own) for number in numbers}
            wanted = [(update_of[number], master, gradients[master]) for number, master in masters if master.is_here]
            bucket.update_in_background(partial(_begin, optimizer, bucket, wanted, on_disk))
    finally:
        for background, update in on_disk.items():
            background.start(update)


def _begin(
    optimizer: Optimizer,
    bucket: Bucket,
    wanted: list[tuple[Update, Master, Tensor | None]],
    on_disk: dict[Updates, DiskUpdate],
    shown: Tensor | None,
) -> BackgroundWork:
    """Start to update the masters of a bucket, or add them to an update of states on a disk.

    Args:
        shown: another tensor to write the new values to, or None; see ``Bucket.update_in_background``.
    """
    background, device = bucket.background, bucket.full.device
    update = _BucketUpdate(optimizer, partial(bucket.phases, "update", bucket.unit_name), wanted, shown)
    if bucket.states is None:
        return background.submit(on_own_stream(device, update.in_memory))
    update.in_memory(only_empty=True)  # empty masters are in no sub-group
    if background not in on_disk:
        on_disk[background] = DiskUpdate(background)
    # without ``shown``, the next gather reads the new values from the disk
    act = on_own_stream(device, update.on_disk)
    return on_disk[background].add(bucket.states, act, until_written=shown is None)


class _BucketUpdate(NamedTuple):
    """The update of a bucket's masters. ``wanted`` lists (update, master, gradient)."""

    optimizer: Optimizer
    phase: Callable[[], AbstractContextManager[Any]]
    wanted: list[tuple[Update, Master, Tensor | None]]
    shown: Tensor | None

    def in_memory(self, only_empty: bool = False) -> None:
        states = self.optimizer.state
        for update, master, gradient in self.wanted:
            if not only_empty or not master.tensor.numel():
                values = master.values()
                with self.phase():
                    states[master.tensor] = updated(update, master, values, gradient, states.get(master.tensor, {}))
                self._show(master.range, values)

    def on_disk(self, start: int, stop: int, fields: dict[str, Tensor]) -> None:
        """Update the elements ``[start, stop)`` of the bucket's shard; ``fields`` has their masters and states."""
        states = self.optimizer.state
        for update, master, gradient in self.wanted:
            low, high = max(start, master.range.start), min(stop, master.range.stop)
            if low >= high:
                continue
            inside, first = slice(low - start, high - start), master.range.start
            values = fields[MASTERS][inside]
            before = states.get(master.tensor, {})
            known = {key: fields[key][inside] if key in fields else copied(value) for key, value in before.items()}
            part = gradient[low - first : high - first] if gradient is not None else None
            with self.phase():
                after = updated(update, master, values, part, known)
            for key, value in after.items():
                if key in fields and value is not known.get(key):
                    fields[key][inside] = value
                elif key not in fields and is_by_element(key, value, values.shape):
                    raise RuntimeError(
                        f"{type(self.optimizer).__name__} has created the state {key!r} in a later step than the "
                        "others, so that no disk space is reserved for it. Write offload='cpu'."
                    )
            self._show(slice(low, high), values)
            if PARAMETERS in fields:
                fields[PARAMETERS][inside] = values
            if high == master.range.stop:  # only at the end, so that all sub-groups use the same step count
                states[master.tensor] = {
                    key: master.stored(key) if key in fields else value for key, value in after.items()
                }

    def _show(self, part: slice, values: Tensor) -> None:
        if self.shown is not None:
            self.shown[part].copy_(values.reshape(-1), non_blocking=True)
