"""Update masters outside ``optimizer.step``: large ones in chunks, and offloaded ones in the background.

Results in bf16 are rounded stochastically: an update by less than half of bf16's spacing would be lost in rounding to
nearest; with ``betas=(0.9, 0.999)``, Adam's second moment would hardly ever decrease. A value is rounded up or down at
random, such that the expected result is the value itself. The random bits do not depend on the stage, the ranks or
restarts: they are a hash of the seed, the number of updates so far, the parameter's name, the rounded entry's name and
the element's index in the parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.compat import FakeTensor
from lightning_zero.engine.config import LOW_PRECISION
from lightning_zero.engine.offload import MASTERS, PARAMETERS, Update
from lightning_zero.engine.optim.compatibility import is_torchs_elementwise
from lightning_zero.engine.optim.kinds import copied, is_by_element
from lightning_zero.engine.optim.master import Master, field_of
from lightning_zero.engine.plan.layout import BucketLayout
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor

GROUP_KEY = "stochastic_rounding"
"""The entry of param groups with the seed and the number of updates, so that checkpoints contain both."""

CHUNK_NUMEL, CHUNK_NUMEL_ON_DEVICE = 2**18, 2**22
"""Sizes of a chunk in elements, multiples of ``ALIGNMENT``. In fp32, each tensor of a chunk takes 1 MiB, or 16 MiB on
devices other than the CPU, which need large kernels."""


def chunks(tensor: Tensor) -> list[slice]:
    """The chunks of a flattened tensor that are updated one after another; one empty chunk for an empty tensor."""
    is_on_cpu = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)  # plans are for devices
    size = CHUNK_NUMEL if is_on_cpu else CHUNK_NUMEL_ON_DEVICE
    return [slice(start, min(start + size, tensor.numel())) for start in range(0, max(tensor.numel(), 1), size)]


def count_update(groups: Sequence[dict[str, Any]], seed: int) -> None:
    """Count an update of all param groups. ``seed`` is kept in the groups, unless loaded ones have another seed."""
    known = [group[GROUP_KEY] for group in groups if GROUP_KEY in group]
    first, updates = max(known, key=itemgetter(1), default=(seed, 0))
    for group in groups:
        group[GROUP_KEY] = first, updates + 1


def random_bits(
    key: tuple[int, int], layout: BucketLayout, part: slice, what: str, device: torch.device | str
) -> Tensor:
    """Return one number from 0 to 2**16 - 1 for each element in a range of this rank's shard of a bucket, as int32.

    Args:
        key: (seed, number of updates).
        what: the name of what is rounded, such as an optimizer state.
    """
    bits = torch.zeros(part.stop - part.start, dtype=torch.int32, device=device)  # those of gaps do not matter
    begin = layout.own_range[0] + part.start
    for index, segment in enumerate(layout.segments):
        start, stop = layout.owned_range(index, layout.rank)
        start, stop = max(start, begin), min(stop, begin + len(bits))
        if start < stop:
            share = segment.share.index if segment.share.is_divided else None  # shares have different elements
            text = repr((*key, segment.name, share, what))
            _hash(text, start - segment.start, bits[start - begin : stop - begin])
    return bits


def _hash(key: str, first: int, x: Tensor) -> None:
    """Hash the numbers from ``first`` on by the rounds of "triple32" (C. Wellons), with a key at two places.

    With one multiplication fewer, bits of elements at a distance of 64 would depend on each other.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    before, within = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    torch.arange(len(x), out=x, device=x.device)
    x += (first + before + 2**31) % 2**32 - 2**31  # as int32, which wraps around
    x ^= (x >> 17).bitwise_and_(2**15 - 1)  # shifted without the sign
    x *= 0xED5AD4BB - 2**32
    x ^= (x >> 11).bitwise_and_(2**21 - 1)
    x += within
    x *= 0xAC4C1B51 - 2**32
    x ^= (x >> 15).bitwise_and_(2**17 - 1)
    x *= 0x31848BAB
    x.bitwise_right_shift_(16).bitwise_and_(2**16 - 1)


def round_stochastically(values: Tensor, target: Tensor, bits: Tensor) -> None:
    """Write fp32 values to a bf16 tensor, with the random bits of ``random_bits``.

    A bf16 number is the upper half of an fp32 number. Adding a random number of 16 bits carries into the upper half
    with the probability that makes the mean equal the value.
    """
    rounded = values.view(torch.int32).add(bits).bitwise_and_(-(2**16)).view(torch.float32)
    nan = values.clamp(max=-float("inf"))  # minus infinity, or NaN, which the carry may have turned into a number
    target.copy_(torch.maximum(rounded, nan, out=rounded))


