"""Magnitude pruning of sharded parameters: elements with the least magnitude are set to zero and stay zero.

No rank gathers a full parameter. The threshold is found by bisection: for each candidate, ranks count the elements
that are not above it. Each rank holds only the masks for its own shards.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import ShardedTensor, after_updates, process_group, shard_of
from lightning_zero.io.text import listed

_CHUNK = 2**22  # elements processed at a time, which bounds the memory for their magnitudes
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def magnitude_masks(parameters: Sequence[Tensor], amount: float, masks: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return masks that prune the elements with the least magnitude among all parameters. Collective.

    The pruned elements are those that ``torch.nn.utils.prune.global_unstructured`` with ``L1Unstructured`` selects in
    unsharded parameters. Among equal magnitudes, those that come first (by parameter, then element) are pruned.

    Args:
        parameters: sharded parameters, or ordinary parameters that are the same on every rank.
        amount: the fraction of all elements to prune, 0 to 1.
        masks: earlier masks, whose pruned elements stay pruned and count towards ``amount``.

    Returns:
        For each parameter, a bool mask with the parameter's shape and sharding; False for pruned elements.

    Raises:
        ValueError: if ``amount`` is not between 0 and 1.

    Example:
        >>> [mask] = magnitude_masks([torch.tensor([0.5, -0.1, 0.2, -0.9])], amount=0.5)
        >>> mask
        tensor([ True, False, False,  True])
    """
    _check(amount)
    masks = [_like(p, torch.ones_like(shard_of(p), dtype=torch.bool)) for p in parameters] if masks is None else masks
    masks = [_like(p, shard_of(mask).clone()) for p, mask in zip(parameters, masks)]
    wanted = round(amount * sum(p.numel() for p in parameters)) - sum(pruned_numels(masks))
    if wanted > 0:
        _prune(parameters, masks, wanted)
    return masks


def pruned_numels(masks: Sequence[Tensor]) -> list[int]:
    """Return how many elements each mask prunes, over all ranks. Collective."""
    return _by_place([int((~shard_of(mask)).sum()) for mask in masks], masks).sum(1).tolist()


def _check(amount: float) -> None:
    if not 0 <= amount <= 1:
        raise ValueError(f"amount={amount!r} is not a fraction of the elements: write a number from 0 to 1.")


def _prune(parameters: Sequence[Tensor], masks: Sequence[Tensor], wanted: int) -> None:
    """Change the masks in place, so that they prune ``wanted`` more elements."""
    dtype = torch.float16
    for p in parameters:
        dtype = torch.promote_types(dtype, p.dtype.to_real())
    chunks = [partial(_chunks, p, mask, dtype) for p, mask in zip(parameters, masks)]

    def counts(is_counted: Callable[[Tensor], Tensor]) -> Tensor:
        """Count the chosen elements by tensor and place, among those that are not pruned. Collective."""
        own = [sum(int((kept & is_counted(bits)).sum()) for bits, kept in chunks_of()) for chunks_of in chunks]
        return _by_place(own, masks)

    largest = torch.iinfo(_INTEGERS[dtype.itemsize]).max
    threshold = bisect_left(
        range(largest), wanted, hi=largest, key=lambda bound: int(counts(lambda bits: bits <= bound).sum())
    )

    # Of the elements equal to the threshold, prune the first ones.
    need = wanted - int(counts(lambda bits: bits < threshold).sum())
    equal = counts(lambda bits: bits == threshold)
    before = equal.flatten().cumsum(0).view_as(equal) - equal
    needed = [need - int(row[_place(mask)]) for row, mask in zip(before, masks)]
    for chunks_of, left in zip(chunks, needed):
        for bits, kept in chunks_of():
            chosen = (kept & (bits == threshold)).nonzero()[: max(left, 0), 0]
            kept &= bits >= threshold
            kept[chosen] = False
            left -= len(chosen)


