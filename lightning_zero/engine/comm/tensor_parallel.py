"""Tensor parallelism together with ZeRO: the ranks that share tensors, and conversions from and to DTensors.

The user's project divides the module's parameters, as DTensors, over the ``tensor_parallel`` dimension of a device
mesh. The engine shards each rank's share of a parameter along ``data_parallel``. The parameters are DTensors again only
while a module computes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.backend_transport import all_gather_single
from lightning_zero.engine.comm.control_plane import ControlPlane
from lightning_zero.engine.comm.counters import Counters
from lightning_zero.engine.comm.failures import explained, waits_for
from lightning_zero.engine.comm.process_group import ProcessGroup
from lightning_zero.engine.comm.transport import Pending
from lightning_zero.engine.compat import assert_on_device, keystr, tree_leaves_with_path
from lightning_zero.engine.plan.share import Share

if TYPE_CHECKING:  # imported where a mesh is used: the import takes half a second
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""The dimensions of the device mesh, as Lightning's ``ModelParallelStrategy`` names them."""


def device_mesh(device: torch.device, data_parallel_size: int, tensor_parallel_size: int) -> DeviceMesh:
    """Make the mesh of all ranks; each tensor-parallel group has consecutive ranks. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (data_parallel_size, tensor_parallel_size), mesh_dim_names=(DATA, TENSOR))


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise a ValueError unless a mesh has the dimensions ``(DATA, TENSOR)`` and contains all ranks."""
    if tuple(mesh.mesh_dim_names or ()) != (DATA, TENSOR):
        raise ValueError(
            f"mesh has dimensions named {mesh.mesh_dim_names}, but the names must be {(DATA, TENSOR)}: write "
            f"init_device_mesh(device, (data, tensor), mesh_dim_names={(DATA, TENSOR)})."
        )
    if mesh.size() != process_group.world_size():
        raise ValueError(
            f"mesh has {mesh.size()} of {process_group.world_size()} ranks: include all ranks of the process group."
        )


@dataclass(frozen=True)
class Placed:
    """How the user's project has divided a parameter over the tensor-parallel ranks.

    Attributes:
        placements, stride: a DTensor's placements and stride; ``placements`` is None for an ordinary tensor.
    """

    share: Share
    placements: Any = None
    stride: tuple[int, ...] = ()


class TensorParallel:
    """The ranks along the tensor-parallel dimension that share the tensors of one engine's module.

    Args:
        mesh: a mesh with both dimensions; None without tensor parallelism, in which case nothing is communicated.

    Attributes:
        rank, size: this rank's number along the dimension, and the number of ranks along it.
        control: the control plane of the ranks along the dimension.
        groups: the ranks of each tensor-parallel group, as numbered in the default group; exists only if there are
            several ranks.
        group: the process group of this rank's tensor-parallel group; exists only if ``groups`` does.
        note: for simulated ranks, called with the bytes of each gather of activations, instead of a gather; returns a
            function that is called when this rank waits for the gather.
    """

    def __init__(self, mesh: DeviceMesh | None, counters: Counters) -> None:
        self.rank, self.size, self.counters = 0, 1, counters
        self.control = ControlPlane(counters)
        self.note: Callable[[int], Callable[[], Any]] | None = None
        along = self._mesh = mesh[TENSOR] if mesh is not None else None
        if along is not None and along.size() > 1:
            self.rank, self.size = along.get_local_rank(), along.size()
            self.group: ProcessGroup = along.get_group()
            self.groups: list[list[int]] = mesh.mesh.tolist()  # type: ignore[union-attr]

    # -- the module's parameters ------------------------------------------------------------------------------------

    def placed(self, name: str, tensor: Tensor) -> Placed:
        """How a parameter or a buffer is divided over the tensor-parallel ranks.

        Raises:
            ValueError: if it is a DTensor on another mesh, or its placement is neither Shard nor Replicate.
        """
        if not is_dtensor(tensor):
            return Placed(Share(tensor.shape, None, self.rank, self.size))
        shared: DTensor = tensor  # type: ignore[assignment]
        if self._mesh is None or shared.device_mesh != self._mesh:
            raise ValueError(
                f"{name} is a DTensor on {shared.device_mesh}, but must be on the {TENSOR!r} dimension of the "
                f"strategy's mesh: parallelise the module with device_mesh[{TENSOR!r}] in configure_model(), set "
                "tensor_parallel_size, and remove fully_shard(...), which the strategy replaces."
            )
        placement: Any = shared.placements[0]
        if type(placement).__name__ not in ("Shard", "Replicate"):
            raise ValueError(
                f"{name} is a DTensor with the placement {placement}, but the placement must be Shard or Replicate: "
                "divide the tensor along one of its dimensions, or give every rank the whole tensor."
            )
        dimension = placement.dim % tensor.dim() if placement.is_shard() and self.size > 1 else None
        share = Share(tensor.shape, dimension, self.rank, self.size)
        return Placed(share, shared.placements, shared.stride())

    def shown(self, own: Tensor, placed: Placed) -> Tensor:
        """Wrap this rank's share in a DTensor if the tensor was a DTensor; gradients flow back to the share."""
        if placed.placements is None:
            return own
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            own, self._mesh, placed.placements, run_check=False, shape=placed.share.shape, stride=placed.stride
        )

    # -- collectives ------------------------------------------------------------------------------------------------

    def whole(self, own: Tensor, share: Share) -> Tensor:
        """Gather a tensor from the ranks' shares, which may differ in shape. Collective if the tensor is divided."""
        if share.dimension is None:
            return own
        most = share.shape_of(0)
        padded = own.new_zeros(most)
        padded.narrow(share.dimension, 0, own.shape[share.dimension]).copy_(own)
        gathered = own.new_empty((self.size, *most))
        self.counters.add("control", gathered.numel(), gathered.nbytes)
        with self.control.waiting("a gather over tensor-parallel ranks"):
            dist.all_gather(list(gathered.unbind()), padded, self.group)
        parts = (part.narrow(share.dimension, 0, share.length(index)) for index, part in enumerate(gathered.unbind()))
        return torch.cat(list(parts), share.dimension)

    def check_same(self, batch: Any, sampler: str) -> None:
        """Raise a ValueError on every rank if the tensors of a batch differ between tensor-parallel ranks. Collective.

        Args:
            sampler: advice for the error message: how to write a sampler that gives these ranks the same batches.
        """
        if self.size == 1 or self.note is not None:  # no other rank exists
            return
        leaves = tree_leaves_with_path(batch)
        mine = {keystr(path): _digest(value) for path, value in leaves if isinstance(value, Tensor)}
        if self.control.is_alike(repr(sorted(mine.items()))):
            return
        everywhere = self.control.gather_objects(mine)
        names = dict.fromkeys(name for theirs in everywhere for name in theirs)
        different = [name for name in names if len({theirs.get(name) for theirs in everywhere}) > 1]
        raise ValueError(
            f"Tensor-parallel ranks {self.control.ranks} compute one forward together, but have different values in "
            f"{', '.join(f'batch{name}' for name in different[:5])}. Give them the same data: "
            f"{sampler}, and use the same seeds in the dataset."
        )


