"""The strategy for Lightning Fabric, at the public import path."""

from lightning_zero.strategies.fabric import ZeroStrategy as ZeroStrategy
