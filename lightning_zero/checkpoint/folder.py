"""Read a sharded checkpoint in DCP's format: its metadata, and any range of a tensor from the stored pieces.

DCP's own reader would unpickle the metadata, and so run any code in them.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint import form
from lightning_zero.checkpoint.checksums import ADVICE, DamagedCheckpointError, Extent, NoCheckpointError
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.form import DCP_METADATA, MANIFEST, REST
from lightning_zero.checkpoint.metadata import is_one, load_dcp_metadata, wrong_pieces
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.restricted import check_size, load_torch
from lightning_zero.checkpoint.trees import check_structure, odd_keys, put, with_versions
from lightning_zero.engine import LazyTensor
from lightning_zero.engine import share as tiling
from lightning_zero.io.text import listed


def _check_is_dcp(path: str, sizes: dict[str, int]) -> None:
    if not sizes:
        raise FileNotFoundError(
            f"{path} is an empty folder: a sharded checkpoint contains {DCP_METADATA} and .distcp files."
        )
    if DCP_METADATA in sizes:
        return
    if MANIFEST in sizes or any(name.endswith(".distcp") for name in sizes):
        raise DamagedCheckpointError(
            f"{path} is incomplete: {DCP_METADATA}, which locates each tensor, is missing. The save was interrupted, "
            f"or the file was not copied with the others. {ADVICE}"
        )
    if "latest" in sizes or "zero_to_fp32.py" in sizes or any(name.startswith("global_step") for name in sizes):
        raise ValueError(
            f"{path} was written by DeepSpeed: run 'lightning-zero checkpoint import deepspeed {path} OUT.ckpt', and "
            "load OUT.ckpt."
        )
    raise NoCheckpointError(
        f"{path} is not a checkpoint: a sharded checkpoint contains {DCP_METADATA}, but this folder contains "
        f"{listed(sorted(sizes))}."
    )


def _manifest_of(files: Files, sizes: dict[str, int]) -> dict[str, Any]:
    """Read our manifest, and check the files that it lists; {} if there is no manifest."""
    if MANIFEST not in sizes:
        return {}
    try:
        manifest = json.loads(files.read(MANIFEST))
        version = manifest["format"]
        checksums = {name: entry["crc32"] for name, entry in manifest["files"].items()}
    except Exception as error:
        raise DamagedCheckpointError.of(files.path, f"{MANIFEST} cannot be read ({error})") from error
    form.check_format(files.path, version)
    for name, crc32 in checksums.items():
        if name not in sizes:
            raise DamagedCheckpointError.of(files.path, f"{name} is missing")
        if crc32 is not None and crc32 != zlib.crc32(files.read(name)):  # earlier versions listed files of pieces, too
            raise DamagedCheckpointError.of(files.path, f"the checksum of {name} does not match")
    return manifest


def _metadata_in(path: str, data: bytes) -> Any:
    try:
        metadata = load_dcp_metadata(data)
    except (UnsafeFileError, NoCheckpointError) as error:
        raise type(error)(f"{path}/{DCP_METADATA}: {error}.") from error
    except Exception as error:
        raise DamagedCheckpointError.of(
            path, f"{DCP_METADATA} cannot be read ({type(error).__name__}: {error})"
        ) from error
    if any(getattr(place, "transform_descriptors", None) for place in metadata.storage_data.values()):
        raise ValueError(
            f"{path} was written by DCP with extensions (such as compression), which cannot be read here: load it with "
            "torch.distributed.checkpoint, and save it without extensions."
        )
    return metadata


@dataclass
class _Chunk:
    """A rectangular piece of a tensor, its flat range (from first to last element), and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int
    extent: Extent


