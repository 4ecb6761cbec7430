"""Opening a checkpoint, whatever wrote it: its contents by name, with values that stay where they are until needed."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import IO, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint.commit import stand_in
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.form import (
    CHECKPOINT_KEY,
    DCP_METADATA,
    MANIFEST,
    REST,
    Manifest,
    UnknownFormatError,
    check_format,
)
from lightning_zero.checkpoint.pieces import Box, boxes
from lightning_zero.checkpoint.records import (
    BrokenArchiveError,
    BufferFile,
    Record,
    ends_as_archive,
    read_checked,
    records_of,
    tensor_in,
)
from lightning_zero.checkpoint.restricted import ForbiddenClassError, load_dcp_metadata, load_torch
from lightning_zero.engine.sources import listed
from lightning_zero.engine.stored import StoredTensor

_AT_ONCE = 2**20  # bytes, which a processor's own memory has room for
_NONE = -1  # a checksum that no bytes have
_ADVICE = "Take another checkpoint, or copy this one again from where it is whole."


class DamagedCheckpointError(ValueError):
    """A checkpoint is not as it was written: truncated, altered, or a piece of it is missing."""


class Extent(NamedTuple):
    """Bytes of a file that have a checksum.

    Attributes:
        file: its name in the folder; empty for a checkpoint that is one file.
        holds: names of what they hold, as the checkpoint's ``tensors`` has them.
    """

    file: str
    start: int
    length: int
    crc32: int
    holds: Callable[[], str]


@dataclass
class OpenedCheckpoint:
    """What a checkpoint holds.

    Attributes:
        path: as it was given.
        form: one file, or a folder of DCP.
        written_by: versions, stage and world size, as far as it says.
        checkpoint: Lightning's dictionary: ``state_dict``, ``optimizer_states`` with parameters by number, and all
            else. Tensors are mapped from a local file; those of a sharded checkpoint are ``StoredTensor``.
        as_saved: the dictionary as whoever saved it had it, and with optimizers' states by name where DCP has them so.
        names_of_optimizers: the parameters' names of each optimizer in the order of their numbers; None if unknown.
    """

    path: str
    form: Literal["full", "sharded"]
    written_by: dict[str, Any]
    checkpoint: dict[str, Any]
    as_saved: dict[str, Any]
    names_of_optimizers: list[list[str]] | None
    _files: Files = field(repr=False)
    _extents: Callable[[], Iterator[Extent]] = field(repr=False)
    _trust: Callable[[], None] = field(repr=False, default=lambda: None)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of ``checkpoint`` by dotted name, as ``optimizer_states.0.state.3.exp_avg``."""
        return _tensors_in(self.checkpoint)

    @property
    def bytes_to_verify(self) -> int:
        """As many as ``verify`` reads."""
        return sum(extent.length for extent in self._extents())

    def verify(self, progress: Callable[[int], None] | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Hold everything, or a share of it, against its checksums. Memory for a few MiB is enough.

        Args:
            progress: is told of each number of bytes that was read.
            share: ``(number, of)``: of several processes that divide the work, which this one is.

        Raises:
            DamagedCheckpointError: naming all that is damaged.
        """
        wrong = []
        by_file: dict[str, list[Extent]] = {}
        room = memoryview(bytearray(_AT_ONCE))
        for extent in _share(list(self._extents()), *share):
            by_file.setdefault(extent.file, []).append(extent)
        for name, extents in by_file.items():
            with self._files.open(name) as file:
                for extent in sorted(extents, key=lambda extent: extent.start):
                    if _checksum(file, extent, room, progress) != extent.crc32:
                        wrong.append(_told(extent))
        if wrong:
            raise DamagedCheckpointError(f"{self.path} is damaged: {listed(wrong, 20)}. {_ADVICE}")
        if share == (0, 1):
            self.trust()

    def trust(self) -> None:
        """Read pieces without holding each against its checksum once more: all shares have been verified."""
        self._trust()


def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> OpenedCheckpoint:
    """Read what a checkpoint consists of, and of no large tensor the values.

    Args:
        path: of a file of Lightning's, or of a folder of ``torch.distributed.checkpoint``: ours, FSDP2's or another's.
            Local, or a URL that fsspec knows.
        weights_only: ``False`` unpickles whatever the project's hooks have put in, which runs code; for checkpoints of
            those one trusts. Otherwise classes have to be allowed by ``torch.serialization.add_safe_globals``.

    Raises:
        FileNotFoundError: if there is nothing at the path, or a folder with nothing in it.
        ValueError: if it is no checkpoint, or of a later version, or names classes that are not allowed.
        DamagedCheckpointError: if it is not as it was written, as far as that shows without reading all of it.
    """
    files = Files(path)
    if not files.exists and (aside := stand_in(files.path)) is not None:
        files = Files(aside)
    if not files.exists:
        raise FileNotFoundError(
            f"{files.path} does not exist: a checkpoint is a file of Lightning's, or a folder of sharded ones with "
            f"{DCP_METADATA} in it."
        )
    return _open_folder(files, weights_only) if files.is_folder else _open_file(files, weights_only)


# -- one file ----------------------------------------------------------------------------------------------------------


def _open_file(files: Files, weights_only: bool | None) -> OpenedCheckpoint:
    size = files.size()
    if not size:
        raise DamagedCheckpointError(f"{files.path} is empty: its saving was interrupted. {_ADVICE}")
    with files.open() as file:
        head = file.read(4)
        if head[:1] == b"\x80":  # of torch before 1.6: a pickle, with nothing to tell whether it is whole
            records, loadable = [], False
        elif head == b"PK\x03\x04" or ends_as_archive(file):
            records, loadable = _records_of_file(files, file, size), files.is_local
        elif not any(head):  # as a machine leaves a file that had not been synced when it lost its power
            raise DamagedCheckpointError(
                f"{files.path} ({size} bytes) is damaged: it {'begins with zeros' if size else 'is empty'}. {_ADVICE}"
            )
        else:
            raise ValueError(
                f"{files.path} ({size} bytes) is no checkpoint: it is not a file of torch.save, nor a folder of "
                f"sharded ones with {DCP_METADATA} in it."
            )
        try:
            if loadable:
                checkpoint = _load_mapped(files, weights_only)
            else:
                file.seek(0)
                checkpoint = load_torch(file, weights_only=weights_only)
        except ForbiddenClassError as error:
            raise ValueError(f"{files.path}: {error}.") from error
        except Exception as error:
            if "PytorchStreamReader" in str(error):  # a record that the pickle names is not among those there are
                raise DamagedCheckpointError(
                    f"{files.path} ({size} bytes) is damaged: {str(error).splitlines()[0]}. {_ADVICE}"
                ) from error
            raise ValueError(
                f"{files.path} ({size} bytes) cannot be read as a checkpoint: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{files.path} is no checkpoint: it holds a {type(checkpoint).__name__}, and no dictionary.")
    as_saved, checkpoint = checkpoint, _as_lightnings(checkpoint)
    ours = checkpoint.get(CHECKPOINT_KEY, {})
    if "format" in ours:
        _check_format(files, ours["format"])
    written_by = dict(ours.get("written_by", {}))
    if not written_by and "pytorch-lightning_version" in checkpoint:
        written_by = {"lightning": checkpoint["pytorch-lightning_version"]}

    def extents() -> Iterator[Extent]:
        names: dict[int, list[str]] = {}

        def holds(record: Record) -> Callable[[], str]:
            def told() -> str:
                if not names:
                    names.update(_names_by_offset(files) or {-1: []})
                return listed(names.get(record.start, [record.name]))

            return told

        for record in records:
            if record.length:
                yield Extent("", record.start, record.length, record.crc32, holds(record))

    return OpenedCheckpoint(files.path, "full", written_by, checkpoint, as_saved, None, files, extents)


def _records_of_file(files: Files, file: IO[bytes], size: int) -> list[Record]:
    try:
        records = records_of(file)
        pickled = next((record for record in records if record.name.endswith("/data.pkl")), None)
        for record in records:
            if "/data/" not in record.name:
                read_checked(file, record)
    except BrokenArchiveError as error:
        raise DamagedCheckpointError(
            f"{files.path} ({size} bytes) is damaged: it is truncated or was altered ({error}). {_ADVICE}"
        ) from error
    if pickled is None:
        raise ValueError(f"{files.path} is no checkpoint: a zip archive, but not one of torch.save.")
    return records


def _load_mapped(files: Files, weights_only: bool | None) -> Any:
    try:
        return load_torch(files.local_path, weights_only=weights_only, mmap=True)
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
    # Torch maps memory that could be written to, of which the system gives no more than it has.
    with FakeTensorMode():
        checkpoint = load_torch(files.local_path, weights_only=weights_only)

    def stored(tensor: Tensor) -> Tensor:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        offset, nbytes = storage._checkpoint_offset, storage.nbytes()
        where = (tensor.size(), tensor.stride(), tensor.storage_offset())
        assert offset is not None

        def read(start: int, stop: int) -> Tensor:
            flat = torch.frombuffer(files.part("", offset, nbytes), dtype=dtype)
            return flat.as_strided(*where).reshape(-1)[start:stop]

        origin = (os.path.basename(files.path), files.size(), offset, where)
        return StoredTensor(f"bytes {offset} to {offset + nbytes}", tensor.shape, dtype, read, origin)

    return tree_map_only(Tensor, stored, checkpoint)


def _names_by_offset(files: Files) -> dict[int, list[str]]:
    """Which tensors each record of a file holds, by where it begins. Reads the file's pickle once more."""
    names: dict[int, list[str]] = {}
    with files.open() as file:
        try:
            with FakeTensorMode():
                checkpoint = load_torch(file)
        except ForbiddenClassError:
            return {}
    for name, tensor in _tensors_in(_as_lightnings(checkpoint)).items():
        offset = tensor.untyped_storage()._checkpoint_offset
        assert offset is not None
        names.setdefault(offset, []).append(name)
    return names


# -- a folder ----------------------------------------------------------------------------------------------------------


def _open_folder(files: Files, weights_only: bool | None) -> OpenedCheckpoint:
    sizes = files.sizes()
    _check_is_dcp(files, sizes)
    manifest = _manifest_of(files, sizes)
    metadata, identity = _metadata_of(files)
    folder = _Folder(files, sizes, manifest, metadata, identity, weights_only)
    tree = folder.rest()
    for name in metadata.state_dict_metadata:
        path = (metadata.planner_data or {}).get(name, (name,))
        _put(tree, path, folder.value_of(name))
    checkpoint, names_of_optimizers = _number_parameters(files, tree)
    checkpoint = _as_lightnings(checkpoint)
    written_by = manifest.written_by if manifest is not None else {}
    return OpenedCheckpoint(
        files.path,
        "sharded",
        written_by,
        checkpoint,
        tree,
        names_of_optimizers,
        files,
        folder.extents,
        folder.trust,
    )


def _check_is_dcp(files: Files, sizes: dict[str, int]) -> None:
    if not sizes:
        raise FileNotFoundError(
            f"{files.path} is an empty folder: a sharded checkpoint has {DCP_METADATA} and .distcp files in it."
        )
    if DCP_METADATA in sizes:
        return
    if MANIFEST in sizes or any(name.endswith(".distcp") for name in sizes):
        raise DamagedCheckpointError(
            f"{files.path} is not whole: {DCP_METADATA} is missing, which says where each tensor lies, so its saving "
            f"was interrupted or the file was not copied with the others. {_ADVICE}"
        )
    if "latest" in sizes or "zero_to_fp32.py" in sizes or any(name.startswith("global_step") for name in sizes):
        raise ValueError(
            f"{files.path} was written by DeepSpeed: convert it, 'lightning-zero checkpoint import deepspeed "
            f"{files.path} OUT.ckpt', and give the result."
        )
    raise ValueError(
        f"{files.path} is no checkpoint: a folder of a sharded one has {DCP_METADATA} in it, this one has "
        f"{listed(sorted(sizes))}."
    )


def _manifest_of(files: Files, sizes: dict[str, int]) -> Manifest | None:
    """What we have written beside; None for checkpoints of others."""
    if MANIFEST not in sizes:
        return None
    try:
        manifest = Manifest.of_bytes(files.read(MANIFEST))
    except UnknownFormatError as error:
        raise ValueError(f"{files.path} was written by a newer lightning_zero: {error}.") from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{files.path} is damaged: {MANIFEST}, with the checksums of all else, cannot be read ({error}). {_ADVICE}"
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
        raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong, 20)}. {_ADVICE}")
    return manifest


