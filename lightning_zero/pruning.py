"""The public import path of magnitude pruning."""

from lightning_zero.callbacks.pruning import MagnitudePruning, magnitude_masks, pruned_numels

__all__ = ["MagnitudePruning", "magnitude_masks", "pruned_numels"]
