"""Parameters in parts are put together before a module is set up: a failed run left them so, or they are copies."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_zero.engine.agreement import Agreement
from lightning_zero.engine.bucket import Bucket, become
from lightning_zero.engine.collectives import Communicator
from lightning_zero.engine.core import slot_of
from lightning_zero.engine.sharded_tensor import ShardedTensor
from lightning_zero.engine.watch import explained


def reunite(module: nn.Module, timeout: float) -> None:
    """Make the parameters that a closed engine left sharded ordinary, whole tensors again. Collective.

    So are those of a copy (``copy.deepcopy`` in a hook) of a module that an engine still has. Where some ranks hold a
    parameter in parts and others hold it whole, it becomes what the first of these holds.

    Args:
        module: of the same structure on every rank.
        timeout: seconds that a rank waits for the others, as the engine's ``handshake_timeout``.

    Raises:
        ValueError: if the parts were made by another number of ranks, or in another order of them.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if isinstance(parameter, ShardedTensor) and not parameter.is_parameter:
                become(parameter, nn.Parameter(parameter.whole(), parameter.requires_grad))
    left = _left_in(module)
    size = dist.get_world_size() if dist.is_initialized() else 1
    places = {(bucket.communicator.rank, bucket.communicator.size) for bucket in left.values()}
    held: list[tuple[list[str], set[tuple[int, int]]]] = [(list(left), places)]
    if size > 1:
        held = held * size
        with explained("putting the module's parameters together"):
            dist.all_gather_object(held, (list(left), places))
    if any(places - {(rank, size)} for rank, (_, places) in enumerate(held)):
        sizes = sorted({of_size for _, places in held for _, of_size in places})
        raise ValueError(
            f"The parameters were left in parts by a run that failed on {sizes} ranks: {size} rank(s) in this order "
            "cannot put them together. Use the same ranks, or make a new module and load a checkpoint."
        )
    if not any(names for names, _ in held):
        return
    device = next(module.parameters()).device
    communicator = Communicator(None, device)
    agreement = Agreement(communicator, timeout)
    try:
        for name, parameter in module.named_parameters():
            whole = [rank for rank, (names, _) in enumerate(held) if name not in names]
            if not whole and left[name].parameters:  # else it has been restored with another of its bucket
                left[name].rejoin(communicator, agreement)
                left[name].restore(device)
            elif 0 < len(whole) < size:
                if name in left:
                    left[name].parameters = []
                    value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    become(parameter, nn.Parameter(value, parameter.requires_grad))
                communicator.broadcast(parameter.detach(), whole[0])
    finally:
        agreement.close()
        communicator.close()


def _left_in(module: nn.Module) -> dict[str, Bucket]:
    """By name, the bucket of each parameter that a closed engine has left in parts."""
    slots = {name: slot for name, p in module.named_parameters() if (slot := slot_of(p)) is not None}
    return {name: slot.bucket for name, slot in slots.items() if slot.bucket.agreement.is_closed}
