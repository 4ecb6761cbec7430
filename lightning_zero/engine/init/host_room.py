"""Check on all ranks together that hosts have memory for offloaded states, before anything is changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.init.bucketing import UncutBucket
from lightning_zero.engine.init.sources import Source
from lightning_zero.engine.offload.swap import BUFFERS
from lightning_zero.engine.state.residency import Medium, ResidencyPlan
from lightning_zero.io.disk import aligned
from lightning_zero.io.labels import this_machine


def memory_for(shards: Iterable[tuple[ResidencyPlan, list[int] | None]], offload: OffloadConfig) -> Counter[str]:
    """Bytes of host memory, by purpose, that a rank needs for offloaded states.

    If the device that computes is the CPU, optimizer states and gradients are in its memory anyway. For other devices
    host memory is pinned, which torch allocates in powers of two.

    Args:
        shards: the plan of each bucket, and the bytes per element of its optimizer states; None for frozen parameters.
    """
    memory: Counter[str] = Counter()
    largest_piece = largest_gradient = 0
    for plan, states in shards:
        if not plan.is_offloaded:
            continue
        numel, master, pins = plan.layout.shard_numel, plan.master_dtype.itemsize, plan.device.type != "cpu"
        for what, medium, nbytes in plan.at_rest():
            if medium is Medium.HOST:
                memory[what] += _power_of_two(nbytes) if pins else nbytes
        at_once = numel
        if plan.masters is Medium.DISK:
            at_once = min(numel, aligned(offload.sub_group))
            copy = (plan.compute_dtype.itemsize,) if plan.copy is Medium.DISK else ()
            piece = sum(aligned(at_once * itemsize) for itemsize in (master, *copy, *(states or ())))
            largest_piece = max(largest_piece, piece)
        elif states is not None and pins:
            memory["optimizer states"] += numel * sum(states)
        if states is not None and pins:
            if offload.gradients is not None:
                memory["gradients"] += _power_of_two(numel * master)
                at_once = numel  # the gradient of another micro-batch, until it is added
            largest_gradient = max(largest_gradient, at_once * master)
    # Torch caches freed pinned memory by size: at most all powers of two up to the largest.
    memory["gradients"] += 2 * _power_of_two(largest_gradient)
    memory["buffers for the disk"] += BUFFERS * largest_piece
    return +memory


def check_room(
    offload: OffloadConfig,
    sources: Mapping[str, Source],
    buckets: Sequence[UncutBucket],
    communicator: Communicator,
    has_optimizers: bool,
) -> None:
    """Raise a ValueError on every rank if a machine lacks host memory for the states of its ranks. Collective.

    Args:
        sources: of the parameters' values; those in host memory free it when they move to another device.
        buckets: of all units.
        has_optimizers: whether the optimizers are known; otherwise two states are assumed, as for Adam.
    """
    shards = []
    for bucket in buckets:
        states = [dtype.itemsize for dtype in bucket.fields.values()]
        if not has_optimizers:
            states = 2 * [bucket.plan.master_dtype.itemsize]
        shards.append((bucket.plan, states if bucket.parameters[0].requires_grad else None))
    freed = 0
    if communicator.device.type != "cpu":
        own = [sources[segment.name] for bucket in buckets for segment in bucket.layout.segments]
        on_host = [s.values for s in own if s.values is not None and not s.everywhere and s.values.device.type == "cpu"]
        freed = sum(values.nbytes for values in on_host)
    own_need = this_machine(), memory_for(shards, offload), available_memory(), freed
    machines = defaultdict(list)
    for name, *of_rank in communicator.control.gather_objects(own_need):
        machines[name].append(of_rank)
    missing = []
    for name, ranks in machines.items():
        needed = sum((need for need, _, _ in ranks), Counter[str]())
        least = min((available for _, available, _ in ranks if available is not None), default=None)
        if least is None or needed.total() <= (available := least + sum(given for _, _, given in ranks)):
            continue
        advice = "use more ranks on more machines"
        if needed["buffers for the disk"]:
            advice = f"write a smaller sub_group, or {advice}"
        if needed["master weights"] or needed["optimizer states"]:
            advice = f"write offload='nvme', or {advice}"
        purposes = ", ".join(f"{what} {nbytes}" for what, nbytes in needed.items())
        missing.append(
            f"The {len(ranks)} rank(s) on {name.partition('.')[0]} need {needed.total()} bytes ({purposes}), and "
            f"{available} are available: {advice}."
        )
    if missing:
        raise ValueError(f"offload: not enough host memory. {' '.join(missing)}")


def _power_of_two(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory still available within the limits of the system and of the container; None if unknown.

    Pinned memory counts like any other: CUDA's is not subject to ``RLIMIT_MEMLOCK``.
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
                # version 1 also has totals that include subgroups; the kernel frees pages of files on demand
                given_back = sum(
                    int(cached.get(f"total_{name}", cached.get(name, 0))) for name in ("active_file", "inactive_file")
                )
                yield max(int(values[0]) - int(values[1]) + given_back, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
