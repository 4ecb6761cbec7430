"""Engine methods for the contents of a checkpoint: state dicts, and master weights by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.rendezvous import Rendezvous
from lightning_zero.engine.compat import tree_leaves
from lightning_zero.engine.optim.master import restore_digits
from lightning_zero.engine.optim.masters import Masters
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import BucketSlot, slots_of
from lightning_zero.engine.tensor.sharded_tensor import ShardedTensor
from lightning_zero.engine.tensor.sharded_tree import Leaf, in_parts, on_cpu, walk


class StateDicts:
    """Base class of ``Engine``; ``Engine`` provides the attributes."""

    masters: list[Masters]
    rendezvous: Rendezvous

    @property
    def module(self) -> nn.Module:
        raise NotImplementedError

    @property
    def buckets(self) -> list[Bucket]:
        raise NotImplementedError

    def _masters_of(self, optimizer: Optimizer) -> Masters | None:
        return next((masters for masters in self.masters if masters.optimizer is optimizer), None)

    def full_state_dict(
        self, *, leaf: Leaf = on_cpu, module: nn.Module | None = None, without: Collection[str] = ()
    ) -> dict[str, Any]:
        """The module's state dict, by default with full (unsharded) tensors on the CPU. Collective.

        Args:
            leaf: converts each tensor: ``on_cpu``; ``on_meta``, for ranks that join the gathers but write nothing; or
                ``in_parts``, which leaves tensors sharded, without gathers or copies.
            module: a submodule; by default, the root module.
            without: names of entries to omit, which are not gathered. Must be the same on every rank.
        """
        with torch.no_grad():
            state = (module or self.module).state_dict()
            for name in without:
                state.pop(name, None)
            if leaf is in_parts:
                return state
            gathers = any(isinstance(v, ShardedTensor) and v.whole_at_hand() is None for v in tree_leaves(state))
            with self.rendezvous.met("the module's state dict") if gathers else nullcontext():
                return walk(state, leaf)

    def full_optimizer_state_dict(self, optimizer: Optimizer, *, leaf: Leaf = on_cpu) -> dict[str, Any]:
        """An optimizer's state dict in torch's usual form, by default with full tensors on the CPU. Collective.

        For an optimizer that the engine does not shard, each rank returns the optimizer's own state dict.

        Args:
            leaf: see ``full_state_dict``.
        """
        if (masters := self._masters_of(optimizer)) is not None:
            return masters.states.state_dict(leaf)
        state = optimizer.state_dict()
        return state if leaf is in_parts else copy.deepcopy(state)

    def masters_by_name(self, *, leaf: Leaf = on_cpu, module: nn.Module | None = None) -> dict[str, Tensor]:
        """The fp32 master weights of low-precision parameters by name; by default, full tensors on the CPU. Collective.

        Args:
            leaf: see ``full_state_dict``.
            module: a submodule, whose parameters are named as in it; by default, the root module.
        """
        finer = {
            name: slot
            for name, slot in self._slots_by_name(module).items()
            if slot.bucket.master_dtype != slot.bucket.dtype
        }
        masters = {name: ShardedTensor(slot, slot.parameter_at_rest(), keep=self) for name, slot in finer.items()}
        with self.rendezvous.met("the fp32 masters") if finer and leaf is not in_parts else nullcontext():
            return walk(masters, leaf)

    def load_masters(self, masters: dict[str, Tensor], *, module: nn.Module | None = None) -> None:
        """Restore saved fp32 master weights that match the current parameters. Collective.

        A parameter's element that differs from its rounded master weight was changed after the save, so it keeps its
        value. Parameters that are in fp32 now, but were saved in low precision, regain the precision of their master
        weights.

        Args:
            masters: full tensors by parameter name.
            module: a submodule, to which the names refer; by default, the root module.
        """
        for name, slot in self._slots_by_name(module).items():
            if name in masters:
                restore_digits(slot, masters[name])

    def _slots_by_name(self, module: nn.Module | None) -> dict[str, BucketSlot]:
        """Return the slots of a submodule's parameters by their names in it; by default, of the root module's."""
        slots = [slot for bucket in self.buckets for slot in slots_of(bucket)]
        if module is None:
            return {slot.name: slot for slot in slots}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {names[id(slot.parameter)]: slot for slot in slots if id(slot.parameter) in names}