# -- updates -----------------------------------------------------------------------------------------------------------


def gains_by_chunks(kind: type, group: dict[str, Any], values: Tensor) -> bool:
    """Whether an optimizer of this class, with these options, updates the tensor faster in chunks.

    A torch optimizer that is not fused passes over a tensor once for each operation (Adam nine times), and reads a
    tensor larger than the cache from memory each time. Fake tensors are not read, so chunks gain nothing.
    """
    if values.numel() < 2 * CHUNK_NUMEL or values.device.type != "cpu" or isinstance(values, FakeTensor):
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
        return update.act([values], [gradient], [state], master.leaf)[0]
    plan, flat, flat_gradient = master.bucket.residency.plan, values.view(-1), gradient.view(-1)
    fields = {key: value.view(-1) for key, value in state.items() if is_by_element(key, value, values.shape)}
    small = {key: value for key, value in state.items() if key not in fields}
    after, new_fields = dict(state), dict(fields)
    parts = chunks(values)
    # one chunk at a time where chunks are copied, so that little memory is needed; otherwise all in one ``step``
    for together in [[part] for part in parts] if master.rounds else [parts]:
        own = [_widened(flat[part], plan.update_dtype) for part in together]
        given = [{key: _widened(value[part], plan.update_dtype) for key, value in fields.items()} for part in together]
        before = [each | {key: copied(value) for key, value in small.items()} for each in given]
        results = update.act(own, [flat_gradient[part] for part in together], before, master.leaf)
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
        bits = random_bits(update.group[GROUP_KEY], master.bucket.layout, place, what, target.device)
        round_stochastically(values.float(), target, bits)
    else:
        target.copy_(values)


def update_offloaded(
    optimizer: Optimizer,
    buckets: Mapping[Bucket, Sequence[tuple[int, Master]]],
    gradients: Mapping[Master, Tensor | None],
    own: dict[Any, Any],
) -> None:
    """Start to update the masters of offloaded buckets in the background, with the current options of their groups.

    Args:
        buckets: each bucket's masters, each preceded by the number of its group.
        own: the entries of the optimizer's state that belong to no parameter, from before the step.
    """
    for bucket, masters in buckets.items():
        device, groups = bucket.full.device, optimizer.param_groups
        numbers = {number for number, _ in masters}
        update_of = {number: Update.of(optimizer, groups[number], device, own) for number in numbers}
        wanted = [(update_of[number], master, gradients[master]) for number, master in masters if master.is_here]
        bucket.update_in_background(partial(_update, optimizer, bucket, wanted))


def _update(
    optimizer: Optimizer,
    bucket: Bucket,
    wanted: list[tuple[Update, Master, Tensor | None]],
    shown: Tensor | None,
    fields: Mapping[str, Tensor] | None = None,
) -> None:
    """Update masters of a bucket.

    Args:
        wanted: each master's update, the master, and its gradient.
        shown: another tensor to write the new values to, or None; see ``Bucket.update_in_background``.
        fields: the bucket's masters and states, in memory, if they are kept on a disk.
    """
    while wanted:
        update, master, gradient = wanted.pop(0)  # frees each gradient before the next update
        own = {key: field[master.range].view(master.tensor.shape) for key, field in (fields or {}).items()}
        values, copy = own.pop(MASTERS, master.tensor.detach()), own.pop(PARAMETERS, None)
        before = optimizer.state.get(master.tensor, {})
        known = {
            key: own[field_of(key, value.dtype)] if isinstance(value, LazyTensor) else value
            for key, value in before.items()
        }
        with bucket.phases("update", bucket.unit_name):
            after = updated(update, master, values, gradient, known)
        for key, value in after.items() if fields is not None else ():
            if is_by_element(key, value, values.shape):
                if (field := field_of(key, value.dtype)) not in own:  # a state that this update has made
                    master.write_state(key, value)
                elif value is not own[field]:
                    own[field].copy_(value)
                after[key] = master.state_on_disk(key, value.dtype)
        optimizer.state[master.tensor] = after
        if copy is not None:
            copy.copy_(values)
        if shown is not None:
            shown[master.range].copy_(values.reshape(-1), non_blocking=True)
