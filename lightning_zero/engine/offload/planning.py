"""Whether what is to be kept elsewhere has room there: found out, on all ranks together, before anything is changed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.disk import aligned, free_bytes, is_in_memory
from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.offload.config import OffloadConfig
from lightning_zero.engine.offload.states import Swap
from lightning_zero.engine.offload.swap import BUFFERS
from lightning_zero.engine.offload.updates import fields_by_parameter
from lightning_zero.labels import this_machine

if TYPE_CHECKING:
    from lightning_zero.engine.collectives import Communicator
    from lightning_zero.engine.sources import Source
    from lightning_zero.engine.units import UnitPlan


@dataclass(frozen=True)
class Part:
    """A rank's part of one bucket, as far as it is kept elsewhere.

    Attributes:
        numel: elements of the shard.
        master: bytes of a master.
        states: bytes an element of each state that the optimizer will keep; none of what is frozen.
        gradient: bytes of a gradient that is brought to where it is used, of one bucket or piece after another; 0
            where it is there already.
        keeps_gradient: whether all gradients are brought there before they are used.
        source: bytes of a value that gathers begin with, where that is beside the masters and in the CPU's memory.
        stored: the same where it is in the file.
        on_disk: whether masters and states are in a file.
        masters_are_new: whether masters in memory come on top of what would be there without offload.
        states_are_new: the same of states.
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
    """Bytes that a rank asks for, by what for.

    Attributes:
        memory: of the CPU's, beyond what there would be without offload.
        pinned: of those, bytes that the system may not move.
        disk: in files.
    """

    memory: dict[str, int]
    pinned: int
    disk: int


