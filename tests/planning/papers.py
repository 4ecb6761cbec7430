"""The configurations in Table 3 of the ZeRO paper, as choices for ``make_plans``."""

from __future__ import annotations

from typing import Any

from lightning_zero.planning.advice import CHECKPOINTING, OFFLOADS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"stages": [1], "variants": [CHECKPOINTING["on"]]},
    "C2": {"stages": [1], "variants": [CHECKPOINTING["partitioned"]]},
    "C3": {"stages": [2], "variants": [CHECKPOINTING["on"]]},
    "C4": {"stages": [2], "variants": [CHECKPOINTING["partitioned"]]},
    "C5": {"stages": [2], "variants": [CHECKPOINTING["partitioned"] | OFFLOADS["activations"]]},
}
"""The engine always uses constant-size buffers (C_B), so the paper's columns for them are left out."""
