"""Offloaded master weights and optimizer states: files on a disk, and updates in the background.

A file holds all states of a rank's shard of one bucket, one field after another: the masters, ``exp_avg``, and so on.
For its update the file is read into memory, where the masters are updated like those that stay there, and written back
(Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.2.2); meanwhile the next bucket's file is read.

Updates run bucket by bucket, while the device computes. In Ren et al., "ZeRO-Offload", ATC 2021, section 4.3, the
update starts after the whole backward pass, and training waits for the whole update. Here each bucket's update starts,
and is awaited, separately.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm.asynchronous import await_always, own_stream, synchronize
from lightning_zero.engine.comm.simulation import SameThread, SimulatedFile, Simulation
from lightning_zero.engine.compat import address_of, tree_map_only, without_hooks
from lightning_zero.engine.config import EngineConfig
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.io.disk import ALIGNMENT, aligned, aligned_memory, huge_memory
from lightning_zero.io.swap import BUFFERS, Buffers, SwapFile, Turn

MASTERS, PARAMETERS = "the masters", "the parameters"
"""Names of fields that are not optimizer states: the master weights, and their copy in the compute dtype."""


class Swap:
    """The files of an engine's buckets, in one folder, and buffers in which they are updated.

    With a simulation, no files are created, and a range of numbers takes the place of memory.

    Attributes:
        allocate: returns memory of a number of bytes, for a transfer.
    """

    def __init__(self, folder: str, simulation: Simulation | None = None) -> None:
        self._folder, self._files, self._simulation = folder, weakref.WeakSet[SwapFile](), simulation
        self.allocate: Callable[[int], Any] = aligned_memory if simulation is None else range
        self.buffers = Buffers(huge_memory if simulation is None else range)
        self.reader = ThreadPoolExecutor(2, "lightning_zero-fetch") if simulation is None else SameThread()

    def open(self) -> SwapFile:
        """Create an empty file."""
        if self._simulation is not None:
            return SimulatedFile(self._simulation.moves)  # type: ignore[return-value]
        file = SwapFile(self._folder)
        self._files.add(file)
        return file

    def close(self) -> None:
        """End the threads, free the buffers and close all files."""
        self.reader.shutdown()
        self.buffers.free.clear()
        for file in list(self._files):
            file.close()


class DiskStates:
    """Tensors of equal length, called fields, stored in a file one after another.

    Args:
        dtypes: the dtypes of the first fields, by name.

    Attributes:
        fields: the position in the file and the dtype of each field, by name.

    Raises:
        OSError: if the disk lacks space.
    """

    def __init__(self, swap: Swap, name: str, numel: int, dtypes: Mapping[str, torch.dtype]) -> None:
        self.swap, self.name, self.numel = swap, name, numel
        self.fields: Mapping[str, tuple[int, torch.dtype]] = {}
        self.file = swap.open()
        self.add_fields(dtypes)

    def add_fields(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Add missing fields, filled with zeros. Raises an OSError, and changes nothing, if the disk lacks space."""
        fields, nbytes = dict(self.fields), self.file.nbytes
        for field, dtype in dtypes.items():
            if field not in fields:
                fields[field], nbytes = (nbytes, dtype), nbytes + aligned(self.numel * dtype.itemsize)
        if nbytes > self.file.nbytes:
            self.file.reserve(nbytes)
        self.fields = fields

    def change(self, act: Callable[[dict[str, Tensor]], None], turn: Turn) -> None:
        """Change all fields: ``act`` gets them as 1-D tensors, which it changes in place. See ``Buffers.change``."""

        def change(memory: memoryview | range) -> None:
            act({key: _over(memory, start, self.numel, dtype) for key, (start, dtype) in self.fields.items()})

        self.swap.buffers.change(self.file, change, turn)

    def read(self, field: str, start: int, stop: int) -> Tensor:
        """Read the elements ``[start, stop)`` of a field into new memory."""
        memory, position, elements = self._around(field, start, stop)
        self.file.read(memory, position)
        # small values are copied, since a process can map only about 65,000 pieces of memory
        return elements.clone() if elements.nbytes < 2**20 else elements

    def write(self, field: str, start: int, values: Tensor) -> None:
        """Write values to the elements of a field from ``start`` on."""
        memory, position, elements = self._around(field, start, start + values.numel())
        if elements.nbytes < len(memory):  # preserve the bytes around the elements
            for edge in {0, len(memory) - ALIGNMENT}:
                self.file.read(memory[edge : edge + ALIGNMENT], position + edge)
        elements.copy_(values)
        self.file.write(memory, position)

    def _around(self, field: str, start: int, stop: int) -> tuple[Any, int, Tensor]:
        """Memory for elements, extended to aligned positions; its position in the file; the elements."""
        position, dtype = self.fields[field]
        first, last = (number * dtype.itemsize for number in (start, stop))
        begin = first // ALIGNMENT * ALIGNMENT
        memory = self.swap.allocate(aligned(last) - begin if stop > start else 0)
        return memory, position + begin, _over(memory, first - begin, stop - start, dtype)

    def tensor(self, field: str, part: slice, shape: torch.Size | None = None) -> LazyTensor:
        """A range of a field as a lazy tensor: each use reads values from the disk, and each write goes to the disk."""

        def read(low: int, high: int) -> Tensor:
            return self.read(field, part.start + low, part.start + high)

        write, (_, dtype) = partial(self.write, field, part.start), self.fields[field]
        shape = torch.Size([part.stop - part.start]) if shape is None else shape
        return LazyTensor(f"{field} of {self.name}", shape, dtype, read, write=write)


