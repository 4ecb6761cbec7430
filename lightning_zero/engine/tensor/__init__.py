"""Tensor subclasses that user code sees in place of sharded parameters and gradients, and of stored values."""

from lightning_zero.engine.tensor import dispatch as dispatch  # installs the operators' handlers