def _metadata_of(files: Files) -> tuple[Metadata, int]:
    """DCP's metadata, and its checksum."""
    data = files.read(DCP_METADATA)
    try:
        metadata = load_dcp_metadata(data)
    except ForbiddenClassError as error:
        raise ValueError(
            f"{files.path}/{DCP_METADATA} names {error}, which the metadata of a sharded checkpoint does not consist "
            "of. Nothing of it was run; do not load it by other means unless you trust who wrote it."
        ) from error
    except Exception as error:
        raise DamagedCheckpointError(
            f"{files.path} is damaged: {DCP_METADATA} cannot be read ({type(error).__name__}: {error}). {_ADVICE}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{files.path}/{DCP_METADATA} is not the metadata of a checkpoint that DCP writes to files.")
    if any(getattr(place, "transform_descriptors", None) for place in metadata.storage_data.values()):
        raise ValueError(
            f"{files.path} was written by DCP with extensions (compression, for one), which are not read here: read it "
            "with torch.distributed.checkpoint, and save it without."
        )
    return metadata, zlib.crc32(data)


@dataclass
class _Blob:
    """A piece of a data file: one object of ``torch.save``."""

    file: str
    offset: int
    length: int
    crc32: int | None
    names: list[str]
    is_checked: bool = False

    def listed_names(self) -> str:
        return listed(self.names)

    def told(self) -> str:
        return f"{self.listed_names()} in {self.file}, bytes {self.offset} to {self.offset + self.length}"


