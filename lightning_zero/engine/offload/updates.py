"""Updates of masters that are kept elsewhere: one bucket after another, in a thread, while the device computes.

(Ren et al., "ZeRO-Offload", ATC 2021, section 4.3: what waits there for the whole backward and the whole update is here
done bucket by bucket.)
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.offload.states import DiskStates
from lightning_zero.engine.offload.swap import stream
from lightning_zero.engine.settling import Work
from lightning_zero.engine.streams import own_stream


class Updates:
    """A thread that updates masters, in the order in which they are given to it.

    Args:
        overlap: False lets ``optimizer.step`` wait until all is done.
        gradients: whether gradients are kept in the host's memory.
    """

    def __init__(self, overlap: bool = True, gradients: bool = False) -> None:
        self.overlap, self.gradients = overlap, gradients
        self._copier: Updates | None = None  # this thread may be waiting for what that one brings
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._streams: list[DiskUpdate] = []

    def submit(self, act: Callable[[], None]) -> Work:
        """Do something when all before it is done; who needs it waits for it."""
        work = Work(tells=True)

        def run() -> None:
            with suppress(Exception), work:  # the work tells who waits for it
                act()

        self._put(run)
        return work

    def to_host(self, gradients: Tensor | dict[int, Tensor]) -> tuple[Tensor | dict[int, Tensor], Work]:
        """Copy gradients to the host's memory; where they will be, and what ends when they are there."""
        sources = list(gradients.values()) if isinstance(gradients, dict) else [gradients]
        device = sources[0].device if sources else torch.device("cpu")
        targets = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device.type != "cpu", device="cpu") for t in sources]

        def copy() -> None:
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)

        self._copier = self._copier or Updates()
        arrival = self._copier.submit(beside(device, copy))
        return dict(zip(gradients, targets)) if isinstance(gradients, dict) else targets[0], arrival

    def stream(self, states: Sequence[DiskStates]) -> DiskUpdate:
        """Begin to read what lies on a disk, to be updated in this order."""
        update = DiskUpdate(states)
        self._streams = [*(each for each in self._streams if each.waiting), update]
        self._put(update.run)
        return update

    def _put(self, run: Callable[[], None]) -> None:
        if self._thread is None:
            # One that the interpreter does not wait for when it ends: it may be waiting for a gradient.
            self._thread = Thread(target=_work, args=(self._queue,), name="lightning_zero-update", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
            _alive.add(self)
        self._queue.put(run)

    def close(self) -> None:
        """Finish what is there to be done, drop what waits for more, and end the thread."""
        for update in self._streams:
            update.drop()
        if self._copier is not None:
            self._copier.close()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None


_alive: weakref.WeakSet[Updates] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # a thread that computes when the interpreter is taken down takes the process down
    for updates in list(_alive):
        updates.close()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    _leave_a_core_to_training()
    while (run := queue.get()) is not None:
        run()
        del run  # with the gradients that it holds


P = ParamSpec("P")
_GIVEN: Future[Any] = Future()
_GIVEN.set_result(None)

OnPiece = Callable[[int, int, dict[str, Tensor]], None]
"""Changes the elements ``[start, stop)`` of a bucket's states, given by name, in place."""


class DiskUpdate:
    """An update of states on a disk: pieces come and go through memory, each when its bucket's gradient is there.

    Args:
        states: in the order in which their gradients come.
    """

    def __init__(self, states: Sequence[DiskStates]) -> None:
        self._states, self._lock = states, Lock()
        self._acts: dict[DiskStates, Future[OnPiece | None]] = {each: Future() for each in states}
        self._all = Work(tells=True, cut_short=self.drop)
        self._shown = {each: Work(tells=True, settles=False) for each in states}
        self._written = {each: Work(tells=True, settles=False) for each in states}

    def give(self, states: DiskStates, act: OnPiece | None, *, until_written: bool = False) -> Work | None:
        """Say what is done with the pieces of one bucket; None for nothing. To be called for each of them.

        Returns:
            What ends when that is done; with ``until_written`` when it is on the disk. All is there when ``settle``
            comes back. None where another thread has dropped them meanwhile, which settles: then it is not done, and
            another ``DiskUpdate`` is to do it.
        """
        with self._lock:
            if self._acts[states].done():
                return None
            self._acts[states].set_result(act)
        return (self._written if until_written else self._shown)[states]

    @property
    def waiting(self) -> list[DiskStates]:
        """For whom nothing was given yet."""
        return [states for states, act in self._acts.items() if not act.done()]

    def drop(self) -> None:
        """Do nothing with those for whom nothing was given. In any thread."""
        for states in self.waiting:
            self.give(states, None)

    def run(self) -> None:
        """In another thread."""
        try:
            places = [(states, index) for states in self._states for index in range(len(states.pieces()))]
            pieces = [piece for states in self._states for piece in states.pieces()]

            def on_piece(number: int, memory: memoryview) -> None:
                states, index = places[number]
                act = self._acts[states].result()
                if act is not None:
                    act(*states.range_of(index), states.views(index, memory))
                if places[number + 1 : number + 2] != [(states, index + 1)]:
                    self._shown[states].end()
                    self._acts[states] = _GIVEN  # what was given holds gradients

            left = Counter(states for states, _ in places)

            def on_written(number: int) -> None:
                states, _ = places[number]
                left[states] -= 1
                if not left[states]:
                    self._written[states].end()

            if pieces:
                ring = self._states[0].swap.ring(max(piece.nbytes for piece in pieces))
                stream(pieces, on_piece, ring, on_written=on_written)
            error = None
        except BaseException as raised:
            error = raised
        for work in (*self._shown.values(), *self._written.values(), self._all):
            work.end(error)


def _leave_a_core_to_training() -> None:
    """Of the cores that this process may use the first is for what feeds the device."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 2:
            os.sched_setaffinity(0, cores[1:])  # of this thread, and of those that its kernels start


def beside(device: torch.device, act: Callable[P, None]) -> Callable[P, None]:
    """What does something on a stream of its own, once the device has done all that it was told to do so far.

    So that what it copies to and from the host passes by what the device computes meanwhile.
    """
    if device.type == "cpu":
        return act
    ready = torch.accelerator.current_stream(device).record_event()

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        stream = own_stream(device)
        stream.wait_event(ready)
        with stream:
            act(*args, **kwargs)
        stream.synchronize()

    return run


class Update(NamedTuple):
    """An optimizer's update, of one parameter group, as it would be now: schedulers and scalers change it for the next.

    Attributes:
        kind: the optimizer's class, or one like it.
        attributes: what it has.
        group: the options of the group.
        dtype: of counts of steps.
    """

    kind: type[Optimizer]
    attributes: dict[str, Any]
    group: dict[str, Any]
    dtype: torch.dtype

    @classmethod
    def of(cls, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> Update:
        """As suits the CPU.

        Args:
            device: where the module computes. Where that is the CPU, the kernel is the one that it would be anyway.
        """
        options = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        if device.type != "cpu" and options.get("fused", False) is None and not options.get("foreach"):
            options["fused"] = type(optimizer).__name__ in _FUSED
        attributes = {
            **optimizer.__dict__,
            # whoever hooks in is called once for the whole step, and by nobody else
            "_optimizer_step_pre_hooks": OrderedDict(),
            "_optimizer_step_post_hooks": OrderedDict(),
        }
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        return cls(_without_hooks(type(optimizer)), attributes, options, dtype)

    def act(self, values: Tensor, gradient: Tensor | None, state: dict[str, Any]) -> dict[str, Any]:
        """Update one tensor as the optimizer's ``step`` does, and nothing else. In any thread.

        Args:
            values: they are changed in place.
            gradient: None for none.
            state: what the optimizer knows of the tensor, which is changed in place.

        Returns:
            The state: what there was, or what the optimizer has made.
        """
        is_new = not state
        parameter = nn.Parameter(values)
        parameter.grad = _beside_it(gradient, values) if gradient is not None else None
        alone = object.__new__(self.kind)
        alone.__dict__ = {
            **self.attributes,
            "param_groups": [{**self.group, "params": [parameter]}],
            "state": defaultdict(dict, {parameter: state} if state else {}),
        }
        _unhooked(self.kind.step)(alone)
        after = alone.state[parameter]
        if is_new:  # counts of steps are in the default dtype, which another thread may have set for its forward
            counts = {key: value for key, value in after.items() if isinstance(value, Tensor) and value.dim() == 0}
            after |= {key: value.to(self.dtype) for key, value in counts.items() if value.is_floating_point()}
        return after

    def fields(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """What the optimizer keeps of each element of a tensor of a dtype, by trying it on one."""
        tried = torch.zeros(1, dtype=dtype, device="cpu")
        state = self.act(tried, torch.zeros_like(tried), {})
        return {key: value.dtype for key, value in state.items() if isinstance(value, Tensor) and value.shape == (1,)}


def fields_by_parameter(
    optimizers: Sequence[Optimizer],
) -> Callable[[Iterable[Tensor], torch.dtype], dict[str, torch.dtype]]:
    """A function that says what optimizers will keep of each element of some parameters, with masters of a dtype."""
    group_of = {
        id(parameter): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    known: dict[tuple[int, torch.dtype], dict[str, torch.dtype]] = {}

    def fields_of(parameters: Iterable[Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
        fields: dict[str, torch.dtype] = {}
        for optimizer, group in {id(found[1]): found for p in parameters if (found := group_of.get(id(p)))}.values():
            key = id(group), dtype
            known[key] = known.get(key) or Update.of(optimizer, group, torch.device("cpu")).fields(dtype)
            fields.update(known[key])
        return fields

    return fields_of


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's ``step`` without what torch puts around it when one is made, which calls all hooks on steps."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _without_hooks(kind: Any) -> type[Optimizer]:
    """An optimizer's class; where its ``step`` calls that of a class it derives from, one to which this is unhooked."""
    if _unhooked(kind.step).__module__.startswith("torch.optim"):
        return kind  # which calls no other
    return _deriving(kind, tuple(base for base in kind.__mro__[1:] if hasattr(vars(base).get("step"), "hooked")))


@cache
def _deriving(kind: Any, hooked: tuple[Any, ...]) -> Any:
    # each comes before the class it derives from in the order in which ``super()`` goes
    between = [type(base.__name__, (base,), {"step": _unhooked(base.step)}) for base in hooked]
    return type(kind.__name__, (kind, *between), {}) if between else kind


def _beside_it(gradient: Tensor, values: Tensor) -> Tensor:
    if gradient.device == values.device:
        return gradient.to(values.dtype)
    # torch keeps pinned memory that was given back for the next who asks
    host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True, device="cpu")
    host.copy_(gradient, non_blocking=True)
    torch.accelerator.current_stream(gradient.device).synchronize()
    return host.to(values.dtype)


_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Those of which torch has a kernel for the CPU that does all of an update in one pass over memory."""
