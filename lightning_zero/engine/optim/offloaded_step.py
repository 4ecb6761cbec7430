"""The step of an optimizer whose masters are offloaded: each bucket is updated in the background."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.background_work import BackgroundWork
from lightning_zero.engine.offload.states import MASTERS, PARAMETERS
from lightning_zero.engine.offload.updates import DiskUpdate, Update, on_own_stream
from lightning_zero.engine.optim.kinds import copied
from lightning_zero.engine.state.bucket import Bucket

if TYPE_CHECKING:
    from lightning_zero.engine.optim.master import Master


class OffloadedStep:
    """Passes the buckets of one optimizer to the thread that updates them, and reads ahead from the disk."""

    def __init__(self) -> None:
        self._streams: dict[Bucket, DiskUpdate] = {}

    def read_ahead(self, buckets: Iterable[Bucket]) -> None:
        """Begin to read what of these buckets lies on a disk."""
        on_disk = {
            each: each.states
            for each in buckets
            if each.states is not None
            and (each not in self._streams or each.states not in self._streams[each].waiting)  # it was cut short
        }
        for bucket in on_disk:
            assert bucket.updates is not None
            self._streams |= dict.fromkeys(on_disk, bucket.updates.stream(list(on_disk.values())))
            break

    def drop(self) -> None:
        """Read nothing more for which no update was given."""
        for stream in self._streams.values():
            stream.drop()
        self._streams = {}

    def update(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        masters: Sequence[tuple[int, Master]],
        gradients: Mapping[Master, Any],
        *,
        is_early: bool,
        awaits_step: bool,
    ) -> None:
        """Let the masters of a bucket be updated in a thread, with the options that their groups have now.

        Args:
            masters: those of the bucket, each with the number of its group.
            gradients: of each, or what returns it.
            is_early, awaits_step: see ``BackgroundUpdate``.
        """

        def begin(shown: Tensor | None) -> BackgroundWork:
            act, device = _BucketUpdate(optimizer, bucket, masters, gradients, shown), bucket.full.device
            assert bucket.updates is not None
            if bucket.states is None:
                return bucket.updates.submit(on_own_stream(device, act.in_memory))
            act.on_what_is_empty()  # and in no piece
            on_disk = on_own_stream(device, act.on_disk)
            # without another place for the new values a gather will read them from the disk
            while (work := self._streams[bucket].give(bucket.states, on_disk, until_written=shown is None)) is None:
                self.read_ahead([bucket])
            return work

        bucket.update_in_background(begin, is_early=is_early, awaits_step=awaits_step)


class _BucketUpdate:
    """The update of one bucket's masters, in any thread."""

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: Bucket,
        masters: Sequence[tuple[int, Master]],
        gradients: Mapping[Master, Any],
        shown: Tensor | None,
    ) -> None:
        self._optimizer, self._shown = optimizer, shown
        self._wanted = [
            (Update.of(optimizer, optimizer.param_groups[number], bucket.full.device), master, gradients[master])
            for number, master in masters
            if master.is_here
        ]

    def in_memory(self) -> None:
        self._act(self._wanted)

    def on_what_is_empty(self) -> None:
        self._act([each for each in self._wanted if not each[1].tensor.numel()])

    def _act(self, wanted: list[Any]) -> None:
        for update, master, gradient in wanted:
            values = master.values()
            gradient = gradient() if callable(gradient) else gradient
            state = update.act(values, gradient, self._optimizer.state.get(master.tensor, {}))
            self._optimizer.state[master.tensor] = state
            self._show(master.range, values)

    def on_disk(self, start: int, stop: int, fields: dict[str, Tensor]) -> None:
        """Update the elements ``[start, stop)`` of the bucket's shard, whose masters and states are in ``fields``."""
        for update, master, gradient in self._wanted:
            low, high = max(start, master.range.start), min(stop, master.range.stop)
            if low >= high:
                continue
            inside, first = slice(low - start, high - start), master.range.start
            values = fields[MASTERS][inside]
            before = self._optimizer.state.get(master.tensor, {})
            known = {key: fields[key][inside] if key in fields else copied(value) for key, value in before.items()}
            whole = gradient() if callable(gradient) else gradient
            part = whole[low - first : high - first] if whole is not None else None
            after = update.act(values, part, known)
            for key in (key for key in after if key in fields and after[key] is not known.get(key)):
                fields[key][inside] = after[key]
            self._show(slice(low, high), values)
            if PARAMETERS in fields:
                fields[PARAMETERS][inside] = values
            if high == master.range.stop:  # only now, as all pieces have the same count of steps before
                self._optimizer.state[master.tensor] = {
                    key: master.stored(key) if key in fields else value for key, value in after.items()
                }

    def _show(self, part: slice, values: Tensor) -> None:
        if self._shown is not None:
            self._shown[part].copy_(values, non_blocking=True)