@dataclass
class _Chunk:
    """A rectangle of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Of its first element in the flattened tensor."""
    stop: int
    """After its last one."""
    blob: _Blob

    @property
    def is_range(self) -> bool:
        return self.stop - self.start == prod(self.sizes)


class _Folder:
    """The pieces of a sharded checkpoint."""

    def __init__(
        self,
        files: Files,
        sizes: dict[str, int],
        manifest: Manifest | None,
        metadata: Metadata,
        identity: int,
        weights_only: bool | None,
    ) -> None:
        self._files, self._metadata, self._weights_only = files, metadata, weights_only
        self._has_rest = REST in sizes
        self._blobs: dict[tuple[str, int], _Blob] = {}
        checksums = {
            (file, offset): (length, crc32)
            for file, pieces in (manifest.pieces if manifest is not None else {}).items()
            for offset, length, crc32 in pieces
        }
        self._blob_of: dict[Any, _Blob] = {}
        wrong: dict[str, str] = {}
        for index, place in metadata.storage_data.items():
            key = (place.relative_path, place.offset)
            if key not in self._blobs:
                length, crc32 = checksums.get(key, (place.length, None))
                if manifest is not None and (crc32 is None or length != place.length):
                    wrong[f"{place.relative_path} {place.offset}"] = (
                        f"{MANIFEST} and {DCP_METADATA} differ on {index.fqn}"
                    )
                self._blobs[key] = _Blob(*key, place.length, crc32, [])
            blob = self._blob_of[index.fqn, _ints(index.offset)] = self._blobs[key]
            blob.names.append(_piece_name(index.fqn, index.offset))
            if place.relative_path not in sizes:
                wrong[place.relative_path] = f"{place.relative_path} is missing, with {index.fqn} in it"
            elif sizes[place.relative_path] < place.offset + place.length:
                wrong.setdefault(
                    place.relative_path,
                    f"{place.relative_path} is truncated: it has {sizes[place.relative_path]} bytes, and {index.fqn} "
                    f"ends at {place.offset + place.length}",
                )
        self._chunks: dict[str, list[_Chunk]] = {}
        self._by_pieces: dict[Any, StoredTensor] = {}
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                if (name, None) not in self._blob_of:
                    wrong[name] = f"{name} is missing"
                continue
            chunks = self._chunks[name] = []
            for chunk in stored.chunks:
                offsets, sizes_ = _ints(chunk.offsets) or (), _ints(chunk.sizes) or ()
                found = self._blob_of.get((name, offsets))
                if found is None:
                    wrong[name] = f"the piece of {name} at {offsets} is missing"
                elif prod(sizes_):
                    start, stop = (
                        _flat(offsets, stored.size),
                        _flat([o + s - 1 for o, s in zip(offsets, sizes_)], stored.size),
                    )
                    chunks.append(_Chunk(offsets, sizes_, start, stop + 1, found))
            have = sum(prod(chunk.sizes) for chunk in chunks)
            if have < prod(stored.size):
                wrong.setdefault(name, f"{name} lacks {prod(stored.size) - have} of its {prod(stored.size)} elements")
        if wrong:
            raise DamagedCheckpointError(f"{files.path} is damaged: {listed(wrong.values(), 20)}. {_ADVICE}")
        self._identity = identity, zlib.crc32(repr(sorted(checksums.items())).encode())

    def rest(self) -> dict[str, Any]:
        """What is no tensor of a model or optimizer."""
        if not self._has_rest:
            return {}
        rest = self._load(REST, self._files.read(REST))
        if not isinstance(rest, dict):
            raise ValueError(f"{self._files.path}/{REST} holds a {type(rest).__name__}, and no dictionary.")
        return rest

    def value_of(self, name: str) -> Any:
        stored = self._metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            return self._load(name, self._checked(self._blob_of[name, None]))
        shape, dtype = stored.size, stored.properties.dtype

        def read(start: int, stop: int) -> Tensor:
            return self._range(name, shape, dtype, start, stop)

        if not shape:
            return read(0, 1).clone().view(())
        value = StoredTensor(name, shape, dtype, read, (os.path.basename(self._files.path), name, self._identity))
        # names of tied parameters have the same pieces, and are one tensor again
        pieces = tuple((chunk.offsets, chunk.blob.file, chunk.blob.offset) for chunk in self._chunks[name])
        return self._by_pieces.setdefault(pieces, value) if pieces else value

    def _load(self, what: str, data: bytes | memoryview) -> Any:
        try:
            return load_torch(io.BytesIO(data), weights_only=self._weights_only)
        except ForbiddenClassError as error:
            raise ValueError(f"{self._files.path}: {what}: {error}.") from error
        except Exception as error:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {what} cannot be read ({type(error).__name__}: {error}). {_ADVICE}"
            ) from error

    def _checked(self, blob: _Blob) -> memoryview:
        data = self._files.part(blob.file, blob.offset, blob.length)
        if not blob.is_checked and blob.crc32 is not None and zlib.crc32(data) != blob.crc32:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: the checksum of {blob.told()}, does not match. {_ADVICE}"
            )
        blob.is_checked = True
        return data

    def trust(self) -> None:
        for blob in self._blobs.values():
            blob.is_checked = True

    def _tensor(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        data = self._checked(chunk.blob)
        try:
            tensor = tensor_in(data)
        except Exception as error:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {chunk.blob.told()}, cannot be read ({type(error).__name__}: "
                f"{error}). {_ADVICE}"
            ) from error
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
            raise DamagedCheckpointError(
                f"{self._files.path} is damaged: {chunk.blob.told()}, is {tuple(tensor.shape)} in {tensor.dtype}, and "
                f"by {DCP_METADATA} {chunk.sizes} in {dtype}. {_ADVICE}"
            )
        return tensor

    def _range(self, name: str, shape: torch.Size, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """The elements ``[start, stop)`` of a flattened tensor, of the pieces that have any of them.

        Those of a single piece are its own, mapped memory.
        """
        chunks = [chunk for chunk in self._chunks[name] if chunk.start < stop and start < chunk.stop]
        if len(chunks) == 1 and chunks[0].is_range:
            tensor = self._tensor(chunks[0], dtype)
            if tensor.is_contiguous() and tensor.data_ptr() % dtype.itemsize == 0:
                return tensor.view(-1)[start - chunks[0].start : stop - chunks[0].start]
        out = torch.empty(stop - start, dtype=dtype)
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
        """Copy what a rectangle and a chunk have in common."""
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
        """All that has a checksum, and has not been held against it on opening."""
        for blob in self._blobs.values():
            if blob.crc32 is not None:
                yield Extent(blob.file, blob.offset, blob.length, blob.crc32, blob.listed_names)
                continue
            try:
                data = self._files.part(blob.file, blob.offset, blob.length)
                records = records_of(BufferFile(data))  # type: ignore[arg-type]
            except BrokenArchiveError:
                yield Extent(blob.file, blob.offset, blob.length, _NONE, blob.listed_names)
                continue
            for record in records:
                start = blob.offset + record.start
                yield Extent(blob.file, start, record.length, record.crc32, blob.listed_names)


def _ints(values: Any) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _flat(index: Any, shape: Any) -> int:
    """Where an element lies in the flattened tensor."""
    position = 0
    for number, size in zip(index, shape):
        position = position * size + number
    return position


def _piece_name(name: str, offset: Any) -> str:
    return f"{name} at {tuple(offset)}" if offset is not None and any(offset) else name


def _put(tree: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put a value where DCP's path says; keys that were no strings when it was saved are found all the same."""
    here: Any = tree
    for key, following in zip(path, path[1:]):
        key = _known_key(here, key)
        if here[key] is None:
            here[key] = [] if isinstance(following, int) else {}
        here = here[key]
    here[_known_key(here, path[-1])] = value


def _known_key(container: Any, key: str | int) -> Any:
    if isinstance(container, list):
        number = int(key)
        container.extend([None] * (number + 1 - len(container)))
        return number
    if key not in container and isinstance(key, str) and key.isdigit() and int(key) in container:
        return int(key)
    container.setdefault(key, None)
    return key


def _number_parameters(files: Files, tree: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]] | None]:
    """Optimizers' states by number, where Lightning has them, in the place of those by name, as DCP has them."""
    rest = dict(tree)
    states, names = [], []
    while f"optimizer_{len(states)}" in rest:
        saved = rest.pop(f"optimizer_{len(states)}")
        try:
            states.append(by_number(saved))
        except KeyError as error:
            raise ValueError(
                f"{files.path}: optimizer_{len(states)} has a state of {error}, which is in none of its param groups."
            ) from error
        names.append([name for group in saved["param_groups"] for name in group["params"]])
    return ({**rest, "optimizer_states": states}, names) if states else (rest, None)


def by_number(saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict in torch's ordinary form, of one by name, as DCP has it; the opposite of ``by_name``.

    Raises:
        KeyError: for a state of what is in no param group.
    """
    groups: list[dict[str, Any]] = []
    number_of: dict[Any, int] = {}
    for group in saved["param_groups"]:
        first = len(number_of)
        number_of |= {name: first + position for position, name in enumerate(group["params"])}
        groups.append({**group, "params": list(range(first, len(number_of)))})
    state = {number_of[name]: value for name, value in saved.get("state", {}).items()}
    return {**saved, "state": dict(sorted(state.items())), "param_groups": groups}


# -- both --------------------------------------------------------------------------------------------------------------


def _as_lightnings(tree: dict[str, Any]) -> dict[str, Any]:
    """A dictionary with the weights where Lightning has them."""
    if "state_dict" in tree:
        return tree
    if isinstance(tree.get("model"), dict):  # FSDP's, and Fabric's by convention
        return {"state_dict": tree["model"], **{key: value for key, value in tree.items() if key != "model"}}
    return {"state_dict": tree} if any(isinstance(value, Tensor) for value in tree.values()) else tree


def _tensors_in(tree: Any) -> dict[str, Tensor]:
    """All tensors in nested dictionaries and lists, by dotted name."""
    found: dict[str, Tensor] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, dict):  # no other mapping: a configuration would resolve what it refers to
            for key, item in value.items():
                visit(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                visit(item, f"{name}.{number}" if name else str(number))

    visit(tree, "")
    return found


def _check_format(files: Files, number: Any) -> None:
    try:
        check_format(number)
    except UnknownFormatError as error:
        raise ValueError(f"{files.path} was written by a newer lightning_zero: {error}.") from error


def _share(extents: list[Extent], number: int, of: int) -> list[Extent]:
    """One of several shares of about as many bytes."""
    loads = [0] * of
    mine = []
    for extent in sorted(extents, key=lambda extent: (-extent.length, extent.file, extent.start)):
        least = loads.index(min(loads))
        loads[least] += extent.length
        if least == number:
            mine.append(extent)
    return mine


def _checksum(file: Any, extent: Extent, room: memoryview, progress: Callable[[int], None] | None) -> int:
    file.seek(extent.start)
    crc32, left = 0, extent.length
    while left:
        count = file.readinto(room[: min(left, len(room))])
        if not count:
            break  # truncated since it was opened: the checksum says so
        crc32 = zlib.crc32(room[:count], crc32)
        left -= count
        if progress is not None:
            progress(count)
    return crc32


def _told(extent: Extent) -> str:
    where = f" in {extent.file}" if extent.file else ""
    return f"{extent.holds()}{where}, bytes {extent.start} to {extent.start + extent.length}"
