"""Open checkpoints of any supported form as dictionaries, whose tensors are read only when they are needed."""

from __future__ import annotations

import copy
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, Literal

from torch import Tensor

from lightning_zero.checkpoint.checksums import (
    BrokenArchiveError,
    DamagedCheckpointError,
    Extent,
    NoCheckpointError,
    records_of,
    verify,
)
from lightning_zero.checkpoint.files import Files
from lightning_zero.checkpoint.folder import read_folder
from lightning_zero.checkpoint.form import CHECKPOINT_KEY, DCP_METADATA, check_format
from lightning_zero.checkpoint.pickles import UnsafeFileError
from lightning_zero.checkpoint.restricted import load_torch
from lightning_zero.checkpoint.trees import check_structure, values_in


@dataclass
class OpenedCheckpoint:
    """An opened checkpoint.

    Attributes:
        form: "full" for one file, "sharded" for a DCP folder.
        written_by: versions, stage and world size, as far as the checkpoint records them.
        checkpoint: contents as Lightning's dictionary, with ``optimizer_states`` keyed by parameter number. Tensors of
            a sharded checkpoint are ``LazyTensor``; those of a local file are memory-mapped.
        as_saved: contents as passed to the saving function; in the sharded form, optimizer states are keyed by name.
        names_of_optimizers: each optimizer's parameter names, ordered by parameter number; None if unknown.
    """

    path: str
    form: Literal["full", "sharded"]
    written_by: dict[str, Any]
    checkpoint: dict[str, Any]
    as_saved: dict[str, Any]
    names_of_optimizers: list[list[str]] | None
    _files: Files = field(repr=False)
    _extents: Collection[Extent] = field(repr=False)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of ``checkpoint`` by dotted name, for example ``optimizer_states.0.state.3.exp_avg``."""
        values = values_in(self.checkpoint)
        return {".".join(map(str, path)): value for path, value in values if isinstance(value, Tensor)}

    @property
    def bytes_to_verify(self) -> int:
        return sum(extent.length for extent in self._extents)

    def verify(self, share: tuple[int, int] = (0, 1)) -> None:
        """Verify the checkpoint, or a share of it, against its checksums. Opening and reading do not verify tensors."""
        verify(self._files, self._extents, share)


def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> OpenedCheckpoint:
    """Open a checkpoint without reading the values of large tensors.

    Args:
        path: a Lightning file, or a ``torch.distributed.checkpoint`` folder written by this package, FSDP2 or another
            program; a local path or an fsspec URL.
        weights_only: ``False`` unpickles objects of any class, for example those added by hooks. Unpickling can run
            code, so use ``False`` only for checkpoints whose source you trust.

    Raises:
        FileNotFoundError: if the path does not exist, or is an empty folder.
        NoCheckpointError: if the path contains no checkpoint.
        UnsafeFileError: if the checkpoint contains more than data.
        ValueError: if the checkpoint was written by a later version.
        DamagedCheckpointError: if damage is apparent without reading the whole checkpoint.
    """
    files = Files(path)
    if not files.exists:
        raise FileNotFoundError(
            f"Checkpoint file not found: {files.path}. A checkpoint is a Lightning file, or a folder that contains "
            f"{DCP_METADATA}."
        )
    try:
        if files.is_folder:
            return _open_folder(files, weights_only)
        return _open_file(files.downloaded(), weights_only)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise DamagedCheckpointError.of(
            files.path, f"its contents are not those of a checkpoint ({type(error).__name__}: {error})"
        ) from error


def open_for_run(path: str | os.PathLike[str], weights_only: bool | None) -> OpenedCheckpoint:
    """Call ``open_checkpoint`` for the Trainer or Fabric, and name their ``weights_only=False`` in errors."""
    try:
        return open_checkpoint(path, weights_only=weights_only)
    except UnsafeFileError as error:
        if weights_only is False:  # a sharded checkpoint's metadata never need other objects
            raise
        raise UnsafeFileError(f"{str(error).rstrip('.')}; if you do, pass weights_only=False.") from None


# -- one file ----------------------------------------------------------------------------------------------------------


def _open_file(files: Files, weights_only: bool | None) -> OpenedCheckpoint:
    path = f"{files.path} ({files.size()} bytes)"
    records: list[Extent] = []
    with files.open() as file:
        head = file.read(4)
        is_older = head[:1] == b"\x80"  # torch before 1.6 wrote bare pickles, without sizes or checksums
        if head == b"PK\x03\x04" or (not is_older and zipfile.is_zipfile(file)):
            records = _records_of_file(path, file)
        elif not any(head) or b"PK\x03\x04".startswith(head):
            # A file that was not synced before a power failure may consist of zeros.
            raise DamagedCheckpointError.of(path, "it is empty, cut off or begins with zeros, as after a crash")
        elif not is_older:
            raise NoCheckpointError(
                f"{path} is not a checkpoint: it is neither a torch.save file nor a folder that contains "
                f"{DCP_METADATA}."
            )
    try:
        checkpoint = load_torch(files, weights_only=weights_only)
    except UnsafeFileError as error:
        raise UnsafeFileError(f"{files.path}: {error}.") from error
    except BrokenArchiveError as error:
        raise DamagedCheckpointError.of(path, str(error)) from error
    except Exception as error:
        kind = ValueError if isinstance(error, (OSError, MemoryError)) else NoCheckpointError
        raise kind(f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}") from error
    if not isinstance(checkpoint, dict):
        raise NoCheckpointError(
            f"{files.path} is not a checkpoint: it contains a {type(checkpoint).__name__} instead of a dictionary."
        )
    check_structure(files.path, checkpoint)
    as_saved, checkpoint = checkpoint, _as_lightnings(checkpoint)
    ours = checkpoint.get(CHECKPOINT_KEY, {})
    if "format" in ours:
        check_format(files.path, ours["format"])
    written_by = dict(ours.get("written_by", {}))
    if not written_by and "pytorch-lightning_version" in checkpoint:
        written_by = {"lightning": checkpoint["pytorch-lightning_version"]}
    extents = [record for record in records if record.length and record.crc32 is not None]
    return OpenedCheckpoint(files.path, "full", written_by, checkpoint, as_saved, None, files, extents)


def _records_of_file(path: str, file: IO[bytes]) -> list[Extent]:
    """List an archive's records, and verify all records except those that hold tensor values."""
    try:
        records = records_of(file)
        for record in records:
            if "/data/" not in record.holds[0] and record.crc32 is not None:
                file.seek(record.start)
                if zlib.crc32(file.read(record.length)) != record.crc32:
                    raise BrokenArchiveError(f"the checksum of record {record.holds[0]} does not match")
    except BrokenArchiveError as error:
        raise DamagedCheckpointError.of(path, f"it is truncated or was altered ({error})") from error
    if not any(record.holds[0].endswith("/data.pkl") for record in records):
        raise NoCheckpointError(f"{path} is not a checkpoint: it is a zip archive not written by torch.save.")
    return records


