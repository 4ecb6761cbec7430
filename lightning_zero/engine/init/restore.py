"""Turn sharded parameters, and tensors that user code derived from them, back into ordinary tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.rendezvous import Rendezvous
from lightning_zero.engine.init.host_room import available_memory
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import BucketSlot, make_ordinary, slots_of
from lightning_zero.engine.tensor.identity import become
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor


def restore_parameters(
    buckets: Sequence[Bucket], communicator: Communicator, rendezvous: Rendezvous, device: torch.device, alone: bool
) -> None:
    """Turn the parameters of buckets into ordinary full tensors on a device. Collective, unless ``alone``.

    Args:
        alone: whether to work without other ranks; parameters that this rank does not hold in full then stay sharded.
    """
    with torch.no_grad(), nullcontext() if alone else rendezvous.met("the module's parameters"):
        derived = _derived(buckets, communicator, not alone)
        parameters = {slot: slot.parameter for slot in derived}
        values = {
            id(tensor): slot.collect(tensor.local).to(device, tensor.dtype, copy=True)
            for slot, tensors in derived.items()
            for tensor in tensors
            if not tensor.is_parameter
        }
        for bucket in buckets:
            if not bucket.parameters:
                continue  # restored by an earlier call that failed later
            if alone and not bucket.is_whole_here:
                bucket.update, memory = None, available_memory()  # the update has ended; ``close`` raises its error
                shard = bucket.residency.plan.shard_numel * bucket.master_dtype.itemsize
                bucket.leave_disk(may_read=memory is None or memory > 2 * shard)
                if communicator.everyone.size > 1:
                    bucket.abandon()
                    continue
            make_ordinary(bucket, device)
        for slot, tensors in derived.items():
            if isinstance(parameters[slot], ShardedTensor):
                continue
            for tensor in tensors:
                value = values.get(id(tensor), parameters[slot].detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                become(tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)


def _derived(
    buckets: Sequence[Bucket], communicator: Communicator, communicate: bool
) -> dict[BucketSlot, list[ShardedTensor]]:
    """Tensors that user code derived from parameters: all aliases, and other tensors if they are alive on all ranks.

    Ranks match tensors by their order of creation. If ranks have derived different numbers of tensors from a parameter,
    only its aliases are returned.
    """
    derived = {slot: slot.derived for bucket in buckets if bucket.parameters for slot in slots_of(bucket)}
    kept = {
        slot.name: (slot.remembered, {key for key, tensor in tensors.items() if not tensor.is_parameter})
        for slot, tensors in derived.items()
        if slot.remembered
    }
    everywhere = communicator.everyone.control.gather_objects(kept) if communicate else [{}]

    def is_everywhere(slot: BucketSlot, key: tuple[str, int]) -> bool:
        found = [names.get(slot.name, (0, set())) for names in everywhere]
        return all(made == slot.remembered and key in keys for made, keys in found)

    return {
        slot: [t for key, t in sorted(tensors.items()) if t.is_parameter or is_everywhere(slot, key)]
        for slot, tensors in derived.items()
    }
