"""The package's version, which checkpoints also record."""

__version__ = "0.1.0"
