"""Read a sharded checkpoint in DCP's format: its metadata, and any range of a tensor from the stored pieces."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint import form
from lightning_zero.checkpoint.checksums import ADVICE, NO_CHECKSUM, DamagedCheckpointError, Extent, NoCheckpointError
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.form import DCP_METADATA, MANIFEST, REST, Manifest
from lightning_zero.checkpoint.metadata import is_one, load_dcp_metadata, wrong_pieces
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.restricted import BrokenArchiveError, check_size, load_torch, records_of
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


def _manifest_of(files: Files, sizes: dict[str, int], metadata_bytes: bytes) -> Manifest | None:
    """Read our manifest, and check the files' sizes and checksums against it; None if there is no manifest."""
    if MANIFEST not in sizes:
        return None
    try:
        manifest = Manifest.of_bytes(files.read(MANIFEST))
    except Exception as error:
        raise DamagedCheckpointError.of(
            files.path, f"{MANIFEST}, which holds all checksums, cannot be read ({error})"
        ) from error
    form.check_format(files.path, manifest.format)
    for name, entry in manifest.files.items():
        if name not in sizes:
            raise DamagedCheckpointError.of(files.path, f"{name} is missing")
        if sizes[name] != entry["bytes"]:
            raise DamagedCheckpointError.of(files.path, f"{name} has {sizes[name]} bytes instead of {entry['bytes']}")
        if entry["crc32"] is not None:
            data = metadata_bytes if name == DCP_METADATA else files.read(name)
            if zlib.crc32(data) != entry["crc32"]:
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


class Folder:
    """Reader of a sharded checkpoint's tensors and other values.

    Raises:
        FileNotFoundError, NoCheckpointError, DamagedCheckpointError, ValueError: see ``open_checkpoint``.
    """

    def __init__(self, files: Files, weights_only: bool | None) -> None:
        self.files, self._weights_only = files, weights_only
        sizes = files.sizes()
        _check_is_dcp(files.path, sizes)
        self._has_rest = REST in sizes
        data = files.read(DCP_METADATA)
        manifest = _manifest_of(files, sizes, data)
        metadata = _metadata_in(files.path, data)
        # Without a manifest, the files in a folder that we wrote may come from different saves.
        save_id = getattr(getattr(metadata, "storage_meta", None), "save_id", None)
        if manifest is None and save_id == form.SAVE_ID:
            raise self._damaged(
                f"{MANIFEST}, which holds all checksums, is missing, although this folder was written by "
                "lightning_zero: its files may come from different saves"
            )
        self.written_by = manifest.written_by if manifest is not None else {}
        checksums = sorted(manifest.pieces.items()) if manifest is not None else []
        # distinguishes these contents from any others at the same path
        self._identity = zlib.crc32(data), zlib.crc32(repr(checksums).encode())
        self._extents: dict[tuple[str, int], Extent] = {}
        self._bytes = sum(sizes.values())
        extent_of = self._locate(metadata, manifest, sizes)
        self._unread: tuple[Any, dict[Any, Extent]] | None = (metadata, extent_of)

    def _locate(self, metadata: Any, manifest: Manifest | None, sizes: dict[str, int]) -> dict[Any, Extent]:
        """Find the extent of each value in the files, by its name and, for a tensor's piece, its offsets."""
        checksums = {
            (file, offset): (length, crc32)
            for file, pieces in (manifest.pieces if manifest is not None else {}).items()
            for offset, length, crc32 in pieces
        }
        extent_of: dict[Any, Extent] = {}
        for index, place in metadata.storage_data.items():
            file, offset, length = place.relative_path, place.offset, place.length
            has_offsets = getattr(index, "offset", None) is not None
            offsets = tuple(index.offset) if has_offsets else None
            known_length, crc32 = checksums.get((file, offset), (length, None))
            if manifest is not None and (crc32 is None or known_length != length):
                raise self._damaged(f"{MANIFEST} and {DCP_METADATA} disagree about {index.fqn}")
            if file not in sizes:
                raise self._damaged(f"{file}, which contains {index.fqn}, is missing")
            if sizes[file] < offset + length:
                raise self._damaged(
                    f"{file} is truncated: it has {sizes[file]} bytes, but {index.fqn} ends at byte {offset + length}"
                )
            extent = self._extents.setdefault((file, offset), Extent(file, offset, length, crc32, []))
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

    def tree(self) -> dict[str, Any]:
        """Return the checkpoint as it was passed to the saving function. Call this once: it frees DCP's metadata."""
        tree = self._load(REST, self.files.read(REST)) if self._has_rest else {}
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
        assert self._unread is not None
        metadata, extent_of = self._unread
        self._unread = None
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
                yield name, self._load(name, self._checked(extent))
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

    def _load(self, what: str, data: bytes | memoryview) -> Any:
        try:
            return load_torch(data, weights_only=self._weights_only)
        except UnsafeFileError as error:
            raise UnsafeFileError(f"{self.files.path}: {what}: {error}.") from error
        except Exception as error:
            raise self._damaged(f"{what} cannot be read ({type(error).__name__}: {error})") from error

    def _checked(self, extent: Extent) -> memoryview:
        data = self.files.part(extent.file, extent.start, extent.length)
        if not extent.is_checked and extent.crc32 is not None and zlib.crc32(data) != extent.crc32:
            raise self._damaged(f"the checksum of {extent}, does not match")
        extent.is_checked = True
        return data

    def trust(self) -> None:
        for extent in self._extents.values():
            extent.is_checked = True

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = self._checked(chunk.extent)
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

    def extents(self) -> Iterator[Extent]:
        """Yield the extents with checksums: the pieces in the manifest, and the records of all other pieces."""
        for extent in self._extents.values():
            if extent.crc32 is not None:
                yield extent
                continue
            try:
                records = records_of(io.BytesIO(self.files.part(extent.file, extent.start, extent.length)))
            except BrokenArchiveError:
                yield replace(extent, crc32=NO_CHECKSUM)
                continue
            for record in records:
                if record.crc32 is not None:
                    yield replace(record, file=extent.file, start=extent.start + record.start, holds=extent.holds)


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
