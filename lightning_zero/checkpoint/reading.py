"""Open checkpoints of any origin: contents by name, with tensors that are only read when they are needed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import IO, Any, Literal

import torch
from torch import Tensor

from lightning_zero.checkpoint.checksums import ADVICE, DamagedCheckpointError, Extent, NoCheckpointError, verify
from lightning_zero.checkpoint.commit import stand_in
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.folder import (
    Folder,
    check_has_manifest,
    check_is_dcp,
    manifest_of,
    metadata_of,
    odd_keys,
    put,
)
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, CONTAINERS, DCP_METADATA, UnknownFormatError, check_format
from lightning_zero.checkpoint.records import BrokenArchiveError, Record, ends_as_archive, read_checked, records_of
from lightning_zero.checkpoint.restricted import ForbiddenClassError, load_torch, with_way_out
from lightning_zero.engine.compat import FakeTensorMode, tree_map_only
from lightning_zero.engine.tensor.lazy_tensor import StoredTensor


@dataclass
class OpenedCheckpoint:
    """An opened checkpoint.

    Attributes:
        path: as given.
        form: "full" for one file, "sharded" for a DCP folder.
        written_by: versions, stage and world size, as far as the checkpoint records them.
        checkpoint: Lightning's dictionary: ``state_dict``, ``optimizer_states`` with parameters by number, and all
        other
            entries. Tensors are mapped from a local file; those of a sharded checkpoint are ``StoredTensor``.
        as_saved: the dictionary as it was passed to the saving function; optimizer states by name if DCP has them so.
        names_of_optimizers: each optimizer's parameter names in the order of their numbers; None if unknown.
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
        """All tensors of ``checkpoint`` by dotted name, for example ``optimizer_states.0.state.3.exp_avg``."""
        return _tensors_in(self.checkpoint)

    @property
    def bytes_to_verify(self) -> int:
        """Number of bytes that ``verify`` reads."""
        return sum(extent.length for extent in self._extents())

    def verify(self, progress: Callable[[int], None] | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Verify everything, or a share of it, against its checksums. Needs only a few MiB of memory.

        Args:
            progress: called with the number of bytes of each read.
            share: ``(number, of)``: which share this is when several processes divide the work.

        Raises:
            DamagedCheckpointError: naming everything that is damaged.
        """
        verify(self._files, self._extents(), progress, share)

    def trust(self) -> None:
        """Skip the verification of each piece on reading, because ``verify`` has run for all shares."""
        self._trust()


@contextmanager
def _keeping_all() -> Iterator[None]:
    """Disable the garbage collector while thousands of long-lived objects are created: it would rescan all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_keeping_all()
def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> OpenedCheckpoint:
    """Open a checkpoint without reading the values of large tensors.

    Args:
        path: a Lightning file, or a folder of ``torch.distributed.checkpoint``: written by us, FSDP2 or another
        program.
            Local, or an fsspec URL.
        weights_only: ``False`` unpickles any objects that the project's hooks have added, which can run code: only for
            trusted checkpoints. Otherwise classes must be allowed by ``torch.serialization.add_safe_globals``.

    Raises:
        FileNotFoundError: if there is nothing at the path, or an empty folder.
        NoCheckpointError: if the path contains no checkpoint.
        ValueError: if a later version wrote it, or it names classes that are not allowed.
        DamagedCheckpointError: if damage shows without reading all of it.
    """
    files = Files(path)
    if not files.exists and (aside := stand_in(files.path)) is not None:
        files = Files(aside)
    if not files.exists:
        raise FileNotFoundError(
            f"Checkpoint file not found: {files.path}. A checkpoint is a file of Lightning's, or a folder of sharded "
            f"ones with {DCP_METADATA} in it."
        )
    return _open_folder(files, weights_only) if files.is_folder else _open_file(files, weights_only)


# -- one file ----------------------------------------------------------------------------------------------------------


def _open_file(files: Files, weights_only: bool | None) -> OpenedCheckpoint:
    size = files.size()
    with files.open() as file:
        head = file.read(4)
        if head[:1] == b"\x80":  # torch before 1.6: a bare pickle, without sizes or checksums
            records, loadable = [], False
        elif head == b"PK\x03\x04" or ends_as_archive(file):
            records, loadable = _records_of_file(files, file, size), files.is_local
        elif not any(head) or b"PK\x03\x04".startswith(head):
            # A file that was not synced before a power failure may consist of zeros.
            raise DamagedCheckpointError(
                f"{files.path} ({size} bytes) is damaged: it {_beginning(head)}, as after a crash while it was "
                f"written. {ADVICE}"
            )
        else:
            raise NoCheckpointError(
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
            raise ValueError(f"{files.path}: {with_way_out(error)}.") from error
        except Exception as error:
            if "PytorchStreamReader" in str(error):  # the pickle names a record that the archive lacks
                raise DamagedCheckpointError(
                    f"{files.path} ({size} bytes) is damaged: {str(error).splitlines()[0]}. {ADVICE}"
                ) from error
            kind = ValueError if isinstance(error, (OSError, MemoryError)) else NoCheckpointError
            raise kind(
                f"{files.path} ({size} bytes) cannot be read as a checkpoint: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(checkpoint, dict):
        raise NoCheckpointError(
            f"{files.path} is no checkpoint: it holds a {type(checkpoint).__name__}, and no dictionary."
        )
    as_saved, checkpoint = checkpoint, _as_lightnings(checkpoint)
    ours = checkpoint.get(CHECKPOINT_KEY, {})
    if "format" in ours:
        _check_format(files, ours["format"])
    written_by = dict(ours.get("written_by", {}))
    if not written_by and "pytorch-lightning_version" in checkpoint:
        written_by = {"lightning": checkpoint["pytorch-lightning_version"]}

    def extents() -> Iterator[Extent]:
        names: dict[int, list[str]] = {}

        def holds(record: Record) -> list[str]:
            if not names:
                names.update(_names_by_offset(files) or {-1: []})
            return names.get(record.start, [record.name])

        for record in records:
            if record.length and record.crc32 is not None:
                yield Extent("", record.start, record.length, record.crc32, partial(holds, record))

    return OpenedCheckpoint(files.path, "full", written_by, checkpoint, as_saved, None, files, extents)


def _beginning(head: bytes) -> str:
    if any(head):
        return "is truncated"
    return "begins with zeros" if head else "is empty"


def _records_of_file(files: Files, file: IO[bytes], size: int) -> list[Record]:
    try:
        records = records_of(file)
        pickled = next((record for record in records if record.name.endswith("/data.pkl")), None)
        for record in records:
            if "/data/" not in record.name:
                read_checked(file, record)
    except BrokenArchiveError as error:
        raise DamagedCheckpointError(
            f"{files.path} ({size} bytes) is damaged: it is truncated or was altered ({error}). {ADVICE}"
        ) from error
    if pickled is None:
        raise NoCheckpointError(f"{files.path} is no checkpoint: a zip archive, but not one of torch.save.")
    return records


def _load_mapped(files: Files, weights_only: bool | None) -> Any:
    try:
        return load_torch(files.local_path, weights_only=weights_only, mmap=True)
    except RuntimeError as error:
        if "unable to mmap" not in str(error):
            raise
    # torch's mapping is writable, for which the system reserves memory, so it failed for a file larger than memory.
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
    """Return the tensors in each record of a file, by the record's offset. Reads the file's pickle once more."""
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
    check_is_dcp(files, sizes)
    manifest = manifest_of(files, sizes)
    metadata, identity = metadata_of(files)
    check_has_manifest(files, manifest, metadata)
    folder = Folder(files, sizes, manifest, metadata, identity, weights_only)
    tree = folder.rest()
    ours = tree.get(CHECKPOINT_KEY, {})
    if CONTAINERS in ours:
        tree |= ours.pop(CONTAINERS)
        if not ours:
            del tree[CHECKPOINT_KEY]
    keys = odd_keys(tree)
    for name, value in folder.values(metadata):
        put(tree, (metadata.planner_data or {}).get(name, (name,)), value, keys)
    checkpoint, names_of_optimizers = _number_parameters(files, tree)
    checkpoint = _as_lightnings(checkpoint)
    written_by = manifest.written_by if manifest is not None else {}
    return OpenedCheckpoint(
        files.path, "sharded", written_by, checkpoint, tree, names_of_optimizers, files, folder.extents, folder.trust
    )


def _number_parameters(files: Files, tree: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]] | None]:
    """Convert optimizer states by parameter name, as in DCP, to states by number under Lightning's key."""
    rest = dict(tree)
    states: list[dict[str, Any]] = []
    names: list[list[str]] = []
    while "param_groups" in (rest.get(f"optimizer_{len(states)}") or ()):
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
    """Convert an optimizer state dict by parameter name, as in DCP, to torch's ordinary form. Inverse of ``by_name``.

    Raises:
        KeyError: if a state belongs to a parameter that is in no param group.
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
    """Return a dictionary with the weights under Lightning's key."""
    if "state_dict" in tree:
        return tree
    if isinstance(tree.get("model"), dict):  # the key of FSDP and, by convention, of Fabric projects
        return {"state_dict": tree["model"], **{key: value for key, value in tree.items() if key != "model"}}
    return {"state_dict": tree} if any(isinstance(value, Tensor) for value in tree.values()) else tree


def _tensors_in(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Return all tensors in nested dictionaries and lists by dotted name."""
    if isinstance(tree, Tensor):
        return {name: tree}
    if isinstance(tree, dict):  # other mappings are skipped: a configuration would resolve interpolations
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, item in items:
        found.update(_tensors_in(item, f"{name}.{key}" if name else str(key)))
    return found


def _check_format(files: Files, number: Any) -> None:
    try:
        check_format(number)
    except UnknownFormatError as error:
        raise ValueError(f"{files.path} was written by a newer lightning_zero: {error}.") from error
