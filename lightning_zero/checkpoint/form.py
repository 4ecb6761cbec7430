"""What a sharded checkpoint consists of, and the manifest by which it is known to be whole."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""Of checkpoints written by this version; a reader knows this one and those before."""

CHECKPOINT_KEY = "lightning_zero"
"""Where a checkpoint of Lightning's keeps what is ours."""

NAMES = "optimizer_names"
"""Under our key in a file: by the key that a folder has for an optimizer, the names by which it keeps the state."""

CONTAINERS = "containers"
"""Under our key in a folder: dictionaries and lists of what DCP keeps that its dotted names do not tell: those with
nothing in them, and keys that are no strings."""

DCP_METADATA = ".metadata"
"""Names, shapes and places of all tensors, as ``torch.distributed.checkpoint`` writes and reads it."""

REST = "meta.pt"
"""What is no tensor of the model or an optimizer, where Lightning's own strategies for sharded models put it."""

MANIFEST = "lightning_zero.json"
"""Written last: sizes and checksums of all else."""

SAVE_ID = "lightning_zero"
"""Of a save, in DCP's metadata: the folder has a manifest. Other programs have random numbers there, or nothing."""


def configs_of_models(module: Any) -> dict[str, str]:
    """By name, the ``config.json`` of each model of transformers that a module wraps, without which no one can make it.

    Args:
        module: an ``nn.Module``; one that is such a model itself has the empty name.
    """
    found: dict[str, str] = {}
    for name, inner in module.named_modules():
        is_model = hasattr(inner, "save_pretrained") and hasattr(getattr(inner, "config", None), "to_json_string")
        if is_model and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = inner.config.to_json_string()
    return found


class UnknownFormatError(ValueError):
    """A checkpoint of a version that this one does not know."""


@dataclass
class Manifest:
    """Sizes and checksums (``zlib.crc32``) of a sharded checkpoint's files.

    Attributes:
        written_by: versions, stage and world size.
        files: by name, ``{"bytes": ..., "crc32": ...}``; ``None`` where the pieces have the checksums.
        pieces: by name of a data file, ``[offset, length, crc32]`` of each piece in it.
    """

    written_by: dict[str, Any]
    files: dict[str, dict[str, int | None]] = field(default_factory=dict)
    pieces: dict[str, list[list[int]]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body = {"format": FORMAT, "written_by": self.written_by, "files": self.files, "pieces": self.pieces}
        return _encoded({**body, "crc32": zlib.crc32(_encoded(body))})

    @classmethod
    def of_bytes(cls, data: bytes) -> Manifest:
        """Read one back.

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
    """Refuse what a later version wrote.

    Raises:
        UnknownFormatError: then.
    """
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise UnknownFormatError(
            f"it is of format {number!r}, and this version of lightning_zero reads formats up to {FORMAT}: update it, "
            "pip install -U lightning_zero"
        )


def _encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
