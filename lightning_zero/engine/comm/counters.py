"""What an engine measures: its communication, the memory of its tensors, and the phases of its units."""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_zero.engine.comm.asynchronous import current_stream
from lightning_zero.engine.compat import is_profiling

Link = Literal["within", "across"]
"""Whether communication stays within one machine ("within") or may cross between machines ("across")."""


class Counters:
    """Counts of calls, elements and bytes, by kind of collective ("all_gather", "reduce_scatter", ...) and link.

    As in the ZeRO paper's analysis of communication (SC20, section 7), an all-gather counts all elements of the padded
    bucket once, although each rank sends and receives only (N - 1) / N of these elements.

    With ranks on several machines, slices that belong to ranks on this machine count as "within", all others as
    "across". In collectives with two levels, "across" counts only slices that this rank exchanges with other machines.
    """

    def __init__(self) -> None:
        self.link: Link = "across"
        self.calls: Counter[tuple[str, Link]] = Counter()
        self.elements: Counter[tuple[str, Link]] = Counter()
        self.bytes: Counter[tuple[str, Link]] = Counter()

    def add(self, kind: str, numel: int, nbytes: int, link: Link | None = None) -> None:
        """Count one call.

        Args:
            link: the link over which they are sent; by default ``self.link``.
        """
        key = kind, link or self.link
        self.calls[key] += 1
        self.elements[key] += numel
        self.bytes[key] += nbytes

    def clear(self) -> None:
        for counter in (self.calls, self.elements, self.bytes):
            counter.clear()


def summed(counter: Counter[tuple[str, Link]], by: Literal["kind", "link"]) -> dict[str, int]:
    """The counts by kind, summed over links; or by link, summed over kinds."""
    found: Counter[str] = Counter()
    for (kind, link), count in counter.items():
        found[kind if by == "kind" else link] += count
    return dict(found)


# -- phases ------------------------------------------------------------------------------------------------------------


_NOTHING = nullcontext()


class Phases:
    """Contexts of a unit's phases, labelled while a profiler runs, and timed while ``measures`` is set.

    If neither is the case, a phase costs only a function call and two comparisons.

    Attributes:
        measures: whether to time phases; set by a monitor.
    """

    def __init__(self, device: torch.device) -> None:
        self.measures = False
        self._device = device
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        # ((phase, unit), start event, end event) of phases whose end the device may not have reached yet
        self._ahead: deque[tuple[tuple[str, str], torch.Event, torch.Event]] = deque()

    def __call__(self, phase: str, unit: str, *, on_stream: bool = False) -> AbstractContextManager[Any]:
        """Return the context of one phase.

        Args:
            phase: for example ``"gather"``, ``"wait for gather"`` or ``"forward"``.
            unit: the unit's name; "" for the root unit.
            on_stream: whether to time the work on an accelerator's current stream, without waiting for the work.
        """
        if not self.measures and not is_profiling():
            return _NOTHING
        return self._around((phase, unit or "root"), on_stream)

    @contextmanager
    def _around(self, key: tuple[str, str], on_stream: bool) -> Iterator[None]:
        with label(*key) if is_profiling() else _NOTHING:
            stream = current_stream(self._device) if on_stream else None
            if not self.measures:
                yield
            elif stream is None:
                began = time.perf_counter()
                try:
                    yield
                finally:
                    self._seconds[key] += time.perf_counter() - began
            else:
                before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
                before.record(stream)
                yield
                after.record(stream)
                self._ahead.append((key, before, after))

    def take(self) -> dict[tuple[str, str], float]:
        """Return the seconds since the last call by (phase, unit), except for phases still running on the device."""
        while self._ahead and self._ahead[0][2].query():
            key, before, after = self._ahead.popleft()
            self._seconds[key] += before.elapsed_time(after) / 1000
        taken, self._seconds = self._seconds, defaultdict(float)
        return taken


def label(phase: str, unit: str) -> record_function:
    """A label for the profiler, such as ``zero::gather blocks.0``."""
    return record_function(f"zero::{phase} {unit or 'root'}")


# -- memory ------------------------------------------------------------------------------------------------------------


class Ledger:
    """Bytes that the engine holds, by category: those held now, and those held when their total was highest."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak: dict[str, int] = {}

    def add(self, category: str, nbytes: int) -> None:
        self.now[category] += nbytes
        if nbytes > 0 and self.now.total() > sum(self.peak.values()):
            self.peak = dict(self.now)

    def hold(self, tensor: Tensor, category: str) -> Tensor:
        """Count a tensor's memory until the tensor is deleted; return the tensor."""
        self.add(category, tensor.nbytes)
        weakref.finalize(tensor, self.add, category, -tensor.nbytes).atexit = False
        return tensor

    def reset_peak(self) -> None:
        self.peak = dict(self.now)
