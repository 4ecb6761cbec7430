"""Turn sharded parameters back into ordinary tensors: when an engine closes, and those that a failed run has left.

Tensors that user code derived from parameters become ordinary as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.comm.failures import explained
from lightning_zero.engine.comm.process_group import all_gather_objects, world_size
from lightning_zero.engine.state.bucket import Bucket, BucketState
from lightning_zero.engine.state.slot import make_ordinary, slot_of, slots_of
from lightning_zero.engine.tensor.identity import like, set_contents
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor


def restore_parameters(
    buckets: Sequence[Bucket], communicator: Communicator, device: torch.device, alone: bool
) -> None:
    """Turn the parameters of buckets into ordinary full tensors on a device. Collective, unless ``alone``.

    Args:
        alone: whether to work without other ranks; parameters that this rank does not hold in full then stay sharded.
    """
    with torch.no_grad(), nullcontext() if alone else communicator.rendezvous.met("the module's parameters"):
        slots = [slot for bucket in buckets if bucket.parameters for slot in slots_of(bucket)]
        aliases = [(slot.parameter, t) for slot in slots for t in slot.derived.values() if t.is_parameter]
        copies = {name: t for slot in slots for name, t in slot.derived.items() if not t.is_parameter}
        # only those that are alive on all ranks can be gathered
        on_all = set() if alone else set.intersection(*communicator.everyone.gather_objects(set(copies)))
        whole = []
        for tensor in map(copies.__getitem__, sorted(on_all)):
            value = tensor.slot.collect(tensor.local)
            own = tensor.own_values  # asked only now, since other ranks may have none, and take part
            whole.append((tensor, (value if own is None else own).to(device, tensor.dtype, copy=True)))
        for bucket in buckets:
            if not bucket.parameters:
                continue  # restored by an earlier call that failed later
            if alone and not bucket.is_whole_here:
                bucket.update = None  # it has ended; ``close`` raises its error
                if communicator.everyone.size > 1:
                    bucket.abandon()
                    continue
                if bucket.state is BucketState.STALE:  # the values as the failed update has left them
                    bucket.state = BucketState.GATHERED
            make_ordinary(bucket, device)
        for tensor, value in whole:
            set_contents(tensor, like(tensor, value))
        for parameter, alias in aliases:
            if not isinstance(parameter, ShardedTensor):
                set_contents(alias, like(alias, parameter.detach()))


def consolidate(module: nn.Module, device: torch.device) -> None:
    """Turn parameters that a closed engine left sharded into ordinary full tensors on the CPU. Collective.

    Sharded copies of parameters (from ``copy.deepcopy`` in a hook) become ordinary as well, even if their engine is
    still open. A parameter that is sharded on some ranks and full on others takes the value of the first rank that
    holds the full parameter.

    Args:
        device: the device over which this rank communicates.

    Raises:
        ValueError: if the failed run used tensor parallelism, another number of ranks, or another order of ranks.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if isinstance(parameter, ShardedTensor) and not parameter.is_parameter:
                set_contents(parameter, like(parameter, parameter.whole()))
    slots = {name: slot for name, p in module.named_parameters() if (slot := slot_of(p)) is not None}
    left = {name: slot.bucket for name, slot in slots.items() if slot.bucket.communicator.rendezvous.is_closed}
    if any(bucket.communicator.tensor.size > 1 for bucket in left.values()):
        raise ValueError(
            "The parameters were left sharded by a failed run with tensor parallelism, and cannot be unsharded: make a "
            "new module and load a checkpoint."
        )
    size = world_size()
    places = {(bucket.communicator.rank, bucket.communicator.size) for bucket in left.values()}
    with explained("unsharding the module's parameters"):
        held: list[tuple[list[str], set[tuple[int, int]]]] = all_gather_objects((list(left), places))
    if any(places - {(rank, size)} for rank, (_, places) in enumerate(held)):
        sizes = " or ".join(map(str, sorted({of_size for _, places in held for _, of_size in places})))
        raise ValueError(
            f"A failed run of {sizes} rank(s) left the parameters sharded. This run has {size} rank(s), or the same "
            "ranks in another order, so it cannot unshard them. Use as many ranks in the same order, or make a new "
            "module and load a checkpoint."
        )
    if not any(names for names, _ in held):
        return
    if device.type != "cpu":
        torch.accelerator.synchronize(device)  # gathers that the failed run has not awaited may still write
    communicator, host = Communicator(None, device), torch.device("cpu")
    try:
        for name, parameter in module.named_parameters():
            whole = [rank for rank, (names, _) in enumerate(held) if name not in names]
            if not whole and left[name].parameters:  # an empty list: the bucket has been unsharded already
                left[name].rejoin(communicator)
                make_ordinary(left[name], host)
            elif 0 < len(whole) < size:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if name not in left:
                    value.copy_(parameter.detach())
                communicator.control.broadcast(value, whole[0])
                if name in left:
                    left[name].parameters = []
                    set_contents(parameter, like(parameter, value.to(host)))
                else:
                    parameter.detach().copy_(value)
    finally:
        communicator.close()
