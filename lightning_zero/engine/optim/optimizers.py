"""The optimizers of an engine: their masters, and the gathers that follow an update."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import synchronize
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.optim.compatibility import check_not_divided, check_optimizers, kept_whole, warn_of_unknown
from lightning_zero.engine.optim.masters import Masters, give_owners, make_room, masters_of
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets
from lightning_zero.engine.state.slot import slots_of


class Optimizers:
    """The optimizers that update the parameters of one engine, which their masters see as an ``OptimizedEngine``.

    Args:
        module: the root module, which is not kept alive.
        seed: for stochastic rounding; the same on every rank.

    Attributes:
        masters: those of each optimizer, in the order in which the optimizers were given.
        steps: the number of updates since the engine's counters were reset.
    """

    def __init__(
        self, config: EngineConfig, module: nn.Module, buckets: list[Bucket], shared: SharedByBuckets, seed: int
    ) -> None:
        self.buckets, self.communicator, self.seed = buckets, shared.communicator, seed
        self.background, self.ledger = shared.updates, shared.ledger
        self._config, self._module = config, weakref.ref(module)
        self.masters: list[Masters] = []
        self._group_sizes: list[int] = []
        self.steps = self._updates = 0
        self._is_updating = False

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module was deleted"
        return module

    @property
    def alive(self) -> list[Optimizer]:
        """The optimizers that are still alive."""
        return [optimizer for masters in self.masters if (optimizer := masters.optimizer) is not None]

    def of(self, optimizer: Optimizer) -> Masters | None:
        """The masters of an optimizer; None if the engine does not shard it."""
        return next((masters for masters in self.masters if masters.optimizer is optimizer), None)

    def replace(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers; see ``Engine.set_optimizers``."""
        check_optimizers(optimizers, self._config, ranks=self.communicator.everyone.size)
        self._check_not_divided(optimizers)
        for optimizer in optimizers:
            make_room(optimizer)
        before, known = self.masters, {masters.optimizer: masters for masters in self.masters}
        self.masters = [known.get(optimizer) or masters_of(optimizer, self) for optimizer in optimizers]
        if self.communicator.size > 1 and self.communicator.everyone.rank == 0:
            for optimizer in (each for each in optimizers if each not in known):
                warn_of_unknown(optimizer, self._config)
        gone = [masters for masters in before if masters not in self.masters]
        if gone:
            synchronize(self.background)  # a removed optimizer's update may still be running
        for masters in gone:
            masters.close(None)
        self._give_owners()

    def before_forward(self) -> None:
        """Before a step, recover from a failed update, and reshard for parameters that were added to an optimizer."""
        self.recover()
        if self._sizes_of_groups() != self._group_sizes:  # changed by ``add_param_group``
            self._give_owners()

    def recover(self) -> None:
        """Put the module's parameters back into the groups of optimizers whose step has raised."""
        for masters in self.masters:
            masters.begin_anew()

    def _give_owners(self) -> None:
        """Reshard buckets so that each parameter that an optimizer now needs whole has one owning rank. Collective.

        Raises:
            RuntimeError: if a parameter in a bucket to reshard has a gradient; no bucket is changed in that case.
        """
        optimizers = self.alive
        self._check_not_divided(optimizers)
        self._group_sizes = self._sizes_of_groups()
        is_kept_whole = kept_whole(optimizers, self._config, ranks=self.communicator.size)
        late = [
            bucket
            for bucket in self.buckets
            if not bucket.layout.is_whole and any(is_kept_whole(slot.name, slot.parameter) for slot in slots_of(bucket))
        ]
        for slot in (slot for bucket in late for slot in slots_of(bucket)):
            if slot.parameter.grad is not None:
                raise RuntimeError(
                    f"'{slot.name}' has a gradient, but its unit must be resharded for an optimizer that needs whole "
                    "parameters. Add parameters to such an optimizer while they have no gradients: after "
                    "optimizer.zero_grad(), or before the first backward."
                )
        if late:
            synchronize(self.background)
            give_owners(late, self.buckets, self.masters)

    def _check_not_divided(self, optimizers: Iterable[Optimizer]) -> None:
        slots = [slot for bucket in self.buckets for slot in slots_of(bucket)]
        check_not_divided(optimizers, self._config, [(slot.name, slot.parameter, slot.share) for slot in slots])

    def _sizes_of_groups(self) -> list[int]:
        return [len(group["params"]) for optimizer in self.alive for group in optimizer.param_groups]

    # -- updates ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Mark the start of an update: until ``updated`` is called, only some master weights may have been updated."""
        self._is_updating = True

    def updated(self, buckets: list[Bucket]) -> None:
        """Count an update, which may still run in the background, and call ``show`` for its buckets."""
        self.steps += 1
        self._updates += 1
        self._is_updating = False
        self.show(buckets)

    def show(self, buckets: list[Bucket]) -> None:
        """After the masters of these buckets have changed, gather again those of them that are currently gathered."""
        changed, kept = set(buckets), []
        for bucket in (bucket for bucket in self.buckets if bucket in changed):
            if bucket.refresh():
                kept.append(bucket)
            if not self._config.overlap:
                bucket.wait()
        for bucket in kept:
            bucket.wait()

    @property
    def updates(self) -> int | None:
        """Number of updates of the master weights; None during an update, and after a failed update."""
        return None if self._is_updating or self.has_failed_update else self._updates

    @property
    def has_failed_update(self) -> bool:
        return any(bucket.update is not None and bucket.update.work.has_failed for bucket in self.buckets)

    def finish_updates(self) -> None:
        """Wait for background work. After a failed update, raise its error at every call."""
        synchronize(self.background)
        for bucket in self.buckets:
            if bucket.update is not None:
                bucket.update.work.wait()
