"""Sizes in bytes as text."""

from __future__ import annotations


def in_gb(nbytes: float) -> str:
    """Format a number of bytes, always in GB, so that a reader can compare sizes."""
    return f"{nbytes / 1e9:.3g} GB"


def in_bytes(number: float) -> str:
    """Format a number of bytes in a suitable decimal unit, from B to TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
