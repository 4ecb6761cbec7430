"""A plain-torch training loop for DistributedDataParallel and for the engine, and the comparison of two runs."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.support.models import CLASSES, VOCABULARY, OddModel, adam
from tests.support.workers import rank, world_size

STEPS = 8
"""Enough for an error in any state to reach the weights; test_optimizers trains the contract's 20 steps."""

CLOSE = 1e-6
"""Relative tolerance where numbers are summed in another order, or a global norm is involved."""


def default_device() -> str:
    return torch.get_default_device().type


@dataclass(frozen=True)
class Recipe:
    """What to train, independently of the system that trains it.

    Arguments:
            model: creates the module; its forward takes tokens and targets and returns the loss.
            optimizer: creates the optimizer from the module.
        steps: optimizer steps.
        micro_batches: backward passes a step.
        clip: called with the module's parameters before each step.
        dtype: of the parameters; the inputs are integers.
            device: of parameters and inputs.
    """

    model: Callable[[], nn.Module] = OddModel
    optimizer: Callable[[nn.Module], Optimizer] = adam
    steps: int = STEPS
    micro_batches: int = 1
    clip: Callable[[Iterable[nn.Parameter]], Any] | None = None
    dtype: torch.dtype = torch.float32
    device: str = field(default_factory=default_device)


@dataclass(frozen=True)
class Run:
    """Result of a run: this rank's loss of each micro-batch, full weights and buffers at the end, engine's report."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    report: Any = None


def batch(index: int, of: int | None = None, device: str | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a rank's micro-batch `index` (default: this rank), the same in every run."""
    generator = torch.Generator().manual_seed(1000 * index + (rank() if of is None else of))
    tokens, targets = (torch.randint(n, (4, 6), generator=generator, device="cpu") for n in (VOCABULARY, CLASSES))
    return tokens.to(device or default_device()), targets.to(device or default_device())


def prepare(recipe: Recipe) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = recipe.model().to(recipe.device, recipe.dtype)
    return model, recipe.optimizer(model)


def trained_once(train: Callable[..., Any]) -> Callable[..., Any]:
    """Cache for a reference run that many cases compare with: each process trains it once per set of arguments.

    All ranks of a pool run the same cases, so either all ranks have a cached result, or none. Results must not be
    changed.
    """
    known: dict[bytes, Any] = {}

    @wraps(train)
    def train_or_recall(*args: Any, **kwargs: Any) -> Any:
        try:
            key = pickle.dumps((args, kwargs))
        except (AttributeError, pickle.PicklingError):  # functions defined within the case
            return train(*args, **kwargs)
        if key not in known:
            known[key] = train(*args, **kwargs)
        return known[key]

    return train_or_recall


@trained_once
def train_ddp(recipe: Recipe, dtype: torch.dtype | None = None) -> Run:
    """The reference run: DistributedDataParallel, or the bare module on one rank; under autocast with ``dtype``."""
    module, optimizer = prepare(recipe)
    model = DistributedDataParallel(module) if world_size() > 1 else module
    no_sync = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    losses = _loop(model, module, optimizer, recipe, no_sync, dtype)
    return Run(losses, {name: value.clone() for name, value in module.state_dict().items()})


def train_zero(recipe: Recipe, stage: int, **options: Any) -> Run:
    """The same run under the engine; `options` are the engine's. `compute_dtype` also enables autocast."""
    from lightning_zero.engine import Engine

    module, optimizer = prepare(recipe)
    engine = Engine(module, getattr(optimizer, "optimizers", [optimizer]), stage=stage, **options)
    no_sync = engine.no_sync if stage == 1 or "shard_within" in options else contextlib.nullcontext
    losses = _loop(module, module, optimizer, recipe, no_sync, options.get("compute_dtype"))
    run = Run(losses, engine.full_state_dict(), engine.report())
    engine.close()
    same_tensors(module.state_dict(), run.weights, bound=0)
    return run