class ActivationParts:
    """Divides activations that are identical on all tensor-parallel ranks: each rank keeps one part.

    Args:
        group: a separate process group of the same ranks, used only for activations.

    Attributes:
        rank, size: this rank's number among the tensor-parallel ranks, and their number.
    """

    def __init__(self, tensor: TensorParallel, group: ProcessGroup) -> None:
        self._tensor, self._group = tensor, group
        self.rank, self.size, self.is_first = tensor.rank, tensor.size, tensor.rank == 0

    def agree(self, values: Mapping[int, Tensor]) -> frozenset[int] | None:
        """The keys of the tensors that are identical on all ranks. Collective.

        None if any of these tensors may be identical by chance, since all its elements are equal (such as zeros).
        """
        if self._tensor.note is not None:
            return frozenset(values)
        digests = {key: _digest(value) for key, value in values.items()}
        everywhere = self._tensor.control.gather_objects(digests)
        alike = {key for key, digest in digests.items() if all(each.get(key) == digest for each in everywhere)}
        if any(values[key].numel() > 1 and bool((values[key] == values[key].flatten()[0]).all()) for key in alike):
            return None
        return frozenset(alike)

    def count(self, flat: Tensor) -> None:
        """Add a gather that fills ``flat`` to the counters."""
        self._tensor.counters.add("activations", flat.numel(), flat.nbytes)

    def gather(self, flat: Tensor, mark: Tensor) -> Callable[[], Any]:
        """Start to gather a tensor from the ranks' parts, and return a function that waits for the full tensor.

        Args:
            flat: the 1-D tensor to fill, which already holds this rank's part.
            mark: this rank's checksum of the full tensor. If checksums differ on an accelerator, an assertion fails.

        Raises:
            RuntimeError: from the returned function, on the CPU, if checksums differ between ranks.
        """
        self.count(flat)
        if self._tensor.note is not None:
            return self._tensor.note(flat.nbytes)
        own, marks = flat.chunk(self.size)[self.rank].clone(), mark.new_empty(self.size)
        with explained(_GATHER):
            works = [
                all_gather_single(into, part, group=self._group, async_op=True)
                for into, part in ((marks, mark.view(1)), (flat, own))
            ]

        def check() -> None:
            are_alike = (marks == marks[0]).all()
            if marks.device.type != "cpu":
                assert_on_device(are_alike)
            elif not are_alike:
                raise RuntimeError(
                    "partition_activations: the inputs of a checkpointed module were the same on all tensor-parallel "
                    "ranks in the first forward, but now differ, as with sequence parallelism. Leave out this option."
                )

        pending = Pending(waits_for(works, are_of_gloo=flat.device.type == "cpu"), [flat, own], check)
        pending.waiting = self._tensor.control.waiting(_GATHER)
        return pending.wait


def mark_of(tensor: Tensor) -> Tensor:
    """A checksum of a tensor, on its device; different tensors almost always have different checksums."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().view(integers).sum(dtype=torch.int64)


_GATHER = "a gather of activations over tensor-parallel ranks"


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, which torch divides over ranks."""
    return type(tensor).__name__ == "DTensor"


def are_divided(types: Iterable[type]) -> bool:
    """Whether any of these classes is DTensor, or AsyncCollectiveTensor, the result of an asynchronous collective.

    Such tensors wrap others. If a dispatch mode returns NotImplemented for them, torch calls the mode again with the
    wrapped tensors.
    """
    return any(each.__name__ in ("DTensor", "AsyncCollectiveTensor") for each in types)


def own_share(tensor: Tensor) -> Tensor:
    """This rank's share of a DTensor, detached; any other tensor unchanged."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def has_dtensors(module: nn.Module) -> bool:
    return any(map(is_dtensor, module.parameters()))


def in_full(tensor: Tensor) -> Tensor:
    """The full value of a DTensor (collective); any other tensor unchanged."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def _digest(tensor: Tensor) -> str:
    """A digest of a tensor's values, shape, dtype and layout."""
    saved = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), saved)  # a copy, since a view is saved with all of its memory
    return hashlib.sha256(saved.getbuffer()).hexdigest()
