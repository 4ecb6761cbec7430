"""Opening a checkpoint, whatever wrote it: its contents by name, with values that stay where they are until needed."""

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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

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
from lightning_zero.engine.stored import StoredTensor


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
        verify(self._files, self._extents(), progress, share)

    def trust(self) -> None:
        """Read pieces without holding each against its checksum once more: all shares have been verified."""
        self._trust()


@contextmanager
def _keeping_all() -> Iterator[None]:
    """Collect no garbage while thousands of objects are made that stay: it would look at all of them time and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_keeping_all()
def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> OpenedCheckpoint:
    """Read what a checkpoint consists of, and of no large tensor the values.

    Args:
        path: of a file of Lightning's, or of a folder of ``torch.distributed.checkpoint``: ours, FSDP2's or another's.
            Local, or a URL that fsspec knows.
        weights_only: ``False`` unpickles whatever the project's hooks have put in, which runs code; for checkpoints of
            those one trusts. Otherwise classes have to be allowed by ``torch.serialization.add_safe_globals``.

    Raises:
        FileNotFoundError: if there is nothing at the path, or a folder with nothing in it.
        NoCheckpointError: if it is none.
        ValueError: if it is of a later version, or names classes that are not allowed.
        DamagedCheckpointError: if it is not as it was written, as far as that shows without reading all of it.
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
        if head[:1] == b"\x80":  # of torch before 1.6: a pickle, with nothing to tell whether it is whole
            records, loadable = [], False
        elif head == b"PK\x03\x04" or ends_as_archive(file):
            records, loadable = _records_of_file(files, file, size), files.is_local
        elif not any(head) or b"PK\x03\x04".startswith(head):
            # zeros are what a machine makes of a file that had not been synced when it lost its power
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
            if "PytorchStreamReader" in str(error):  # a record that the pickle names is not among those there are
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
    """Optimizers' states by number, where Lightning has them, in the place of those by name, as DCP has them."""
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


def _tensors_in(tree: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors in nested dictionaries and lists, by dotted name."""
    if isinstance(tree, Tensor):
        return {name: tree}
    if isinstance(tree, dict):  # no other mapping: a configuration would resolve what it refers to
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
