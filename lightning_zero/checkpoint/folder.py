"""Read a sharded checkpoint in DCP's format: its metadata, and ranges of tensors from the pieces that overlap them."""

from __future__ import annotations

import io
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_zero.checkpoint.checksums import ADVICE, NO_CHECKSUM, DamagedCheckpointError, Extent, NoCheckpointError
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.form import DCP_METADATA, MANIFEST, REST, SAVE_ID, Manifest, UnknownFormatError
from lightning_zero.checkpoint.records import BrokenArchiveError, BufferFile, Plain, records_of, tensor_in
from lightning_zero.checkpoint.restricted import ForbiddenClassError, load_dcp_metadata, load_torch, with_way_out
from lightning_zero.engine.init.sources import listed
from lightning_zero.engine.plan.chunks import Box, boxes
from lightning_zero.engine.tensor.lazy_tensor import StoredTensor


def check_is_dcp(files: Files, sizes: dict[str, int]) -> None:
    if not sizes:
        raise FileNotFoundError(
            f"{files.path} is an empty folder: a sharded checkpoint has {DCP_METADATA} and .distcp files in it."
        )
    if DCP_METADATA in sizes:
        return
    if MANIFEST in sizes or any(name.endswith(".distcp") for name in sizes):
        raise DamagedCheckpointError(
            f"{files.path} is not whole: {DCP_METADATA} is missing, which says where each tensor lies, so its saving "
            f"was interrupted or the file was not copied with the others. {ADVICE}"
        )
    if "latest" in sizes or "zero_to_fp32.py" in sizes or any(name.startswith("global_step") for name in sizes):
        raise ValueError(
            f"{files.path} was written by DeepSpeed: convert it, 'lightning-zero checkpoint import deepspeed "
            f"{files.path} OUT.ckpt', and give the result."
        )
    raise NoCheckpointError(
        f"{files.path} is no checkpoint: a folder of a sharded one has {DCP_METADATA} in it, this one has "
        f"{listed(sorted(sizes))}."
    )


def manifest_of(files: Files, sizes: dict[str, int]) -> Manifest | None:
    """Read our manifest; None for checkpoints written by other programs."""
    if MANIFEST not in sizes:
        return None
    try:
        manifest = Manifest.of_bytes(files.read(MANIFEST))
    except UnknownFormatError as error:
        raise ValueError(f"{files.path} was written by a newer lightning_zero: {error}.") from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{files.path} is damaged: {MANIFEST}, with the checksums of all else, cannot be read ({error}). {ADVICE}"
        ) from error
    wrong = []
    for name, entry in manifest.files.items():
        if name not in sizes:
            wrong.append(f"{name} is missing")
        elif sizes[name] != entry["bytes"]:
            wrong.append(f"{name} has {sizes[name]} bytes instead of {entry['bytes']}")
        elif entry["crc32"] is not None and zlib.crc32(files.read(name)) != entry["crc32"]:
            wrong.append(f"the checksum of {name} does not match")
    if wrong:
        raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong, 20)}. {ADVICE}")
    return manifest


def metadata_of(files: Files) -> tuple[Metadata, int]:
    """Read DCP's metadata; returns them and their checksum."""
    data = files.read(DCP_METADATA)
    try:
        metadata = load_dcp_metadata(data)
    except ForbiddenClassError as error:
        raise ValueError(
            f"{files.path}/{DCP_METADATA} names {error}, which the metadata of a sharded checkpoint does not consist "
            "of. Nothing of it was run; do not load it by other means."
        ) from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{files.path} is damaged: {DCP_METADATA} cannot be read ({type(error).__name__}: {error}). {ADVICE}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise NoCheckpointError(
            f"{files.path}/{DCP_METADATA} is not the metadata of a checkpoint that DCP writes to files."
        )
    if any(getattr(place, "transform_descriptors", None) for place in metadata.storage_data.values()):
        raise ValueError(
            f"{files.path} was written by DCP with extensions (compression, for one), which are not read here: read it "
            "with torch.distributed.checkpoint, and save it without."
        )
    return metadata, zlib.crc32(data)


def check_has_manifest(files: Files, manifest: Manifest | None, metadata: Metadata) -> None:
    """Check that a folder written by us has its manifest, without which its files may stem from different saves.

    Raises:
        DamagedCheckpointError: if we wrote the folder and the manifest is missing.
    """
    if manifest is None and getattr(getattr(metadata, "storage_meta", None), "save_id", None) == SAVE_ID:
        raise DamagedCheckpointError(
            f"{files.path} is damaged: {MANIFEST}, with the checksums of all else, is missing, and this folder was "
            f"written by lightning_zero: its files may be of several saves. {ADVICE}"
        )


@dataclass
class _Chunk:
    """A rectangle of a tensor, and its location in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Index of its first element in the flattened tensor."""
    stop: int
    """Index behind its last element in the flattened tensor."""
    extent: Extent

    @property
    def is_range(self) -> bool:
        return self.stop - self.start == prod(self.sizes)


