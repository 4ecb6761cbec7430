"""Tensor subclasses for sharded parameters and gradients, and for values that stay in a file until they are read."""

from lightning_zero.engine.tensor import dispatch as dispatch  # imported to install the operators' handlers
