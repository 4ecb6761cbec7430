"""Reports on runs: a manifest written during the run, and a page and a model card made from the run's records."""

from lightning_zero.reporting.manifest import RunManifest

__all__ = ["RunManifest"]
