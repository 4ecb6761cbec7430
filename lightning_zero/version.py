"""The package's version, which checkpoints record too."""

__version__ = "0.1.0"
