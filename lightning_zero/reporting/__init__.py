"""Reports on runs: a manifest written at the beginning, and a page and a model card made from the records."""

from lightning_zero.reporting.manifest import RunManifest

__all__ = ["RunManifest"]