def _chunks(parameter: Tensor, mask: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield chunks of this rank's magnitudes and mask; magnitudes become integers in the same order (NaN last)."""
    for values, kept in zip(shard_of(parameter).split(_CHUNK), shard_of(mask).split(_CHUNK)):
        magnitudes = values.to(parameter.dtype).abs().to(dtype)  # round wider masters to the parameter's dtype
        yield magnitudes.view(_INTEGERS[dtype.itemsize]), kept


def _place(tensor: Tensor) -> int:
    """The position of this rank's shard among a tensor's shards; 0 for a tensor that is the same on every rank."""
    if not isinstance(tensor, ShardedTensor):
        return 0
    return sum(start < tensor.slot.offset for start, _ in tensor.slot.ranges())


def _by_place(own: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Return each tensor's counts in the order of its shards, given this rank's. Collective if any is sharded."""
    slot: Any = next((tensor.slot for tensor in tensors if isinstance(tensor, ShardedTensor)), None)
    counts = torch.zeros(len(own), slot.group.size if slot is not None else 1, dtype=torch.int64, device="cpu")
    for row, count, tensor in zip(counts, own, tensors):
        if slot is None or slot.group.rank == 0 or isinstance(tensor, ShardedTensor):
            row[_place(tensor)] = count
    if slot is None:
        return counts
    return slot.reduce(counts.to(slot.device), process_group.ReduceOp.SUM, "pruning").cpu()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return this rank's values as a tensor with a parameter's shape and sharding."""
    return ShardedTensor(parameter.slot, local) if isinstance(parameter, ShardedTensor) else local.view(parameter.shape)


def _matrices(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim >= 2


class MagnitudePruning(Callback):
    """Callback that prunes the weights with the least magnitude among all chosen parameters, over all ranks.

    At the start of each epoch, weights are set to zero until the fraction ``amount`` is pruned. After each optimizer
    step, pruned weights are set to zero again. The pruned fraction is logged as ``pruning/sparsity``. Checkpoints
    contain the masks, so a resumed run continues with the same masks. Each rank keeps a mask of one byte per element
    of its shards. Pruning also works under DDP and on a single device.

    Args:
        amount: the fraction of the chosen parameters' elements to prune, 0 to 1; or a function that returns the
            fraction for an epoch, counted from 0. Pruned elements stay pruned even if the fraction becomes smaller.
        parameters: a function that receives a parameter's name and the parameter, and returns whether to prune it. By
            default, parameters with two or more dimensions are pruned.

    Attributes:
        sparsity: the fraction of the chosen elements that is pruned; None before the first epoch.
        sparsity_of: the pruned fraction of each chosen parameter, by name.

    Raises:
        ValueError: if ``amount`` is not between 0 and 1, no parameter is chosen, a checkpoint has masks of other
            parameters, or tensor parallelism is used.
    """

    def __init__(
        self,
        amount: float | Callable[[int], float] = 0.5,
        parameters: Callable[[str, nn.Parameter], bool] = _matrices,
    ) -> None:
        if not callable(amount):
            _check(amount)
        self._amount, self._is_chosen = amount, parameters
        self.sparsity: float | None = None
        self.sparsity_of: dict[str, float] = {}
        self._chosen: dict[str, nn.Parameter] = {}
        self._masks: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Tensor] = {}
        self._handles = ExitStack()
        self._followed: list[Optimizer] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._chosen = {name: p for name, p in pl_module.named_parameters() if self._is_chosen(name, p)}
        if not self._chosen:
            raise ValueError(
                "MagnitudePruning: no parameter is chosen. Pass parameters=f, where f(name, parameter) returns True to "
                "prune a parameter; names are, for example, "
                f"{[name for name, _ in pl_module.named_parameters()][:3]}."
            )
        if any(isinstance(p, ShardedTensor) and p.slot.share.count > 1 for p in self._chosen.values()):
            raise ValueError(
                "MagnitudePruning does not work with tensor parallelism yet: remove the callback or the option "
                "tensor_parallel_size."
            )
        if self._loaded and (names := self._loaded.keys() ^ self._chosen.keys()):
            raise ValueError(
                f"MagnitudePruning: the masks in the checkpoint and the choice of parameters= differ in "
                f"{listed(sorted(names))}. Pass the parameters= of that run, or leave ckpt_path out and call "
                "lightning_zero.load_weights(self, path) in configure_model, to start new masks from the saved weights."
            )
        for name, mask in self._loaded.items():
            p = self._chosen[name]
            local = p.range_of(mask) if isinstance(p, ShardedTensor) else mask.reshape(-1)
            self._masks[name] = _like(p, local.to(shard_of(p).device, copy=True))

    def _follow(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Register the hook after updates, also with optimizers that replace others in mid-run."""
        if trainer.optimizers is not self._followed:
            self._unfollow()
            for optimizer in trainer.optimizers:
                self._handles.enter_context(after_updates(optimizer, self._set_to_zero))
            self._followed = trainer.optimizers

    on_train_batch_start = on_before_optimizer_step = _follow

    def _unfollow(self) -> None:
        self._handles.close()
        self._followed = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        amount = self._amount(trainer.current_epoch) if callable(self._amount) else self._amount
        names, chosen = list(self._chosen), list(self._chosen.values())
        masks = magnitude_masks(chosen, amount, [self._masks[name] for name in names] if self._masks else None)
        self._masks = dict(zip(names, masks))
        self._set_to_zero(chosen)
        pruned = pruned_numels(masks)
        self.sparsity_of = {name: numel / max(p.numel(), 1) for name, p, numel in zip(names, chosen, pruned)}
        self.sparsity = sum(pruned) / max(sum(p.numel() for p in chosen), 1)
        pl_module.log("pruning/sparsity", self.sparsity, on_step=False, on_epoch=True, sync_dist=True)

    @torch.no_grad()
    def _set_to_zero(self, parameters: Sequence[Tensor]) -> None:
        masks = {id(self._chosen[name]): mask for name, mask in self._masks.items()}
        for p in parameters:
            if (mask := masks.get(id(p))) is not None:
                p.mul_(mask)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._loaded, self._masks = {}, {}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._unfollow()
            self._chosen = {}  # the masks stay, for checkpoints that are saved later

    def state_dict(self) -> dict[str, Any]:
        return {"masks": self._masks or self._loaded}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict["masks"]
