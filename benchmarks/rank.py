"""One rank that trains a model with one of the systems on its own data, and records each step's time."""

import os
import time

import torch
from models import batch_of, model_of
from systems import SYSTEMS, Conditions


class Rank:
    """Trains one rank; the weights are the same on all ranks, the data are not.

    Args:
        sequence: tokens in a sequence, for models that read tokens.
        shrunk: see ``models.sizes_of``.
    """

    def __init__(
        self,
        system: str,
        model: str,
        conditions: Conditions,
        batch: int,
        sequence: int,
        shrunk: bool = False,
    ) -> None:
        torch.manual_seed(0)
        with conditions.device:  # a GPU initialises large models in seconds
            module = model_of(model, sequence, shrunk)
        self.parameters = sum(p.numel() for p in module.parameters())
        self._training = SYSTEMS[system](module, conditions)
        self._device = conditions.device
        self._model, self._batch, self._sequence, self._shrunk = model, batch * conditions.accumulate, sequence, shrunk
        self._generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        # Autograd runs on the main thread for a CPU, and on one of its own for a GPU.
        self._cpu_clock = time.thread_time if self._device.type == "cpu" else time.process_time
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def step(self) -> None:
        batch = batch_of(self._model, self._batch, self._sequence, self._generator, self._shrunk)
        inputs, targets = (tensor.to(self._device) for tensor in batch)
        started, cpu_started = time.perf_counter(), self._cpu_clock()
        loss = self._training.step(inputs, targets)
        self.cpu_seconds.append(self._cpu_clock() - cpu_started)
        self.losses.append(loss.item())
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # other streams than the loss's, too
        self.seconds.append(time.perf_counter() - started)