def _over(memory: memoryview | range, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D tensor over memory, from byte ``start`` on."""
    if not numel or isinstance(memory, range):  # ``frombuffer`` refuses to make an empty tensor
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)


# -- updates -----------------------------------------------------------------------------------------------------------


class Updates:
    """Threads that update master weights, one at a time and in the order of calls.

    There are several if states are on a disk, so that some are read and written while others are updated. With a
    simulation, updates run at once, in the calling thread.
    """

    def __init__(
        self, overlap: bool = True, gradients: bool = False, threads: int = 1, simulation: Simulation | None = None
    ) -> None:
        self._simulation, self._threads = simulation, threads
        self.overlap = overlap and simulation is None  # if False, ``optimizer.step`` waits until all updates are done
        self.gradients = gradients  # whether gradients are kept in host memory
        self._copier: Updates | None = None  # another thread, since updates may wait for its copies
        self._executor: Executor | None = None
        self._last: Turn | None = None
        self._failure: list[BaseException] = []  # the first error that ``synchronize`` has not raised yet

    @classmethod
    def of(cls, config: EngineConfig, simulation: Simulation | None) -> Updates:
        """Make the updates for an engine's options."""
        offload = config.offload
        if offload is None:
            return cls(simulation=simulation)
        threads = BUFFERS if offload.optimizer == "nvme" else 1
        return cls(config.overlap and offload.overlap, offload.gradients is not None, threads, simulation)

    def submit(self, act: Callable[..., None], states: DiskStates | None = None) -> Future[None]:
        """Run a function in a thread, after all functions submitted earlier; return a future for its end.

        Args:
            states: states on a disk, which the function changes; see ``DiskStates.change``.
        """
        turn = Turn(self._last)

        def run() -> None:
            try:
                with self._simulation.on_host() if self._simulation is not None else nullcontext():
                    if states is not None:
                        states.change(act, turn)
                        return
                    with turn:
                        act()
            except BaseException as error:
                if not self._failure:
                    self._failure.append(error)
                raise

        try:
            if self._executor is None:
                # The interpreter waits for threads at exit: one that computes meanwhile would crash the process.
                is_real = self._simulation is None
                self._executor = ThreadPoolExecutor(self._threads, "lightning_zero-update") if is_real else SameThread()
            work = self._executor.submit(run)
            await_always(work)
            self._last = turn
        except BaseException:  # Ctrl-C, after which the function may be in the queue
            self.close()
            raise
        return work

    def synchronize(self) -> None:
        """Wait for all background work, also of others; raise the error if an update has failed since the last call."""
        synchronize()
        if self._failure:
            raise self._failure.pop()

    def to_host(self, source: Tensor) -> tuple[Tensor, Future[None]]:
        """Start to copy gradients to host memory; return the copy, and the work to wait for before reading it."""
        pinned = source.device.type != "cpu"
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned, device="cpu")

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        self._copier = self._copier or Updates()
        return target, self._copier.submit(on_own_stream(source.device, copy))

    def close(self) -> None:
        """Finish all updates, and end the threads."""
        if self._copier is not None:
            self._copier.close()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


P = ParamSpec("P")


def on_own_stream(device: torch.device, act: Callable[P, None]) -> Callable[P, None]:
    """Wrap a function to run on a separate stream, after the work now queued on the device's current stream.

    The function's copies to and from the host then overlap with the device's later computation.
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


def place_of(tensor: Tensor) -> Any:
    """Identifies the memory of a tensor, also of a fake one."""
    return address_of(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()


def of_no_parameter(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of ``optimizer.state`` that belong to no parameter, such as the step count of a whole optimizer."""
    # ``dict`` first, since background updates may add parameters' states meanwhile
    return {key: value for key, value in dict(states).items() if not isinstance(key, Tensor)}


