"""The optimizers of an engine: their masters, and the gathers that follow an update."""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.optim.compatibility import check_not_divided, check_optimizers, kept_whole, warn_of_unknown
from lightning_zero.engine.optim.masters import Masters, give_owners, masters_of
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets
from lightning_zero.engine.state.slot import slots_of

_BITS = 32


class Hyperparameters:
    """Compares the hyperparameters of optimizers between ranks, as part of an exchange that takes place anyway.

    Each rank contributes the bits of a digest and their complements: if a rank sets a bit, and another rank
    sets its complement, digests differ. Only then do ranks exchange the hyperparameters, for one warning.
    """

    def __init__(self, optimizers: Iterable[Optimizer], communicator: Communicator) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._communicator = communicator
        self._digested: list[Any] = []
        self._bits: list[bool] = []
        self._is_over = not self._optimizers or communicator.size == 1

    def flags(self) -> list[bool]:
        """Return the flags to exchange. Every rank returns the same number of flags."""
        if self._is_over:
            return []
        values = self._values()
        if not self._bits or values != self._digested:
            digest = zlib.crc32(repr(values).encode())
            bits = [bool(digest >> bit & 1) for bit in range(_BITS)]
            self._digested, self._bits = values, [*bits, *(not bit for bit in bits)]
        return self._bits

    def check(self, agreed: Sequence[bool]) -> None:
        """Warn on rank 0, at most once, if the ranks' digests differ. Collective.

        Args:
            agreed: for each of ``flags``, whether any rank has set it.
        """
        if not any(map(min, agreed[:_BITS], agreed[_BITS:])):
            return
        for groups in zip(*self._communicator.control.gather_objects(self._values())):
            name, number, first = groups[0]
            keys = [key for key, value in first.items() if any(group.get(key) != value for *_, group in groups)]
            if keys:
                self._is_over = True
                if self._communicator.everyone.rank == 0:
                    self._warn(name, number, [{key: group.get(key) for key in keys} for *_, group in groups])
                return

    @staticmethod
    def _warn(name: str, number: int, ranks: list[dict[str, Any]]) -> None:
        values = (
            f"{', '.join(f'{key}={value!r}' for key, value in group.items())} on rank {rank}"
            for rank, group in enumerate(ranks)
        )
        warnings.warn(
            f"Parameter group {number} of {name} has different hyperparameters on different ranks: "
            f"{'; '.join(values)}. Each rank updates its shards with its own values: set the same values on every "
            "rank, and let schedulers such as ReduceLROnPlateau monitor a value that is reduced over ranks "
            "(self.log(..., sync_dist=True)).",
            stacklevel=2,
        )

    def _values(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Each group's optimizer, its number in that optimizer, and its hyperparameters by name."""
        living = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        return [
            (type(optimizer).__name__, number, {key: _comparable(value) for key, value in group.items()})
            for optimizer in living
            for number, group in enumerate(optimizer.param_groups)
        ]


def _comparable(value: Any) -> Any:
    """A number or string; a tuple of them, such as ``betas``; None for anything else, such as parameters."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return float(value)  # 1 and 1.0 are equal
    if isinstance(value, Tensor):  # reading a device's tensor would wait for the device
        return float(value) if value.dim() == 0 and value.device.type == "cpu" else None
    return tuple(map(_comparable, value)) if isinstance(value, tuple) else None


# -- the optimizers of an engine ---------------------------------------------------------------------------------------


class Optimizers:
    """The optimizers that update the parameters of one engine, which their masters see as an ``OptimizedEngine``.

    Args:
        seed: for stochastic rounding; the same on every rank.
        check: raises an error if user code has changed parameters so that an update would not train them.

    Attributes:
        masters: those of each optimizer, in the order in which the optimizers were given.
        steps: the number of updates since the engine's counters were reset.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: list[Bucket],
        shared: SharedByBuckets,
        seed: int,
        check: Callable[[], None],
    ) -> None:
        self.buckets, self.communicator, self.seed = buckets, shared.communicator, seed
        self.background, self.ledger = shared.updates, shared.ledger
        self._config, self._check = config, check
        self.masters: list[Masters] = []
        self._members: list[list[int]] = []  # ids of the parameters in each group
        self.steps = self._updates = 0
        self._is_updating = False

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
        before, known = self.masters, {masters.optimizer: masters for masters in self.masters}
        self.masters = [known.get(optimizer) or masters_of(optimizer, self) for optimizer in optimizers]
        if self.communicator.size > 1 and self.communicator.everyone.rank == 0:
            for optimizer in (each for each in optimizers if each not in known):
                warn_of_unknown(optimizer, self._config)
        gone = [masters for masters in before if masters not in self.masters]
        if gone:
            self.background.synchronize()  # a removed optimizer's update may still be running
        for masters in gone:
            masters.close(None)
        self._give_owners()

    def before_forward(self) -> None:
        """Before a step, recover from a failed update, and reshard for parameters that were added to an optimizer."""
        self.recover()
        if torch.is_grad_enabled():  # not in evaluation, where some ranks may have no batch
            self._give_owners_to_added()

    def _give_owners_to_added(self) -> None:
        if self._members_of_groups() != self._members:  # changed by ``add_param_group``, for example
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
            self.background.synchronize()
            give_owners(late, self.buckets, self.masters)
        self._members = self._members_of_groups()  # only now: what was refused is refused again

    def _check_not_divided(self, optimizers: Iterable[Optimizer]) -> None:
        slots = [slot for bucket in self.buckets for slot in slots_of(bucket)]
        check_not_divided(optimizers, self._config, [(slot.name, slot.parameter, slot.share) for slot in slots])

    def _members_of_groups(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for optimizer in self.alive for group in optimizer.param_groups]

    # -- updates ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Mark the start of an update: until ``updated`` is called, only some master weights may have been updated.

        Raises:
            RuntimeError: if parameters with gradients were added to an optimizer that needs them whole, or if the
                module's parameters were replaced.
        """
        self._check()
        self._give_owners_to_added()
        self._is_updating = True

    def updated(self, buckets: list[Bucket]) -> None:
        """Count an update, which may still run in the background, and call ``show`` for its buckets."""
        self.steps += 1
        self._updates += 1
        self._is_updating = False
        self.show(buckets)

    def show(self, buckets: list[Bucket]) -> None:
        """After the masters of these buckets have changed, gather again those of them that are currently gathered."""
        changed = set(buckets)
        for bucket in (bucket for bucket in self.buckets if bucket in changed):
            bucket.refresh()
            if not self._config.overlap:
                bucket.wait()

    @property
    def updates(self) -> int | None:
        """Number of updates of the master weights; None during an update, and after a failed update."""
        return None if self._is_updating or self.has_failed_update else self._updates

    @property
    def has_failed_update(self) -> bool:
        updates = [bucket.update for bucket in self.buckets if bucket.update is not None]
        return any(update.done() and update.exception() is not None for update in updates)

    def finish_updates(self) -> None:
        """Wait for background work. After a failed update, raise its error at every call."""
        self.background.synchronize()
        for bucket in self.buckets:
            if bucket.update is not None:
                bucket.update.result()