def need_of(parts: Iterable[Part], *, sub_group: int, pins: bool) -> Need:
    """What a rank asks for: arithmetic only.

    Args:
        sub_group: elements of a piece of a file, see ``OffloadConfig``.
        pins: whether memory is pinned, as it is for a device that copies by itself. Torch takes it in powers of two.
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
            # a file made before its optimizer has no states, and lies beside the one with room for them for a moment
            before = sum(aligned(piece * field) for piece in pieces for field in at_first) if part.states else 0
            largest_before = max(largest_before, before)
            largest_piece = max([largest_piece, *(sum(aligned(piece * f) for f in fields) for piece in pieces[:1])])
        else:
            keep("masters", part.numel * part.master if part.masters_are_new else 0)
            memory["optimizer states"] += part.numel * sum(part.states) if part.states_are_new else 0
        at_once = min(part.numel, sub_group) if part.on_disk else part.numel
        if part.keeps_gradient:
            keep("gradients", part.numel * part.gradient)
            at_once = part.numel  # another micro-batch's, until it is added
        largest_gradient = max(largest_gradient, at_once * part.gradient)
        keep("parameters", part.numel * part.source)
    # what is given back is kept by torch for the next of that size: all powers of two up to the largest, at most
    keep("gradients", 2 * _power_of_two(largest_gradient))
    memory["buffers for the disk"] += BUFFERS * largest_piece
    return Need({what: nbytes for what, nbytes in memory.items() if nbytes}, pinned, disk + largest_before)


class _Rank(NamedTuple):
    """What a rank says of itself to the others."""

    name: str
    need: Need
    memory: int | None
    given_back: int
    disk: int | None
    path: str | None


def check_room(
    config: OffloadConfig,
    plans: Sequence[UnitPlan],
    sources: Mapping[str, Source],
    buckets: Sequence[Bucket],
    optimizers: Sequence[Optimizer],
    communicator: Communicator,
) -> None:
    """See whether all that will be kept elsewhere has room there, before anything is. Collective.

    Args:
        plans: of the units, with their parameters.
        sources: of the parameters' values: what lies in the CPU's memory and goes to another device gives it back.
        buckets: made and not yet cut.
        optimizers: none for what is not known yet: two states are counted then, as of Adam.

    Raises:
        ValueError: on every rank, if a machine has not enough for all of its ranks.
    """
    parts = list(_parts(plans, buckets, optimizers, config.gradients is not None))
    pins = communicator.device.type != "cpu"
    need = need_of(parts, sub_group=config.sub_group, pins=pins)
    path, disk, given_back = None, None, 0
    if pins:
        given_back = sum(
            source.values.nbytes
            for plan in plans
            for source in (sources[name] for name in plan.parameters)
            if source.values is not None and not source.everywhere and source.values.device.type == "cpu"
        )
    if need.disk:
        assert config.path is not None
        path = str(config.path)
        disk = free_disk(path)
        if disk is None:  # a file system in memory
            need = need._replace(memory={**need.memory, "files in memory": need.disk}, disk=0)
    told = communicator.gather_objects(_Rank(this_machine(), need, available_memory(), given_back, disk, path))
    by_name: dict[str, list[_Rank]] = defaultdict(list)
    for each in told:
        by_name[each.name].append(each)
    missing = [said for name, ranks in by_name.items() for said in _missing(name, ranks)]
    if missing:
        raise ValueError(f"offload: there is not enough room. {' '.join(missing)}")


def _missing(name: str, ranks: list[_Rank]) -> Iterator[str]:
    """What the ranks of one machine lack together, and what may be done."""
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


def _parts(
    plans: Sequence[UnitPlan], buckets: Sequence[Bucket], optimizers: Sequence[Optimizer], keeps_gradients: bool
) -> Iterator[Part]:
    parameters = {name: parameter for plan in plans for name, parameter in plan.parameters.items()}
    fields_of = fields_by_parameter(optimizers)

    def states_of(members: list[nn.Parameter], dtype: torch.dtype) -> tuple[int, ...]:
        if not members[0].requires_grad:
            return ()
        if not optimizers:
            return (dtype.itemsize, dtype.itemsize)
        return tuple(kind.itemsize for kind in fields_of(members, dtype).values())

    for bucket in buckets:
        masters_on, source_on, device = bucket._masters_on, bucket._source_on, bucket.full.device
        if masters_on is None:
            continue
        members = [parameters[segment.name] for segment in bucket.layout.segments]
        master, on_disk = bucket.master_dtype, isinstance(masters_on, Swap)
        on_cpu = device.type == "cpu"
        # what ``Bucket._keep`` does
        width, low = bucket.full.dtype.itemsize, bucket.full.dtype != master
        on_same_disk = isinstance(source_on, Swap)
        has_source = not bucket.replicated and not on_same_disk and (source_on is None or low or on_disk)
        yield Part(
            numel=bucket.layout.shard_numel,
            master=master.itemsize,
            states=states_of(members, master),
            gradient=0 if on_cpu or not members[0].requires_grad else master.itemsize,
            keeps_gradient=keeps_gradients,
            source=width if has_source and (source_on is not None or on_cpu) else 0,
            stored=width if on_same_disk and low else 0,
            on_disk=on_disk,
            masters_are_new=not on_cpu or (bucket.replicated and not low),
            states_are_new=not on_cpu,
        )


def _power_of_two(number: int) -> int:
    """The next one, of which 0 is its own."""
    return 1 << (number - 1).bit_length() if number else 0


# -- what is there --------------------------------------------------------------------------------------------------


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a process may still take before the system, or its container, is short of them; None if unknown.

    Pinned memory counts like all other: CUDA's is not subject to ``RLIMIT_MEMLOCK``.

    Args:
        root: of the file system, in which Linux tells it.
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
    """What a control group, and each one around it, still allows, of either version."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder in (top / group, *(top / around for around in group.parents)):
        for limit, usage in names:
            values = [line.strip() for name in (limit, usage) for line in _lines(folder / name)]
            if len(values) == 2 and all(value.isdigit() for value in values):
                cached = dict(line.split() for line in _lines(folder / "memory.stat"))
                # version 1 has the sums over groups within beside its own; pages of files are given back on demand
                given_back = sum(
                    int(cached.get(f"total_{name}", cached.get(name, 0))) for name in ("active_file", "inactive_file")
                )
                yield max(int(values[0]) - int(values[1]) + given_back, 0)


def free_disk(path: str) -> int | None:
    """Bytes that may still be written below a folder, which need not be there yet; None if it lies in memory."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return None if is_in_memory(str(place)) else free_bytes(str(place))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
