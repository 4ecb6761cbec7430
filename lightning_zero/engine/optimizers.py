"""The part of an engine that manages its optimizers, and gathers parameters again after an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import synchronize
from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.offload.updates import Updates
from lightning_zero.engine.optim.compatibility import check_not_divided, check_optimizers, kept_whole, warn_of_unknown
from lightning_zero.engine.optim.hyperparameters import Hyperparameters
from lightning_zero.engine.optim.masters import Masters, give_owners, make_room, masters_of
from lightning_zero.engine.plan.ownership import warn_if_uneven
from lightning_zero.engine.runtime.reducer import GradientReducer
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.ledger import Ledger
from lightning_zero.engine.state.slot import slots_of
from lightning_zero.engine.state_dicts import StateDicts


class Optimizers(StateDicts):
    """Base class of ``Engine``. The annotated attributes are set by ``Engine``."""

    config: EngineConfig
    communicator: Communicator
    reducer: GradientReducer
    background: Updates
    ledger: Ledger

    def __init__(self) -> None:
        self.masters: list[Masters] = []
        self._group_sizes: list[int] = []
        self._steps = self._updates = 0
        self._is_updating = False

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers; this is also possible during a run. Removed optimizers lose their state.

        Raises:
            TypeError: if an optimizer cannot be used with this engine (see ``check_optimizers``).
            OSError: if a disk lacks space for an optimizer's states. After either error, no optimizer is replaced.
        """
        check_optimizers(optimizers, self.config, ranks=self.communicator.everyone.size)
        self._check_not_divided(optimizers)
        for optimizer in optimizers:
            make_room(optimizer)
        before, known = self.masters, {masters.optimizer: masters for masters in self.masters}
        self.masters = [known.get(optimizer) or masters_of(optimizer, self) for optimizer in optimizers]
        if self.communicator.size > 1 and self.communicator.everyone.rank == 0:
            for optimizer in (each for each in optimizers if each not in known):
                warn_of_unknown(optimizer, self.config)
        gone = [masters for masters in before if masters not in self.masters]
        if gone:
            synchronize(self.background)  # a removed optimizer's update may still be running
        for masters in gone:
            masters.close(None)
        self.reducer.hyperparameters = Hyperparameters(optimizers, self.communicator)
        self._give_owners()

    def _give_owners(self) -> None:
        """Reshard buckets so that each parameter that an optimizer now needs whole has one owning rank. Collective.

        Raises:
            RuntimeError: if a parameter in a bucket to reshard has a gradient; no bucket is changed in that case.
        """
        self._check_not_divided(self.optimizers)
        self._group_sizes = self._sizes_of_groups()
        is_kept_whole = kept_whole(self.optimizers, self.config, ranks=self.communicator.size)
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
        if self.communicator.everyone.rank == 0:
            warn_if_uneven([bucket.layout for bucket in self.buckets])

    def _check_not_divided(self, optimizers: Iterable[Optimizer]) -> None:
        slots = [slot for bucket in self.buckets for slot in slots_of(bucket)]
        check_not_divided(optimizers, self.config, [(slot.name, slot.parameter, slot.share) for slot in slots])

    def _sizes_of_groups(self) -> list[int]:
        return [len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that are still alive."""
        return [optimizer for masters in self.masters if (optimizer := masters.optimizer) is not None]

    # -- updates ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Mark the start of an update: until ``updated`` is called, only some master weights may have been updated."""
        self._is_updating = True

    def updated(self, buckets: list[Bucket]) -> None:
        """Count an update, which may still run in the background, and call ``show`` for its buckets."""
        self._steps += 1
        self._updates += 1
        self._is_updating = False
        self.show(buckets)

    def show(self, buckets: list[Bucket]) -> None:
        """After the masters of these buckets have changed, gather again those of them that are currently gathered."""
        changed, kept = set(buckets), []
        for bucket in (bucket for bucket in self.buckets if bucket in changed):
            if bucket.refresh():
                kept.append(bucket)
            if not self.config.overlap:
                bucket.wait()
        for bucket in kept:
            bucket.wait()

    @property
    def updates(self) -> int | None:
        """Number of updates of the master weights; None during an update, and after a failed update."""
        return None if self._is_updating or self._has_failed_update else self._updates

    @property
    def _has_failed_update(self) -> bool:
        return any(bucket.update is not None and bucket.update.work.has_failed for bucket in self.buckets)

    def _finish_updates(self) -> None:
        """Wait for background work. After a failed update, raise its error at every call."""
        synchronize(self.background)
        for bucket in self.buckets:
            if bucket.update is not None:
                bucket.update.work.wait()
