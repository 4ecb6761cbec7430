"""Check on all ranks together that hosts and disks have space for offloaded states, before anything is changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine.config import OffloadConfig
from lightning_zero.engine.init.uncut_bucket import UncutBucket
from lightning_zero.engine.offload.swap import BUFFERS
from lightning_zero.engine.offload.updates import fields_by_parameter
from lightning_zero.engine.state.residency import Medium, ResidencyPlan
from lightning_zero.io.disk import aligned, free_bytes, is_in_memory
from lightning_zero.io.labels import this_machine

if TYPE_CHECKING:
    from lightning_zero.engine.comm.collectives import Communicator
    from lightning_zero.engine.plan.source import Source


@dataclass(frozen=True)
class Part:
    """Sizes of the offloaded states of a rank's shard of one bucket.

    Attributes:
        numel: elements of the shard.
        master: bytes per element of the master weights.
        states: bytes per element of each optimizer state; empty if the parameters are frozen.
        gradient: bytes per element of a gradient that is copied to host memory for the update, one bucket or chunk at
            a time; 0 where gradients are in host memory already.
        keeps_gradient: whether all gradients are in host memory before the update.
        source: bytes per element of the copy that gathers start from, if in host memory and apart from the masters.
        stored: the same for a copy in the file.
        on_disk: whether master weights and optimizer states are in a file.
        masters_are_new: whether the master weights need host memory that they would not need without offload.
        states_are_new: the same for the optimizer states.
    """

    numel: int
    master: int
    states: tuple[int, ...]
    gradient: int
    keeps_gradient: bool
    source: int
    stored: int
    on_disk: bool
    masters_are_new: bool
    states_are_new: bool


class Need(NamedTuple):
    """Bytes that a rank needs, by purpose.

    Attributes:
        memory: host memory beyond that needed without offload.
        pinned: the part of it that is page-locked.
        disk: bytes in files.
    """

    memory: dict[str, int]
    pinned: int
    disk: int


def need_of(parts: Iterable[Part], *, sub_group: int, pins: bool) -> Need:
    """Sum up what a rank needs; arithmetic only.

    Args:
        sub_group: elements of a chunk, see ``OffloadConfig``.
        pins: whether host memory is pinned, for asynchronous copies. Torch allocates it in powers of two.
    """
    memory: Counter[str] = Counter()
    pinned = disk = largest_before = largest_piece = largest_gradient = 0
    sub_group = aligned(sub_group)

    def keep(what: str, nbytes: int) -> None:
        nonlocal pinned
        taken = _power_of_two(nbytes) if pins else nbytes
        memory[what] += taken
        pinned += taken if pins else 0

    for part in parts:
        at_first = (part.master, part.stored)
        fields = (*at_first, *part.states)
        if part.on_disk:
            pieces = [min(sub_group, part.numel - start) for start in range(0, part.numel, sub_group)]
            disk += sum(aligned(piece * field) for piece in pieces for field in fields)
            # A file made before the optimizer is known has no states; it exists until one with states replaces it.
            before = sum(aligned(piece * field) for piece in pieces for field in at_first) if part.states else 0
            largest_before = max(largest_before, before)
            largest_piece = max([largest_piece, *(sum(aligned(piece * f) for f in fields) for piece in pieces[:1])])
        else:
            keep("masters", part.numel * part.master if part.masters_are_new else 0)
            memory["optimizer states"] += part.numel * sum(part.states) if part.states_are_new else 0
        at_once = min(part.numel, sub_group) if part.on_disk else part.numel
        if part.keeps_gradient:
            keep("gradients", part.numel * part.gradient)
            at_once = part.numel  # the gradient of another micro-batch, until it is added
        largest_gradient = max(largest_gradient, at_once * part.gradient)
        keep("parameters", part.numel * part.source)
    # Torch caches freed pinned memory by size: at most all powers of two up to the largest.
    keep("gradients", 2 * _power_of_two(largest_gradient))
    memory["buffers for the disk"] += BUFFERS * largest_piece
    return Need({what: nbytes for what, nbytes in memory.items() if nbytes}, pinned, disk + largest_before)


class _Rank(NamedTuple):
    """What a rank reports to the others."""

    name: str
    need: Need
    memory: int | None
    given_back: int
    disk: int | None
    path: str | None


def check_room(
    config: OffloadConfig,
    sources: Mapping[str, Source],
    buckets: Sequence[UncutBucket],
    optimizers: Sequence[Optimizer],
    communicator: Communicator,
) -> None:
    """Check that all offloaded states have space, before anything is allocated. Collective.

    Args:
        sources: of the parameters' values; those in host memory free it when they move to another device.
        buckets: of all units.
        optimizers: may be empty if not known yet; two states are then assumed, as for Adam.

    Raises:
        ValueError: on every rank, if a machine lacks space for all of its ranks.
    """
    parts = list(_parts(buckets, optimizers, config.gradients is not None))
    pins = communicator.device.type != "cpu"
    need = need_of(parts, sub_group=config.sub_group, pins=pins)
    path, disk, given_back = None, None, 0
    if pins:
        given_back = sum(
            source.values.nbytes
            for bucket in buckets
            for source in (sources[segment.name] for segment in bucket.layout.segments)
            if source.values is not None and not source.everywhere and source.values.device.type == "cpu"
        )
    if need.disk:
        assert config.path is not None
        path = str(config.path)
        disk = free_disk(path)
        if disk is None:  # a file system in memory
            need = need._replace(memory={**need.memory, "files in memory": need.disk}, disk=0)
    told = communicator.control.gather_objects(_Rank(this_machine(), need, available_memory(), given_back, disk, path))
    by_name: dict[str, list[_Rank]] = defaultdict(list)
    for each in told:
        by_name[each.name].append(each)
    missing = [said for name, ranks in by_name.items() for said in _missing(name, ranks)]
    if missing:
        raise ValueError(f"offload: there is not enough room. {' '.join(missing)}")


def _missing(name: str, ranks: list[_Rank]) -> Iterator[str]:
    """Messages on what the ranks of one machine lack together, and what to do about it."""
    who = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} on {name.partition('.')[0]}"
    memory: Counter[str] = Counter()
    for each in ranks:
        memory.update(each.need.memory)
    pinned = sum(each.need.pinned for each in ranks)
    given_back = sum(each.given_back for each in ranks)
    there = min((each.memory + given_back for each in ranks if each.memory is not None), default=None)
    if there is not None and memory.total() > there:
        listed = ", ".join(f"{what} {nbytes}" for what, nbytes in memory.items())
        listed += f"; {pinned} of it pinned" if pinned else ""
        advice = "take more ranks on more machines"
        if memory["buffers for the disk"]:
            advice = f"write a smaller sub_group, or {advice}"
        if memory["masters"] or memory["optimizer states"]:
            advice = f"write offload='nvme', or {advice}"
        yield (
            f"{who} would take {memory.total()} bytes of memory ({listed}), and {there} are available: "
            f"{memory.total() - there} bytes are missing; {advice}."
        )
    wanted = sum(each.need.disk for each in ranks)
    free = min((each.disk for each in ranks if each.disk is not None), default=None)
    if free is not None and wanted > free:
        yield (
            f"{who} would write {wanted} bytes below {ranks[0].path}, and {free} are free there: {wanted - free} bytes "
            "are missing; write the path= of a folder on a larger disk, or take more ranks on more machines."
        )


def _parts(buckets: Sequence[UncutBucket], optimizers: Sequence[Optimizer], keeps_gradients: bool) -> Iterator[Part]:
    fields_of = fields_by_parameter(optimizers)

    def states_of(members: list[nn.Parameter], dtype: torch.dtype) -> tuple[int, ...]:
        if not members[0].requires_grad:
            return ()
        if not optimizers:
            return (dtype.itemsize, dtype.itemsize)
        return tuple(kind.itemsize for kind in fields_of(members, dtype).values())

    for bucket in buckets:
        plan, members = bucket.plan, bucket.parameters
        if plan.masters not in (Medium.HOST, Medium.DISK):
            continue
        on_cpu, master, width = plan.device.type == "cpu", plan.master_dtype, plan.compute_dtype.itemsize
        in_memory = {Medium.HOST, *((Medium.BUFFER, Medium.DEVICE) if on_cpu else ())}
        source = width if plan.copy in in_memory else 0
        yield Part(
            numel=plan.layout.shard_numel,
            master=master.itemsize,
            states=states_of(members, master),
            gradient=0 if on_cpu or not members[0].requires_grad else master.itemsize,
            keeps_gradient=keeps_gradients,
            source=source,
            stored=width if plan.copy is Medium.DISK else 0,
            on_disk=plan.masters is Medium.DISK,
            masters_are_new=_held(plan, in_memory) - plan.layout.shard_numel * source
            > _held(plan.without_offload(), in_memory),
            states_are_new=not on_cpu,
        )


def _held(plan: ResidencyPlan, media: set[Medium]) -> int:
    """Bytes that a rank keeps at rest in the given media."""
    return sum(nbytes for medium, nbytes in plan.at_rest().items() if medium in media)


def _power_of_two(number: int) -> int:
    """Round up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


# -- what is available --------------------------------------------------------------------------------------------


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory still available within the limits of the system and of the container; None if unknown.

    Pinned memory counts like any other: CUDA's is not subject to ``RLIMIT_MEMLOCK``.

    Args:
        root: of the file system with ``/proc`` and ``/sys``.
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


def free_disk(path: str) -> int | None:
    """Bytes available below a folder, which need not exist yet; None if its file system is in memory."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return None if is_in_memory(str(place)) else free_bytes(str(place))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
