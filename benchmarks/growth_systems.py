"""Measurements in the workers of `growth.py`: steps of models with given numbers of tensors and units; model states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from models import model_of
from systems import LEARNING_RATE, cross_entropy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_zero.engine import Engine
from lightning_zero.engine.comm import backend_transport


class Unit(nn.Module):
    def __init__(self, tensors: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(width) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for vector in self.vectors:
            x = x * vector
        return x


def model_of_size(tensors: int, units: int, width: int) -> nn.Module:
    """Sequential units with the tensors distributed among them; the arithmetic is one multiplication per tensor."""
    shares = [tensors // units + (number < tensors % units) for number in range(units)]
    return nn.Sequential(*(Unit(share, width) for share in shares))


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Context as rank 0 of several in one process: torch's `fake` group, in which rank 0's data stands for all."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (makes the backend known)

    # not its FakeStore, which cannot be cloned
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def time_of_others() -> Iterator[Callable[[], float]]:
    """Context that measures the seconds spent outside the engine's own work.

    These are the group's gathers and reductions, for which the fake group copies a part per rank; and Adam's
    arithmetic, of which a rank does only its share: if it counted, the time saved there would hide the engine's cost.
    """
    spent = 0.0
    adam = import_module(torch.optim.Adam.__module__)
    places = [(backend_transport, "all_gather_single"), (backend_transport, "reduce_scatter_single"), (adam, "adam")]
    originals = [(place, name, getattr(place, name)) for place, name in places]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent += time.thread_time() - started

        return call

    for place, name, function in originals:
        setattr(place, name, timed(function))
    try:
        yield lambda: spent
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


def measure(system: str, tensors: int, units: int, width: int, warm_up: int, steps: int) -> dict[str, Any]:
    """CPU seconds of the training thread for setting up, and for each step without work outside the engine.

    For plain torch, a step is forward and backward.
    """
    plain = model_of_size(tensors, units, width)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    engine = None
    with time_of_others() as spent:
        started = time.thread_time()
        module: nn.Module = DistributedDataParallel(plain) if system == "ddp" else plain
        if system.startswith("zero"):
            engine = Engine(plain, [optimizer], stage=int(system[-1]), unit_numel=0)  # each block by itself
        setup = time.thread_time() - started
        batch, seconds = torch.ones(1, width), []
        for _ in range(warm_up + steps):
            started, before = time.thread_time(), spent()
            module(batch).sum().backward()
            if system != "single":
                optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.thread_time() - started - (spent() - before))
    if engine is not None:
        assert len(engine.units) == units, engine.units
        engine.close(communicate=dist.get_backend() != "fake")  # there is nobody to meet there
    return {"setup": setup, "seconds": seconds[warm_up:]}


def measure_memory(model: str, stage: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Bytes of this rank's model states when all exist, including gradients, and of everything at the peak."""
    on_gpu = device.type == "cuda"
    context = 16
    with device:
        module = model_of(model, context).to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    text = torch.randint(256, (1, context + 1), device=device)
    engine = Engine(module, [optimizer], stage=stage)

    def backward() -> None:
        cross_entropy(module(text[:, :-1]), text[:, 1:]).backward()

    for step in range(3):
        if step == 2:
            engine.reset_peak()  # the first allocates the optimizer's state
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        # at stage 1 the formula counts the gradients of micro-batches that are not reduced yet
        with engine.no_sync() if stage == 1 else nullcontext():
            backward()
        held = dict(engine.report().at_rest)
        allocated = torch.cuda.memory_allocated() if on_gpu else 0
        if stage == 1:
            backward()
        optimizer.step()
        optimizer.zero_grad()
    report = engine.report()
    engine.close(communicate=False)
    return {
        "stage": stage,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": report.numel,
        "formula": report.formula,
        "held": {category: nbytes for category, nbytes in held.items() if nbytes},
        "peak": report.peak,
        "allocated": allocated,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else 0,
    }