class Update(NamedTuple):
    """An optimizer's update for one parameter group. User hooks are not called: they run once per optimizer step."""

    kind: type[Optimizer]
    unhooked: type[Optimizer]  # a subclass of ``kind``, whose ``step`` calls no hooks
    attributes: dict[str, Any]  # the optimizer's attributes; of its ``state``, only the entries of no parameter
    group: dict[str, Any]  # a copy of the group's options, which schedulers may change later
    dtype: torch.dtype  # dtype of step counts

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        group: dict[str, Any],
        device: torch.device,
        own: dict[Any, Any],
    ) -> Update:
        """Make an update that runs on the CPU.

        For a module on another device, tensors among the options are copied to the CPU, a fused kernel is the default,
        and ``capturable`` is left out, which the CPU refuses.

        Args:
            device: the module's device.
            own: the result of ``of_no_parameter``.
        """

        def kept(value: Any) -> Any:
            """A copy of a tensor, here rather than in a kernel of the CPU, which does not wait for the device."""
            if not isinstance(value, Tensor):
                return value
            return value.to("cpu", copy=True) if device.type != "cpu" else value.clone()

        kind: Any = type(optimizer)
        options = {key: kept(value) for key, value in group.items()}
        if device.type != "cpu" and options.get("fused", False) is None and not options.get("foreach"):
            options["fused"] = kind.__name__ in _FUSED and not any(p.is_complex() for p in group["params"])
        if device.type != "cpu" and options.get("capturable"):
            options["capturable"] = False
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        attributes = {key: kept(value) for key, value in vars(optimizer).items()}
        attributes["state"] = tree_map_only(Tensor, kept, own)
        return cls(kind, _without_hooks(kind), attributes, options, dtype)

    def act(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        states: Sequence[dict[str, Any]],
        leaf: Callable[[Tensor], nn.Parameter],
    ) -> list[dict[str, Any]]:
        """Update tensors and their states in place, as one ``step`` does; return the states. For any thread.

        Args:
            leaf: makes the parameter that ``step`` updates from a tensor.
        """
        parameters = [leaf(each) for each in values]
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = _on_device_of(gradient, parameter) if gradient is not None else None
        # copies, since the optimizer's own ``step`` also changes these entries, and must do so only once
        own = tree_map_only(Tensor, Tensor.clone, self.attributes["state"])
        alone = object.__new__(self.unhooked)
        alone.__dict__ = {
            **self.attributes,
            "param_groups": [{**self.group, "params": parameters}],
            "state": defaultdict(dict, {**own, **{p: state for p, state in zip(parameters, states) if state}}),
        }
        self.unhooked.step(alone)  # not the instance's ``step``, which schedulers replace
        for parameter, each in zip(parameters, values):
            if place_of(parameter) != place_of(each):  # ``step`` has replaced its ``data``
                each.copy_(parameter.detach())
        after = [alone.state[parameter] for parameter in parameters]
        for each, before in zip(after, states):
            if before:
                continue
            # New step counts have torch's default dtype, which a forward in another thread may have changed.
            counts = {key: value for key, value in each.items() if isinstance(value, Tensor) and value.dim() == 0}
            each |= {key: value.to(self.dtype) for key, value in counts.items() if value.is_floating_point()}
        return after


@cache
def _without_hooks(kind: Any) -> type[Optimizer]:
    """Make a subclass of an optimizer class, without the wrapper around ``step`` by which torch calls hooks."""

    unhooked = {base: without_hooks(vars(base)["step"]) for base in kind.__mro__[:-1] if "step" in vars(base)}
    # each class that defines ``step`` gets a subclass with the unwrapped step, so ``super().step()`` calls no hooks
    between = [type(base.__name__, (base,), {"step": step}) for base, step in unhooked.items() if base is not kind]
    return type(kind.__name__, (kind, *between), {"step": next(iter(unhooked.values()))})


def _on_device_of(gradient: Tensor, values: Tensor) -> Tensor:
    if gradient.device == values.device:
        return gradient.to(values.dtype)
    # allocating pinned memory each time is cheap: torch reuses freed blocks
    host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True, device="cpu")
    host.copy_(gradient, non_blocking=True)
    torch.accelerator.current_stream(gradient.device).synchronize()
    return host.to(values.dtype)


_FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
"""Optimizers for which torch has a fused CPU kernel, which updates all states in one pass over memory."""
