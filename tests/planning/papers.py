"""The configurations in Table 3 of the ZeRO paper, as choices for ``make_plans``."""

from __future__ import annotations

from typing import Any

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "C1": {"stages": [1], "checkpointing": [True], "offloads": ["none"]},
    "C2": {"stages": [1], "checkpointing": ["partitioned"], "offloads": ["none"]},
    "C3": {"stages": [2], "checkpointing": [True], "offloads": ["none"]},
    "C4": {"stages": [2], "checkpointing": ["partitioned"], "offloads": ["none"]},
    "C5": {"stages": [2], "checkpointing": ["partitioned"], "offloads": ["activations"]},
}
"""The engine always uses constant-size buffers (C_B), so the paper's columns for them are left out."""
