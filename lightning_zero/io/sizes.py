"""Sizes in bytes as text."""

from __future__ import annotations


def in_gb(nbytes: float) -> str:
    """Format a number of bytes in GB, so that sizes can be compared."""
    return f"{nbytes / 1e9:.3g} GB"


def in_bytes(number: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
