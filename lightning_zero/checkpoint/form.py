"""Names and versions in our checkpoint formats."""

from __future__ import annotations

from typing import Any

FORMAT = 1
"""Format version of new checkpoints; checkpoints of this version and earlier ones can be read."""

CHECKPOINT_KEY = "lightning_zero"
"""Key of our own entry in a Lightning checkpoint."""

NAMES = "optimizer_names"
"""Key within our entry in a full checkpoint. Its value maps ``optimizer_0`` etc. to the optimizer's parameter names."""

LEFT_OUT = "left_out"
"""Key within our entry. Its value lists the parameters that were frozen and, on request, not saved."""

CONTAINERS = "containers"
"""Key within our entry in a sharded checkpoint of an earlier version. Its value holds the containers that DCP's dotted
names cannot express: empty containers, and dictionaries with keys that are not strings."""

VERSIONS = "module_versions"
"""Key within our entry in a sharded checkpoint. Its value maps the path of each state dict to its modules' versions."""

DCP_METADATA = ".metadata"
"""Name of DCP's metadata file (``torch.distributed.checkpoint``): the names, shapes and offsets of all tensors."""

REST = "meta.pt"
"""Name of the file with everything but the tensors of models and optimizers, as in Lightning's sharded checkpoints."""

MANIFEST = "lightning_zero.json"
"""Name of the file that we add to a sharded checkpoint, last. It says what wrote the checkpoint, and has the checksums
(``zlib.crc32``) of DCP's metadata and of ``REST``. The other files consist of archives with their own checksums."""

SAVE_ID = "lightning_zero"
"""The ``save_id`` that we write to DCP's metadata; other programs write a random id or none."""


def configs_of_models(module: Any) -> dict[str, str]:
    """Map the name of each outermost transformers model in a module to its configuration, the text of ``config.json``.

    If the module itself is such a model, its name is the empty string.
    """
    found: dict[str, str] = {}
    for name, inner in module.named_modules():
        is_model = hasattr(inner, "save_pretrained") and hasattr(getattr(inner, "config", None), "to_json_string")
        if is_model and not any(name.startswith(f"{outer}.") or not outer for outer in found):
            found[name] = inner.config.to_json_string()
    return found


def check_format(path: str, number: Any) -> None:
    """Refuse a format version that this package cannot read."""
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise ValueError(
            f"{path} has the format {number!r}, but this version of lightning_zero reads formats up to {FORMAT}. If a "
            "newer version wrote the checkpoint, update with: pip install -U lightning_zero."
        )
