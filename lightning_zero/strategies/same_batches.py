"""Checks that tensor-parallel ranks compute with the same batches and the same random numbers."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

from lightning_zero.engine import tensor_parallel

_FIRST, _EVERY = 4, 100
"""Training batches to compare: the first ``_FIRST``, then one in ``_EVERY``. Comparing copies a batch to the CPU."""

_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


class SameBatches:
    """Compares batches of tensor-parallel ranks. Collective, like the module's forward.

    Args:
        sampler: advice for the error message on how to create a sampler that gives these ranks the same batches.
    """

    def __init__(self, sampler: str) -> None:
        self._sampler = sampler
        self._seen: Counter[str] = Counter()

    def restart(self) -> None:
        """Treat the next batch as the first again."""
        self._seen.clear()

    def compare(self, tensor: tensor_parallel.TensorParallel, module: nn.Module, batch: Any, step: str) -> None:
        """Compare a batch with the other ranks' batches, if a comparison is due.

        Args:
            batch: tensors in nested lists, tuples and dictionaries.
            step: name of the step that uses the batch. For ``"training_step"``, the first batches and some later
                batches are compared; for other names, only the first batch.

        Raises:
            ValueError: on every rank, if the batch differs between ranks.
        """
        if tensor.size == 1:
            return
        number, trains = self._seen[step], step == "training_step"
        self._seen[step] += 1
        if number == 0 or (trains and (number < _FIRST or number % _EVERY == 0)):
            tensor.check_same(batch, self._sampler)
        if number == 0 and trains:
            _warn_of_random_numbers(tensor, module)


def _warn_of_random_numbers(tensor: tensor_parallel.TensorParallel, module: nn.Module) -> None:
    """Warn if a module applies dropout and tensor-parallel ranks would drop different elements."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    if tensor.control.is_alike("".join(hashlib.sha256(state.numpy().tobytes()).hexdigest() for state in states)):
        return
    for name, each in module.named_modules():
        if isinstance(each, _DROPOUT) and each.training and each.p > 0 and tensor.rank == 0:
            warnings.warn(
                f"The states of random number generators differ between tensor-parallel ranks {tensor.ranks}, so "
                f"{name or 'the module'} ({type(each).__name__}) drops different elements on each rank. Losses and "
                "gradients are then wrong where these ranks need equal values. Call seed_everything(seed) with the "
                "same seed on all ranks before training, and draw random numbers on all ranks or on none.",
                stacklevel=2,
            )
            return
