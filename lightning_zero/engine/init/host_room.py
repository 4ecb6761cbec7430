"""Check whether the hosts have memory for the ordinary module and optimizer states that a closing engine makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.engine.comm.collectives import Communicator
from lightning_zero.engine.compat import tree_leaves
from lightning_zero.engine.state.bucket import Bucket
from lightning_zero.engine.state.slot import slots_of
from lightning_zero.io.labels import this_machine

MAY_TAKE = 0.9
"""The part of the available host memory that ordinary modules may take."""


def shortage_for_whole(
    buckets: Sequence[Bucket], optimizers: Sequence[Optimizer], communicator: Communicator, *, keeps_masters: bool
) -> str | None:
    """Describe a host that lacks memory for the ordinary tensors of all of its ranks; None if all hosts have enough.

    The result is the same on every rank. Collective. The memory of shards is not counted as available: a shard is freed
    only after its full tensors are complete.

    Args:
        keeps_masters: whether this rank also keeps full master weights of its low-precision parameters.
    """
    # ``dict.values``, since the mapping's own ``values`` waits for updates and raises their errors
    states = tree_leaves([list(dict.values(optimizer.state)) for optimizer in optimizers])
    own_states = sum(value.numel() * value.dtype.itemsize for value in states if isinstance(value, Tensor))
    needed = _bytes_of_whole(buckets, communicator, keeps_masters)
    everywhere = communicator.everyone.gather_objects((this_machine(), available_memory(), needed, own_states))
    all_states = sum(of_rank for *_, of_rank in everywhere)
    by_host: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for host, available, needed, _ in everywhere:
        if available is not None:
            by_host[host].append((available, needed + all_states))
    for host, ranks in by_host.items():
        available, needed = min(available for available, _ in ranks), sum(needed for _, needed in ranks)
        if needed > MAY_TAKE * available:
            return (
                f"The {len(ranks)} rank(s) on {host.partition('.')[0]} need {needed} bytes for full tensors, and "
                f"{available} are available"
            )
    return None


def _bytes_of_whole(buckets: Sequence[Bucket], communicator: Communicator, keeps_masters: bool) -> int:
    """The bytes of a rank's full parameters, of full tensors derived from them, and of the largest gathered bucket."""
    total = gathered = 0
    for bucket in buckets:
        total += bucket.layout.numel * bucket.dtype.itemsize
        for slot in slots_of(bucket):
            derived = (tensor for tensor in slot.derived.values() if not tensor.is_parameter)
            total += sum(tensor.numel() * tensor.dtype.itemsize for tensor in derived)
        if keeps_masters and bucket.master_dtype != bucket.dtype:
            total += bucket.layout.numel * bucket.master_dtype.itemsize
        if communicator.device.type == "cpu":  # one bucket at a time is gathered in host memory
            gathered = max(gathered, bucket.layout.padded_numel * bucket.master_dtype.itemsize)
    return total + gathered


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
