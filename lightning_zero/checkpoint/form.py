"""Names and manifest of our checkpoint formats; the manifest shows whether a sharded checkpoint is complete."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""Format version that is written; this version and earlier ones can be read."""

CHECKPOINT_KEY = "lightning_zero"
"""Key of our own entry in a Lightning checkpoint."""

NAMES = "optimizer_names"
"""Key within our entry of a full checkpoint: each optimizer's parameter names, by the optimizer's key in a folder."""

CONTAINERS = "containers"
"""Key within our entry of a sharded checkpoint: the containers that DCP's dotted names cannot express, which are empty
ones and dictionaries with keys that are not strings."""

DCP_METADATA = ".metadata"
"""File with the names, shapes and offsets of all tensors, as ``torch.distributed.checkpoint`` writes and reads it."""

REST = "meta.pt"
"""File with everything but the tensors of models and optimizers, named as by Lightning's own sharded strategies."""

MANIFEST = "lightning_zero.json"
"""Manifest file, written last: sizes and checksums of all other files."""

SAVE_ID = "lightning_zero"
"""The ``save_id`` in DCP's metadata of a folder with a manifest; other programs write random ids, or none."""


def configs_of_models(module: Any) -> dict[str, str]:
    """Return the ``config.json`` of each transformers model in a module, by name; required to create the model again.

    Args:
        module: an ``nn.Module``; if the module itself is such a model, its name is empty.
    """
    found: dict[str, str] = {}
    for name, inner in module.named_modules():
        is_model = hasattr(inner, "save_pretrained") and hasattr(getattr(inner, "config", None), "to_json_string")
        if is_model and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = inner.config.to_json_string()
    return found


class UnknownFormatError(ValueError):
    """The checkpoint has a format version that this package does not know."""


@dataclass
class Manifest:
    """Sizes and checksums (``zlib.crc32``) of a sharded checkpoint's files.

    Attributes:
        written_by: versions, stage and world size.
        files: ``{"bytes": ..., "crc32": ...}`` by file name; the checksum is ``None`` if the pieces have checksums.
        pieces: ``[offset, length, crc32]`` of each piece, by name of the data file.
    """

    written_by: dict[str, Any]
    files: dict[str, dict[str, int | None]] = field(default_factory=dict)
    pieces: dict[str, list[list[int]]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, "written_by": self.written_by, "files": self.files, "pieces": self.pieces}
        return _encoded({**body, "crc32": zlib.crc32(_encoded(body))})

    @classmethod
    def of_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest.

        Raises:
            UnknownFormatError: if a newer version wrote it.
            ValueError: if it is damaged.
        """
        body = json.loads(data)
        expected = body.pop("crc32")
        if zlib.crc32(_encoded(body)) != expected:
            raise ValueError("its checksum is not that of its contents")
        check_format(body["format"])
        return cls(body["written_by"], body["files"], body["pieces"])


def check_format(number: Any) -> None:
    """Refuse a format version that is newer than this package's.

    Raises:
        UnknownFormatError: if it is newer.
    """
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise UnknownFormatError(
            f"it is of format {number!r}, and this version of lightning_zero reads formats up to {FORMAT}: update it, "
            "pip install -U lightning_zero"
        )


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