def _loop(
    model: nn.Module,
    module: nn.Module,
    optimizer: Optimizer,
    recipe: Recipe,
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]],
    dtype: torch.dtype | None,
) -> list[Tensor]:
    losses = []
    # Created before the loop, which must not wait for a device.
    batches = [batch(index, device=recipe.device) for index in range(recipe.steps * recipe.micro_batches)]
    for index, inputs in enumerate(batches):
        last = (index + 1) % recipe.micro_batches == 0
        with contextlib.nullcontext() if last else no_sync():
            with torch.autocast(recipe.device, dtype) if dtype is not None else contextlib.nullcontext():
                loss = model(*inputs) / recipe.micro_batches
            loss.backward()
        losses.append(loss.detach().clone())
        if last:
            if recipe.clip is not None:
                recipe.clip(module.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def same_runs(run: Run, reference: Run, bound: float = 0) -> None:
    """Assert that losses and weights agree; see `same_tensors`."""
    for index, (loss, expected) in enumerate(zip(run.losses, reference.losses, strict=True)):
        same_tensors({f"loss {index}": loss}, {f"loss {index}": expected}, bound)
    same_tensors(run.weights, reference.weights, bound)


def same_tensors(tensors: dict[str, Tensor], reference: dict[str, Tensor], bound: float) -> None:
    """Assert equal names, shapes, dtypes, and values: bit for bit if `bound` is 0, else relative to the norm."""
    assert list(tensors) == list(reference), f"{list(tensors)} instead of {list(reference)}"
    for name, expected in reference.items():
        value, expected = tensors[name].cpu(), expected.cpu()
        assert value.shape == expected.shape, f"{name}: {tuple(value.shape)} instead of {tuple(expected.shape)}"
        assert value.dtype == expected.dtype, f"{name}: {value.dtype} instead of {expected.dtype}"
        if value.numel() == 0 or torch.equal(value, expected):
            continue
        relative = (value.double() - expected.double()).norm().item() / expected.double().norm().item()
        assert relative <= bound, f"{name}: differs by {relative:.1e} of its norm, allowed is {bound:.1e}"


def same_values(value: Any, expected: Any, where: str, bound: float = 0) -> None:
    """Assert the same structure, types and numbers, recursively; see `same_tensors`."""
    assert type(value) is type(expected), f"{where}: {type(value)} instead of {type(expected)}"
    # Versions of modules, from which `load_state_dict` infers what an older file lacks.
    assert getattr(value, "_metadata", None) == getattr(expected, "_metadata", None), f"{where}: other metadata"
    if isinstance(expected, dict):
        assert list(value) == list(expected), f"{where}: keys {list(value)} instead of {list(expected)}"
        for key in expected:
            same_values(value[key], expected[key], f"{where}.{key}", bound)
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected), f"{where}: {len(value)} instead of {len(expected)}"
        for index, (item, wanted) in enumerate(zip(value, expected, strict=True)):
            same_values(item, wanted, f"{where}[{index}]", bound)
    elif hasattr(expected, "__tensor_flatten__"):
        names, context = expected.__tensor_flatten__()
        assert value.__tensor_flatten__()[1] == context, f"{where}: {value.__tensor_flatten__()[1]}, not {context}"
        for name in names:
            same_values(getattr(value, name), getattr(expected, name), f"{where}.{name}", bound)
    elif isinstance(expected, Tensor):
        same_tensors({where: value}, {where: expected}, bound)
    elif isinstance(expected, float):
        assert value == expected or abs(value - expected) <= bound * abs(expected), (
            f"{where}: {value!r}, not {expected!r}"
        )
    else:
        assert value == expected, f"{where}: {value} instead of {expected}"


def same_on_every_rank(tensors: dict[str, Tensor]) -> None:
    """Assert that every rank has the same values, bit for bit."""
    if world_size() == 1:
        return
    for name, value in tensors.items():
        theirs = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(world_size())]
        dist.all_gather(theirs, value.contiguous())
        assert all(torch.equal(other, value) for other in theirs), f"{name} differs between ranks"
