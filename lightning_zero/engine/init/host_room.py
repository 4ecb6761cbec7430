"""Check on all ranks whether memory suffices, before any tensor is changed.

A new engine needs memory for offloaded states; a closing engine, for full parameters and optimizer states.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.compat import tree_leaves
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.init.bucketing import UnshardedBucket
from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.residency import Medium, ResidencyPlan
from lightning_zero.engine.state.slot import slots_of
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.io.disk import aligned
from lightning_zero.io.labels import this_machine
from lightning_zero.io.swap import BUFFERS


def memory_for(shards: Iterable[tuple[ResidencyPlan, list[int] | None]], offload: OffloadConfig) -> Counter[str]:
    """Bytes of host memory, by purpose, that a rank needs for offloaded states.

    If the compute device is the CPU, optimizer states and gradients are in host memory anyway and are not counted.
    Otherwise host memory is pinned, and torch rounds pinned allocations up to powers of two.

    Args:
        shards: for each bucket, its plan, and the bytes per element of each optimizer state (None if frozen).
    """
    memory: Counter[str] = Counter()
    largest_sub_group = 0
    for plan, states in shards:
        numel, pins = plan.shard_numel, plan.device.type != "cpu"
        if not plan.is_offloaded:
            continue
        for what, medium, nbytes in plan.at_rest():
            if medium is Medium.HOST:
                memory[what] += _power_of_two(nbytes) if pins else nbytes
        if plan.masters is Medium.DISK:
            copy = [plan.compute_dtype.itemsize] if plan.copy is Medium.DISK else []
            itemsizes = [plan.master_dtype.itemsize, *copy, *(states or ())]
            at_once = min(numel, aligned(offload.sub_group))
            largest_sub_group = max(largest_sub_group, sum(aligned(at_once * itemsize) for itemsize in itemsizes))
        elif states is not None and pins:
            memory["optimizer states"] += numel * sum(states)
        if states is not None and pins and offload.gradients is not None:
            # of a sum of micro-batches, also without master weights
            memory["gradients"] += _power_of_two(numel * plan.update_dtype.itemsize)
    memory["buffers for the disk"] = BUFFERS * largest_sub_group
    return +memory


def check_room(
    offload: OffloadConfig,
    sources: Mapping[str, Source],
    units: Sequence[Sequence[UnshardedBucket]],
    communicator: Communicator,
    has_optimizers: bool,
) -> None:
    """Raise a ValueError on every rank if a machine lacks host memory for its ranks' offloaded states. Collective.

    Args:
        sources: sources of the parameters' values. Values in host memory will be freed if the device is not the CPU.
        has_optimizers: whether the optimizers are known; otherwise two states per parameter are assumed, as for Adam.
            States of optimizers that need whole parameters are unknown, and not counted.
    """
    shards, buckets = [], list(chain.from_iterable(units))
    for bucket in buckets:
        dtypes = list(bucket.fields.values()) if has_optimizers else 2 * [bucket.plan.update_dtype]
        states = [bucket.plan.state_dtype_of(dtype).itemsize for dtype in dtypes]
        shards.append((bucket.plan, states if bucket.parameters[0].requires_grad else None))
    freed = 0
    if communicator.device.type != "cpu":
        own = [sources[segment.name] for bucket in buckets for segment in bucket.layout.segments]
        in_memory = [s.values for s in own if not s.everywhere and not isinstance(s.values, LazyTensor)]
        freed = sum(values.nbytes for values in in_memory if values is not None and values.device.type == "cpu")
    if missing := _without_room(memory_for(shards, offload), communicator, freed=freed):
        raise ValueError(
            f"offload: not enough host memory. {'. '.join(map(str, missing))}. Use more machines, write "
            "offload='nvme', or set a smaller sub_group for states on a disk."
        )


def without_room_for_whole(
    buckets: Sequence[Bucket], optimizers: Sequence[Optimizer], communicator: Communicator, *, keeps_masters: bool
) -> list[Shortage]:
    """Where unsharding all ranks' tensors would take over nine tenths of the available host memory. Collective.

    The memory of shards is not counted as available: a shard is freed only after its full tensors are complete.

    Args:
        keeps_masters: whether this rank also keeps full master weights of its low-precision parameters.
    """
    need: Counter[str] = Counter()
    for bucket in buckets:
        need["parameters"] += bucket.layout.numel * bucket.dtype.itemsize
        for slot in slots_of(bucket):
            need["tensors derived from parameters"] += sum(
                tensor.numel() * tensor.dtype.itemsize for tensor in slot.derived.values() if not tensor.is_parameter
            )
        if keeps_masters and bucket.master_dtype != bucket.dtype:
            need["master weights"] += bucket.layout.numel * bucket.master_dtype.itemsize
        if communicator.device.type == "cpu":  # one bucket at a time is gathered in host memory
            gathered = bucket.layout.padded_numel * bucket.master_dtype.itemsize
            need["a gathered bucket"] = max(need["a gathered bucket"], gathered)
    # ``dict.values``, since the mapping's own ``values`` waits for updates and raises their errors
    states = tree_leaves([list(dict.values(optimizer.state)) for optimizer in optimizers])
    own_states = sum(value.numel() * value.dtype.itemsize for value in states if isinstance(value, Tensor))
    need["optimizer states"] = sum(communicator.everyone.gather_numbers(own_states, "a count of optimizer states"))
    return _without_room(+need, communicator, may_take=0.9)


class Shortage(NamedTuple):
    """A host that lacks memory for its ranks."""

    host: str
    ranks: int
    needed: Counter[str]  # bytes by purpose
    available: int

    def __str__(self) -> str:
        purposes = ", ".join(f"{what}: {nbytes}" for what, nbytes in self.needed.items())
        return (
            f"The {self.ranks} rank(s) on {self.host} need {self.needed.total()} bytes ({purposes}), and "
            f"{self.available} are available"
        )


def _without_room(
    need: Counter[str], communicator: Communicator, *, freed: int = 0, may_take: float = 1.0
) -> list[Shortage]:
    """The hosts that lack memory for the sum of their ranks' needs; the same list on every rank. Collective.

    Args:
        need: the bytes that this rank needs, by purpose.
        freed: bytes that this rank frees before it allocates the needed bytes.
        may_take: the fraction of the available memory that the ranks may use.
    """
    own = this_machine(), available_memory(), need, freed
    by_host: dict[str, list[tuple[int, Counter[str], int]]] = defaultdict(list)
    for host, available, needed, given in communicator.everyone.gather_objects(own):
        if available is not None:
            by_host[host].append((available, needed, given))
    found = []
    for host, ranks in by_host.items():
        needed = sum((of_rank for _, of_rank, _ in ranks), Counter[str]())
        available = min(of_rank for of_rank, _, _ in ranks) + sum(given for *_, given in ranks)
        if needed.total() > may_take * available:
            found.append(Shortage(host.partition(".")[0], len(ranks), needed, available))
    return found


def _power_of_two(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that the system and the container's limits still allow; None if unknown.

    The result also holds for pinned memory: memory pinned by CUDA is not subject to ``RLIMIT_MEMLOCK``.
    """
    found = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            found += _left_in_groups(root / "sys/fs/cgroup" / controllers, Path(path.strip("/")))
    return min(found, default=None)


def _left_in_groups(top: Path, group: Path) -> Iterator[int]:
    """Bytes that a control group and each of its ancestors still allow, for cgroup versions 1 and 2."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder in (top / group, *(top / around for around in group.parents)):
        for limit, usage in names:
            values = [line.strip() for name in (limit, usage) for line in _lines(folder / name)]
            if len(values) == 2 and all(value.isdigit() for value in values):
                cached = dict(line.split() for line in _lines(folder / "memory.stat"))
                # the kernel frees cached file pages on demand; in version 1, only ``total_`` counts include subgroups
                given_back = sum(
                    int(cached.get(f"total_{name}", cached.get(name, 0))) for name in ("active_file", "inactive_file")
                )
                yield max(int(values[0]) - int(values[1]) + given_back, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