# -- a folder ----------------------------------------------------------------------------------------------------------


def _open_folder(files: Files, weights_only: bool | None) -> OpenedCheckpoint:
    tree, written_by, extents = read_folder(files, weights_only)
    check_structure(files.path, tree)
    checkpoint, names = _number_parameters(files.path, tree)
    checkpoint = _as_lightnings(checkpoint)
    return OpenedCheckpoint(files.path, "sharded", written_by, checkpoint, tree, names, files, extents)


def _number_parameters(path: str, tree: dict[str, Any]) -> tuple[dict[str, Any], list[list[str]] | None]:
    """Convert DCP's optimizer states, keyed by parameter name, to Lightning's ``optimizer_states``, keyed by number."""
    rest = copy.copy(tree)
    states: list[dict[str, Any]] = []
    names: list[list[str]] = []
    while isinstance(state := rest.get(key := f"optimizer_{len(states)}"), dict) and "param_groups" in state:
        del rest[key]
        states.append(by_number(state, f"{path}: {key}"))
        names.append(names_by_number(state))
    return ({**rest, "optimizer_states": states}, names) if states else (rest, None)


def by_number(saved: Mapping[str, Any], what: str = "The optimizer's state") -> dict[str, Any]:
    """Convert an optimizer state dict keyed by parameter name, as in DCP, to torch's numbered form; see ``by_name``."""
    groups: list[dict[str, Any]] = []
    number_of: dict[Any, int] = {}
    for group in saved["param_groups"]:
        first = len(number_of)
        number_of |= {name: first + position for position, name in enumerate(group["params"])}
        groups.append({**group, "params": list(range(first, len(number_of)))})
    states = saved.get("state", {})
    # an entry that belongs to no parameter keeps its name; a dict is the state of a parameter
    own = {name: value for name, value in states.items() if name not in number_of and not isinstance(value, dict)}
    if lost := [name for name in states if name not in number_of and name not in own]:
        raise ValueError(f"{what} has state for {lost[0]!r}, which is in none of its param groups.")
    state = {number_of[name]: value for name, value in states.items() if name not in own}
    return {**saved, "state": own | dict(sorted(state.items())), "param_groups": groups}


def names_by_number(saved: Mapping[str, Any]) -> list[Any]:
    """Return the parameters' names in an optimizer state dict, ordered by number; see ``by_number``."""
    return [name for group in saved["param_groups"] for name in group["params"]]


# -- both --------------------------------------------------------------------------------------------------------------


def _as_lightnings(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a dictionary whose weights, if there are any, are under Lightning's key ``state_dict``."""
    if "state_dict" in tree:
        return tree
    if isinstance(tree.get("model"), dict):  # the key used by FSDP and, by convention, Fabric projects
        return {"state_dict": tree["model"], **{key: value for key, value in tree.items() if key != "model"}}
    return {"state_dict": tree} if any(isinstance(value, Tensor) for value in tree.values()) else tree
