"""A bucket before its parameters are sharded: memory for their full values, and the sharding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_zero.engine.offload.states import DiskStates, Swap
from lightning_zero.engine.plan.source import Source
from lightning_zero.engine.state.bucket import Bucket, SharedByBuckets
from lightning_zero.engine.state.buffer import without_memory
from lightning_zero.engine.state.residency import Medium, ResidencyPlan, take_residence
from lightning_zero.engine.state.slot import make_sharded
from lightning_zero.engine.tensor.sharded_tensor import flat_range


class UncutBucket:
    """A ``Bucket`` before its parameters are sharded; the constructor of ``Bucket`` describes the other arguments.

    Args:
        parameters: the module's own, in the order of the layout; unchanged until ``cut``.
        plan: where this rank's shard will be.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        plan: ResidencyPlan,
        *,
        number: int,
        unit_name: str,
        shared: SharedByBuckets,
    ) -> None:
        self.parameters, self.plan, self.layout = parameters, plan, plan.layout
        self._number, self._unit_name, self._shared = number, unit_name, shared
        self._states: DiskStates | None = None
        self._flat: Tensor | None = None  # full values, allocated at the first use
        # Created early, when the module has no other buffers yet: a new tensor has memory for a moment.
        self._full = without_memory(self.layout.padded_numel, plan.compute_dtype, plan.device)

    @property
    def _label(self) -> str:
        return f"{self._unit_name} {self._number}"

    def reserve(self, swap: Swap, fields: Mapping[str, torch.dtype]) -> None:
        """Reserve disk space for the master weights and their optimizer states, if the plan puts them on a disk.

        Raises:
            OSError: if the disk lacks space.
        """
        if self.plan.masters is Medium.DISK:
            self._states = self.plan.reserve(swap, self._label, fields)

    @property
    def is_opened(self) -> bool:
        """Whether memory for the full values is allocated."""
        return self._flat is not None

    def room(self, index: int) -> Tensor:
        """Memory for the full values of a parameter, in its shape, to be filled before ``cut``."""
        segment = self.layout.segments[index]
        return self._opened()[segment.start : segment.stop].view(segment.shape)

    def _opened(self) -> Tensor:
        if self._flat is None:
            dtype = self.parameters[0].dtype
            self._flat = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.plan.device)
            for gap in self._flat.split_with_sizes(self.layout.sizes())[1::2]:
                gap.zero_()
        return self._flat

    def cut(self, sources: list[Source]) -> Bucket:
        """Shard the parameters: each becomes a sharded tensor. Collective. To be called once.

        Args:
            sources: of the parameters' values; where rank 0 has none, the values were written to ``room``.
        """
        flat, communicator, plan = self._opened(), self._shared.communicator, self.plan
        low, high = self.layout.shard_range(communicator.rank)
        needed = (0, len(flat)) if plan.is_replicated else (low, high)
        run_goes_on = False
        from_first: list[slice] = []  # maximal runs of values that rank 0 broadcasts
        for segment, source in zip(self.layout.segments, sources):
            start, stop = segment.start, segment.stop
            if source.everywhere:
                start = min(max(start, needed[0]), stop)
                stop = max(min(stop, needed[1]), start)
                run_goes_on = False
            else:
                begin = from_first.pop().start if run_goes_on else start
                from_first.append(slice(begin, stop))
                run_goes_on = True
            if source.values is not None and (source.everywhere or communicator.rank == 0):
                begin, end = start - segment.start, stop - segment.start
                flat[start:stop].copy_(flat_range(source.values.detach(), begin, end))
        for run in from_first:
            communicator.broadcast(flat[run])
        residency = take_residence(plan, flat[low:high], self._states, self._label, self._shared.ledger)
        full = self._full
        if plan.masters is Medium.BUFFER:
            full = flat
        elif plan.is_replicated:
            full.untyped_storage().resize_(full.numel() * full.element_size())
            full.copy_(flat)
        self._flat = None
        bucket = Bucket(
            self.parameters,
            residency,
            full,
            number=self._number,
            unit_name=self._unit_name,
            shared=self._shared,
        )
        make_sharded(bucket, self.parameters)
        return bucket
