"""Collectives on flat buffers in a group of ranks with one transport; and ``Pending``, a collective in flight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lightning_zero.engine.comm.codec import Codec
from lightning_zero.engine.comm.counters import Counters, Link
from lightning_zero.engine.comm.failures import Watch, explained
from lightning_zero.engine.comm.transport import Ranges, Started, Transport


class Pending:
    """A collective in flight.

    Args:
        what: a description of the collective, for error messages.
        started: what the transport returned when it started the collective; None if there is nothing to wait for.
        watch: detects failed waits and deadlocks; None if no other process exists.
    """

    def __init__(self, what: str, started: Started | None = None, watch: Watch | None = None) -> None:
        self._what, self._watch = what, watch
        self._waits, self._buffers, self._finish, self._ends_by_itself = started or Started([], [])
        self._ordinal = watch.begin(what) if watch is not None else 0

    def wait(self) -> Any:
        """Make the current stream (NCCL) or thread (Gloo) wait for the collective, and return its result.

        Raises:
            RuntimeError: if another rank failed, or did not take part within the process group's timeout.
        """
        if self._waits:
            with self._watch.waiting(self._what, self._ordinal) if self._watch is not None else nullcontext():
                for wait in self._waits:
                    wait()
        self._waits, self._buffers = [], []  # before ``finish``, which may need memory
        return self._finish() if self._finish is not None else None

    def let_go(self) -> None:
        """Discard the result, but let peers complete the collective. Garbage collection may call this in any thread."""
        if self._waits and not self._ends_by_itself:
            self.wait()


def end_with(owner: Any, running: list[Pending]) -> None:
    """Finish the running collectives when their owner is deleted, since other ranks depend on them."""
    weakref.finalize(owner, _let_go, running).atexit = False


def _let_go(running: list[Pending]) -> None:
    for collective in running:
        collective.let_go()


class BucketCollectives:
    """Collectives on flat buffers between the ranks along some dimensions of the mesh.

    Args:
        transport: the transport between these ranks; None if there is only one rank.
        across: the ranks on other machines with which this rank itself exchanges slices, numbered along these
            dimensions.
        watch: detects failed waits and deadlocks; None if no other process exists.
        link: the link under which all slices are counted if ``across`` is empty; None for the counters' default.
        note: for simulated ranks, called with the bytes of each collective that begins; returns a function that is
            called when this rank waits for the collective.
    """

    def __init__(
        self,
        transport: Transport | None,
        counters: Counters,
        across: Sequence[int] = (),
        watch: Watch | None = None,
        link: Link | None = None,
        note: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        self._transport, self._counters, self._across, self._watch = transport, counters, across, watch
        self._link, self._note = "within" if across else link, note

    def all_gather(self, full: Tensor, ranges: Ranges, what: str) -> Pending:
        """See ``Transport.all_gather``; ``what`` names the collective in error messages."""
        if self._transport is None:
            return Pending(what)
        self._count("all_gather", full.numel(), ranges, lambda numel: numel * full.itemsize)
        return self._begin(what, full.nbytes, self._transport.all_gather, full, ranges)

    def reduce_scatter(self, flat: Tensor, ranges: Ranges, codec: Codec, what: str) -> Pending:
        """Sum a flat buffer over ranks; ``wait()`` returns this rank's slice of the sum (1-D), in the buffer's dtype.

        Args:
            flat: 1-D and contiguous. Its contents may be overwritten.
            codec: encodes the values to be sent. Received values are decoded, and added up in the buffer's dtype.
            what: a description of what is summed, for error messages.
        """
        assert self._transport is not None, "with one rank, gradients are not reduced"

        def encoded(numel: int) -> int:
            return codec.size(numel) * codec.dtype.itemsize

        is_encoded = self._transport.encodes_within
        within = encoded if is_encoded else lambda numel: numel * flat.itemsize
        self._count("reduce_scatter", flat.numel(), ranges, encoded, within)
        return self._begin(what, encoded(flat.numel()), self._transport.reduce_scatter, flat, ranges, codec)

    def _begin(self, what: str, nbytes: int, begin: Callable[..., Started], *args: Any) -> Pending:
        """Begin a collective that sends a buffer of this size."""
        if self._watch is not None:
            self._watch.check_process(what)
        with explained(what):
            started = begin(*args)
            if self._note is not None:
                started.waits.append(self._note(nbytes))
            return Pending(what, started, self._watch)

    def reduction_bytes(self, flat: Tensor, ranges: Ranges, codec: Codec) -> int:
        assert self._transport is not None
        return self._transport.reduction_bytes(flat, ranges, codec)

    def _count(
        self,
        kind: str,
        numel: int,
        ranges: Ranges,
        nbytes: Callable[[int], int],
        nbytes_within: Callable[[int], int] | None = None,
    ) -> None:
        """Count slices that cross between machines under the link "across", and the rest under ``_link``.

        Args:
            nbytes: the bytes of a number of elements.
            nbytes_within: the bytes of elements that do not cross, if these have another size.
        """
        crossing = [stop - start for start, stop in (ranges[rank] for rank in self._across)]
        rest = numel - sum(crossing)
        if rest < numel:
            self._counters.add(kind, sum(crossing), sum(map(nbytes, crossing)), "across")
        self._counters.add(kind, rest, (nbytes_within or nbytes)(rest), self._link)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