def read_folder(files: Files, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any], Collection[Extent]]:
    """Read a sharded checkpoint, but for the values of its tensors.

    Returns:
        The contents as they were passed to the saving function; what wrote them; and the places of all their parts.

    Raises:
        FileNotFoundError, NoCheckpointError, DamagedCheckpointError, ValueError: see ``open_checkpoint``.
    """
    sizes = files.sizes()
    _check_is_dcp(files.path, sizes)
    manifest = _manifest_of(files, sizes)
    data = files.read(DCP_METADATA)
    metadata = _metadata_in(files.path, data)
    if not manifest and getattr(getattr(metadata, "storage_meta", None), "save_id", None) == form.SAVE_ID:
        raise DamagedCheckpointError.of(
            files.path, f"{MANIFEST} is missing, although this folder was written by lightning_zero"
        )
    folder = _Folder(files, weights_only, zlib.crc32(data), sum(sizes.values()))
    extent_of = folder.locate(metadata, sizes)
    rest = folder.load(REST, files.read(REST)) if REST in sizes else {}
    tree = folder.put_together(rest, metadata, extent_of)
    return tree, manifest.get("written_by", {}), folder.extents.values()


class _Folder:
    """Reader of a sharded checkpoint's tensors and other values.

    Args:
        identity: distinguishes these contents from any others at the same path.
        nbytes: the size of all files.

    Attributes:
        extents: the places of all tensors and other values, by file and offset.
    """

    def __init__(self, files: Files, weights_only: bool | None, identity: int, nbytes: int) -> None:
        self.files, self._weights_only, self._identity, self._bytes = files, weights_only, identity, nbytes
        self.extents: dict[tuple[str, int], Extent] = {}

    def locate(self, metadata: Any, sizes: dict[str, int]) -> dict[Any, Extent]:
        """Find the extent of each value in the files, by its name and, for a tensor's piece, its offsets."""
        extent_of: dict[Any, Extent] = {}
        for index, place in metadata.storage_data.items():
            file, offset, length = place.relative_path, place.offset, place.length
            has_offsets = getattr(index, "offset", None) is not None
            offsets = tuple(index.offset) if has_offsets else None
            if file not in sizes:
                raise self._damaged(f"{file}, which contains {index.fqn}, is missing")
            if sizes[file] < offset + length:
                raise self._damaged(
                    f"{file} is truncated: it has {sizes[file]} bytes, but {index.fqn} ends at byte {offset + length}"
                )
            extent = self.extents.setdefault((file, offset), Extent(file, offset, length, None, []))
            extent.holds.append(f"{index.fqn} at {offsets}" if any(offsets or ()) else index.fqn)
            extent_of[index.fqn, offsets] = extent
        return extent_of

    def _chunks_of(self, name: str, stored: Any, extent_of: Mapping[Any, Extent]) -> list[_Chunk]:
        """Return the pieces of a tensor, each of whose elements must be in exactly one of them."""
        if (fault := wrong_pieces(stored.size, stored.chunks)) is not None:
            raise self._damaged(f"{name} {fault}")
        chunks = []
        for chunk in stored.chunks:
            offsets, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            extent = extent_of.get((name, offsets))
            if extent is None:
                raise self._damaged(f"the piece of {name} at {offsets} is missing")
            if extent.length < prod(shape) * stored.properties.dtype.itemsize:
                raise self._damaged(f"the piece of {name} at {offsets} has only {extent.length} bytes")
            start = stop = _flat(offsets, stored.size)
            if prod(shape):
                last = [offset + size - 1 for offset, size in zip(offsets, shape)]
                stop = _flat(last, stored.size) + 1
            chunks.append(_Chunk(offsets, shape, start, stop, extent))
        return chunks

    def _damaged(self, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError.of(self.files.path, what)

    def put_together(self, tree: Any, metadata: Any, extent_of: Mapping[Any, Extent]) -> dict[str, Any]:
        """Add the values that are stored in DCP's format to all others."""
        if not isinstance(tree, dict):
            raise NoCheckpointError(
                f"{self.files.path}/{REST} contains a {type(tree).__name__} instead of a dictionary."
            )
        check_structure(self.files.path, tree)  # before reading what follows
        ours = tree.get(form.CHECKPOINT_KEY, {})
        containers, versions = ours.pop(form.CONTAINERS, {}), ours.pop(form.VERSIONS, {})
        if not ours and (containers or versions):
            del tree[form.CHECKPOINT_KEY]
        tree |= containers
        keys = odd_keys(tree)
        for name, value in self._values(metadata, extent_of):
            put(tree, (metadata.planner_data or {}).get(name, (name,)), value, keys)
        return with_versions(tree, versions)

    def _values(self, metadata: Any, extent_of: Mapping[Any, Extent]) -> Iterator[tuple[str, Any]]:
        by_pieces: dict[Any, LazyTensor] = {}
        nbytes = nbytes_of_others = 0
        for name, stored in metadata.state_dict_metadata.items():
            if not is_one("TensorStorageMetadata", stored):
                if (name, None) not in extent_of:
                    raise self._damaged(f"{name} is missing")
                extent = extent_of[name, None]
                nbytes_of_others += extent.length
                if nbytes_of_others > self._bytes:
                    raise self._damaged("some of its values are stored in the same bytes")
                yield name, self.load(name, self._bytes_in(extent))
                continue
            chunks = self._chunks_of(name, stored, extent_of)
            read = partial(self._range, chunks, stored.size, stored.properties.dtype)
            if not stored.size:
                yield name, read(0, 1).clone().view(())
                continue
            origin = (os.path.basename(self.files.path), name, self._identity)
            value = LazyTensor(name, stored.size, stored.properties.dtype, read, origin)
            # Tied parameters share their stored pieces, so names with the same pieces become one tensor again.
            pieces = tuple((chunk.offsets, chunk.extent.file, chunk.extent.start) for chunk in chunks)
            if value.numel() and pieces not in by_pieces:
                by_pieces[pieces], nbytes = value, nbytes + value.numel() * value.dtype.itemsize
                check_size(nbytes, self._bytes)
            yield name, by_pieces.get(pieces, value)

    def load(self, what: str, data: bytes | memoryview) -> Any:
        try:
            return load_torch(data, weights_only=self._weights_only)
        except UnsafeFileError as error:
            raise UnsafeFileError(f"{self.files.path}: {what}: {error}.") from error
        except Exception as error:
            raise self._damaged(f"{what} cannot be read ({type(error).__name__}: {error})") from error

    def _bytes_in(self, extent: Extent) -> memoryview:
        return self.files.part(extent.file, extent.start, extent.length)

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = self._bytes_in(chunk.extent)
        try:
            tensor = load_torch(data)
            if tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
                raise ValueError(f"{tuple(tensor.shape)} of {tensor.dtype} instead of {chunk.sizes} of {dtype}")
        except Exception as error:
            raise self._damaged(f"{chunk.extent}, cannot be read ({type(error).__name__}: {error})") from error
        return tensor

    def _range(self, pieces: list[_Chunk], shape: torch.Size, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return the elements ``[start, stop)`` of a flattened tensor, read from the pieces that overlap this range.

        If one contiguous, aligned piece contains the range, the result is a view of this piece, not a copy.
        """
        chunks = [chunk for chunk in pieces if chunk.start < stop and start < chunk.stop]
        out = torch.empty(stop - start, dtype=dtype, device="cpu")
        strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        wanted = tiling.boxes(shape, start, stop)
        for chunk in chunks:
            common = [box for box in (_intersection(box, chunk) for box in wanted) if box is not None]
            if not common:
                continue
            tensor = self._tensor(chunk, dtype)
            is_whole = len(chunks) == 1 and chunk.stop - chunk.start == prod(chunk.sizes)
            if is_whole and tensor.is_contiguous() and tensor.data_ptr() % dtype.itemsize == 0:
                return tensor.view(-1)[start - chunk.start : stop - chunk.start]
            for first, sizes in common:
                source = tensor[tuple(slice(a - o, a - o + size) for a, o, size in zip(first, chunk.offsets, sizes))]
                out.as_strided(sizes, strides, _flat(first, shape) - start).copy_(source)
        return out


def _intersection(box: tiling.Box, chunk: _Chunk) -> tuple[list[int], list[int]] | None:
    """Return the offsets and sizes of the elements that a box and a chunk have in common; None if there are none."""
    first = [max(a, b) for a, b in zip(box.offsets, chunk.offsets)]
    after = [min(a + size, b + other) for a, size, b, other in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes)]
    sizes = [stop - begin for begin, stop in zip(first, after)]
    return (first, sizes) if min(sizes, default=1) > 0 else None


def _flat(index: Any, shape: Any) -> int:
    """Return the flat index of an element."""
    position = 0
    for number, size in zip(index, shape):
        position = position * size + number
    return position