class Folder:
    """Reader of a sharded checkpoint's tensors and other values."""

    def __init__(
        self,
        files: Files,
        sizes: dict[str, int],
        manifest: Manifest | None,
        metadata: Metadata,
        identity: int,
        weights_only: bool | None,
    ) -> None:
        self._files, self._weights_only = files, weights_only
        self._has_rest = REST in sizes
        self._extents: dict[tuple[str, int], Extent] = {}
        checksums = {
            (file, offset): (length, crc32)
            for file, pieces in (manifest.pieces if manifest is not None else {}).items()
            for offset, length, crc32 in pieces
        }
        extent_of: dict[Any, Extent] = {}
        names_in: dict[Any, list[str]] = defaultdict(list)
        wrong: dict[str, str] = {}
        for index, place in metadata.storage_data.items():
            key = (place.relative_path, place.offset)
            if key not in self._extents:
                length, crc32 = checksums.get(key, (place.length, None))
                if manifest is not None and (crc32 is None or length != place.length):
                    wrong[f"{place.relative_path} {place.offset}"] = (
                        f"{MANIFEST} and {DCP_METADATA} differ on {index.fqn}"
                    )
                self._extents[key] = Extent(*key, place.length, crc32, names_in[key])
            extent_of[index.fqn, _ints(index.offset)] = self._extents[key]
            names_in[key].append(_piece_name(index.fqn, index.offset))
            if place.relative_path not in sizes:
                wrong[place.relative_path] = f"{place.relative_path} is missing, with {index.fqn} in it"
            elif sizes[place.relative_path] < place.offset + place.length:
                wrong.setdefault(
                    place.relative_path,
                    f"{place.relative_path} is truncated: it has {sizes[place.relative_path]} bytes, and {index.fqn} "
                    f"ends at {place.offset + place.length}",
                )
        self._chunks: dict[str, list[_Chunk]] = {}
        self._others: dict[str, Extent] = {}
        self._known: dict[Any, Plain] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                if (name, None) in extent_of:
                    self._others[name] = extent_of[name, None]
                else:
                    wrong[name] = f"{name} is missing"
                continue
            chunks = self._chunks[name] = []
            for chunk in stored.chunks:
                offsets, shape = _ints(chunk.offsets) or (), _ints(chunk.sizes) or ()
                found = extent_of.get((name, offsets))
                if found is None:
                    wrong[name] = f"the piece of {name} at {offsets} is missing"
                elif prod(shape):
                    last = [offset + size - 1 for offset, size in zip(offsets, shape)]
                    start, stop = _flat(offsets, stored.size), _flat(last, stored.size) + 1
                    chunks.append(_Chunk(offsets, shape, start, stop, found))
            have = sum(prod(chunk.sizes) for chunk in chunks)
            if have < prod(stored.size):
                wrong.setdefault(name, f"{name} lacks {prod(stored.size) - have} of its {prod(stored.size)} elements")
        if wrong:
            raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong.values(), 20)}. {ADVICE}")
        self._identity = identity, zlib.crc32(repr(sorted(checksums.items())).encode())

    def rest(self) -> dict[str, Any]:
        """Read everything other than the tensors of models and optimizers."""
        if not self._has_rest:
            return {}
        rest = self._load(REST, self._files.read(REST))
        if not isinstance(rest, dict):
            raise NoCheckpointError(f"{self._files.path}/{REST} holds a {type(rest).__name__}, and no dictionary.")
        return rest

    def values(self, metadata: Metadata) -> Iterator[tuple[str, Any]]:
        """Iterate over all other values by name. Drops the metadata, as large as a checkpoint of many small tensors."""
        by_pieces: dict[Any, StoredTensor] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                yield name, self._load(name, self._checked(self._others[name]))
                continue
            read = partial(self._range, name, stored.size, stored.properties.dtype)
            if not stored.size:
                yield name, read(0, 1).clone().view(())
                continue
            origin = (os.path.basename(self._files.path), name, self._identity)
            value = StoredTensor(name, stored.size, stored.properties.dtype, read, origin)
            # Tied parameters are stored as the same pieces, so equal pieces become one tensor again.
            pieces = tuple((chunk.offsets, chunk.extent.file, chunk.extent.start) for chunk in self._chunks[name])
            yield name, by_pieces.setdefault(pieces, value) if pieces else value

    def _load(self, what: str, data: bytes | memoryview) -> Any:
        try:
            return load_torch(io.BytesIO(data), weights_only=self._weights_only)
        except ForbiddenClassError as error:
            raise ValueError(f"{self._files.path}: {what}: {with_way_out(error)}.") from error
        except Exception as error:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {what} cannot be read ({type(error).__name__}: {error}). {ADVICE}"
            ) from error

    def _checked(self, extent: Extent) -> memoryview:
        data = self._files.part(extent.file, extent.start, extent.length)
        if not extent.is_checked and extent.crc32 is not None and zlib.crc32(data) != extent.crc32:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: the checksum of {extent}, does not match. {ADVICE}"
            )
        extent.is_checked = True
        return data

    def trust(self) -> None:
        for extent in self._extents.values():
            extent.is_checked = True

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = self._checked(chunk.extent)
        known = self._known if chunk.extent.crc32 is not None else {}  # else only parsing shows damage
        try:
            tensor = tensor_in(data, known, (chunk.sizes, dtype))
        except Exception as error:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {chunk.extent}, cannot be read ({type(error).__name__}: "
                f"{error}). {ADVICE}"
            ) from error
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {chunk.extent}, is {tuple(tensor.shape)} in {tensor.dtype}, and "
                f"by {DCP_METADATA} {chunk.sizes} in {dtype}. {ADVICE}"
            )
        return tensor

    def _range(self, name: str, shape: torch.Size, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return the elements ``[start, stop)`` of a flattened tensor, read from the pieces that overlap them.

        If a single piece contains them all, the result is a view of its mapped memory.
        """
        chunks = [chunk for chunk in self._chunks[name] if chunk.start < stop and start < chunk.stop]
        if len(chunks) == 1 and chunks[0].is_range:
            tensor = self._tensor(chunks[0], dtype)
            if tensor.is_contiguous() and tensor.data_ptr() % dtype.itemsize == 0:
                return tensor.view(-1)[start - chunks[0].start : stop - chunks[0].start]
        out = torch.empty(stop - start, dtype=dtype, device="cpu")
        wanted: list[Box] | None = None
        for chunk in chunks:
            if chunk.is_range:
                low, high = max(chunk.start, start), min(chunk.stop, stop)
                flat = self._tensor(chunk, dtype).reshape(-1)
                out[low - start : high - start].copy_(flat[low - chunk.start : high - chunk.start])
                continue
            wanted = boxes(shape, start, stop) if wanted is None else wanted
            for box in wanted:
                self._copy(out, start, box, chunk, shape, dtype)
        return out

    def _copy(self, out: Tensor, start: int, box: Box, chunk: _Chunk, shape: torch.Size, dtype: torch.dtype) -> None:
        """Copy the intersection of a rectangle and a chunk."""
        first = [max(a, b) for a, b in zip(box.offsets, chunk.offsets)]
        after = [
            min(a + size, b + other) for a, size, b, other in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes)
        ]
        sizes = [stop - begin for begin, stop in zip(first, after)]
        if min(sizes) <= 0:
            return
        source = self._tensor(chunk, dtype)[tuple(slice(a - o, b - o) for a, b, o in zip(first, after, chunk.offsets))]
        strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        out.as_strided(sizes, strides, _flat(first, shape) - start).copy_(source)

    def extents(self) -> Iterator[Extent]:
        """Iterate over all extents that have a checksum and were not verified on opening."""
        for extent in self._extents.values():
            if extent.crc32 is not None:
                yield extent
                continue
            try:
                data = self._files.part(extent.file, extent.start, extent.length)
                records = records_of(BufferFile(data))  # type: ignore[arg-type]
            except BrokenArchiveError:
                yield replace(extent, crc32=NO_CHECKSUM)
                continue
            for record in records:
                if record.crc32 is not None:
                    start = extent.start + record.start
                    yield replace(extent, start=start, length=record.length, crc32=record.crc32)


def _ints(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _flat(index: Any, shape: Any) -> int:
    """Index of an element in the flattened tensor."""
    position = 0
    for number, size in zip(index, shape):
        position = position * size + number
    return position


def _piece_name(name: str, offset: Any) -> str:
    return f"{name} at {tuple(offset)}" if offset is not None and any(offset) else name


Path = tuple[str | int, ...]
"""Location of a value in DCP's metadata: dictionary keys as strings, and list indices."""


def odd_keys(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """Find keys in nested dictionaries and lists that are not strings, by DCP's path to them."""
    found: dict[Path, Any] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            here = (*path, str(key))
            found |= {here: key} if not isinstance(key, str) else {}
            found |= odd_keys(value, here)
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            found |= odd_keys(value, (*path, number))
    return found


def put(tree: dict[str, Any], path: Path, value: Any, keys: Mapping[Path, Any] = MappingProxyType({})) -> None:
    """Insert a value at DCP's path, creating containers as needed.

    Args:
        keys: the original keys where they are not strings, see ``odd_keys``.
    """
    here: Any = tree
    for length, (key, following) in enumerate(zip(path, path[1:]), 1):
        key = _ready(here, keys.get(path[:length], key))
        if here[key] is None:
            here[key] = [] if isinstance(following, int) else {}
        here = here[key]
    here[_ready(here, keys.get(path, path[-1]))] = value


def _ready(container: Any, key: Any) -> Any:
    if isinstance(container, list):
        number = int(key)
        container.extend([None] * (number + 1 - len(container)))
        return number
    container.setdefault(key, None)
    return key
