"""The public import path of the strategy for Lightning Fabric."""

from lightning_zero.strategies.fabric import ZeroStrategy as ZeroStrategy
