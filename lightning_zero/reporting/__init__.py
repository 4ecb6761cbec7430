"""Reports on runs: each run writes a manifest, and its records are rendered as a page and a model card."""

from lightning_zero.reporting.manifest import RunManifest

__all__ = ["RunManifest"]
