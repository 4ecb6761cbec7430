"""Models with parameters of several dtypes: parameters and gradients keep their dtype, and numbers equal DDP's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from tests.support.models import CLASSES, VOCABULARY
from tests.support.training import batch, same_on_every_rank, same_tensors
from tests.support.workers import world_size


class Mixed(nn.Module):
    """An embedding, a body and a head of chosen dtypes, a complex filter, and an integer parameter used as an index."""

    def __init__(self, embed: torch.dtype, body: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=embed)
        self.body = nn.Sequential(nn.Linear(8, 24, dtype=body), nn.Tanh(), nn.Linear(24, 8, dtype=body))
        self.filter = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        self.head = nn.Linear(8, CLASSES, dtype=head)
        self.order = nn.Parameter(torch.tensor([5, 3, 1, 0, 2, 4]), requires_grad=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens[:, self.order])
        x = self.body(x.to(self.body[0].weight.dtype))
        spectrum = torch.fft.rfft(x.float()) * self.filter.sum(0)
        x = x + torch.fft.irfft(spectrum, 8)
        logits = self.head(x.to(self.head.weight.dtype)).float()
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def prepare(*dtypes: torch.dtype) -> tuple[nn.Module, Adam]:
    torch.manual_seed(0)
    module = Mixed(*dtypes)
    return module, Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)


def train(model: nn.Module, module: nn.Module, optimizer: Adam, **autocast: Any) -> list[Tensor]:
    losses = []
    for index in range(8):
        with torch.autocast("cpu", **(autocast or {"enabled": False})):
            loss = model(*batch(index))
        loss.backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, name
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def train_ddp(*dtypes: torch.dtype, **autocast: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    module, optimizer = prepare(*dtypes)
    model = DistributedDataParallel(module) if world_size() > 1 else module
    return train(model, module, optimizer, **autocast), module.state_dict()


def train_zero(stage: int, *dtypes: torch.dtype, compute_dtype: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(*dtypes)
    engine = Engine(module, [optimizer], stage=stage, compute_dtype=compute_dtype)
    losses = train(module, module, optimizer, **({"dtype": compute_dtype} if compute_dtype else {}))
    state = optimizer.state_dict()["state"]
    trained = [p for p in module.parameters() if p.requires_grad]
    for index, parameter in enumerate(trained):
        kept = torch.promote_types(parameter.dtype, torch.float32)
        assert state[index]["exp_avg"].dtype == kept, "the optimizer's state is as wide as the masters"
    engine.close()
    same_on_every_rank({name: value for name, value in module.state_dict().items() if not value.is_complex()})
    return losses, module.state_dict()


def mix() -> None:
    fp32, fp64 = torch.float32, torch.float64
    for dtypes in ((fp32, fp64, fp32), (fp64, fp32, fp64)):
        losses, weights = train_ddp(*dtypes)
        for stage in (1, 2, 3):
            ours, trained = train_zero(stage, *dtypes)
            same_tensors(trained, weights, bound=0)
            assert ours == losses


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "fp32, fp64, complex and integer parameters in one model")
@pytest.mark.parametrize("size", [1, 2])
def test_fp32_fp64_complex_and_integer_parameters_in_one_model_equal_ddps_in_every_bit(run_on, size):
    run_on(size, mix)


def train_by_hand(*dtypes: torch.dtype, compute_dtype: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The expected result in low precision: masters updated in fp32 or wider, and parameters cast from the masters."""
    module, _ = prepare(*dtypes)
    own = {name: p.dtype for name, p in module.named_parameters()}
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    masters = {n: nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32))) for n, p in trained.items()}
    optimizer = Adam(masters.values(), lr=0.01)
    for name, parameter in trained.items():
        is_linear = name.startswith(("body", "head"))  # these are cast by autocast
        if compute_dtype is not None and parameter.dtype == torch.float32 and is_linear:
            parameter.data = parameter.data.to(compute_dtype)
    losses = []
    for index in range(8):
        with torch.autocast("cpu", compute_dtype, enabled=compute_dtype is not None):
            loss = module(*batch(index))
        loss.backward()
        for name, parameter in trained.items():
            gradient = masters[name].grad = parameter.grad.to(masters[name].dtype)
            parameter.grad = None
            if world_size() > 1:
                dist.all_reduce(gradient)
                gradient /= world_size()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
        losses.append(loss.detach().clone())
    return losses, {n: masters[n].detach().to(own[n]) if n in masters else p for n, p in module.state_dict().items()}


def mix_low(compute_dtype: Any) -> None:
    fp32, fp64, bf16, fp16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for dtypes in ((bf16, bf16, fp32), (fp32, bf16, fp64), (fp16, bf16, fp32)):
        losses, weights = train_by_hand(*dtypes, compute_dtype=compute_dtype)
        for stage in (1, 2, 3):
            ours, trained = train_zero(stage, *dtypes, compute_dtype=compute_dtype)
            same_tensors(trained, weights, bound=0)
            assert ours == losses, f"stage {stage}, {dtypes}"


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The numbers", "Low and high precision in one model, each parameter updated from its own master")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=["true", "mixed"])
def test_low_and_high_precision_parameters_in_one_model_train_from_their_own_masters(run_on, size, compute_dtype):
    run_on(size, mix_low, compute_dtype=compute_dtype)


def measure_complex() -> None:
    from lightning_zero.engine import Engine

    module, optimizer = prepare(torch.float32, torch.float32, torch.float32)
    reference = module.filter.detach().clone()
    for stage in (1, 3):
        engine = Engine(module, [optimizer], stage=stage)
        module(*batch(0)).backward()
        norm = torch.nn.utils.clip_grad_norm_([module.filter], 1e9)
        assert norm.dtype == torch.float32 and torch.isfinite(norm)
        for order in (1.0, 2.0, float("inf")):
            ours, expected = (torch.linalg.vector_norm(p.detach(), order) for p in (module.filter, reference))
            assert ours.dtype == expected.dtype
            torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(module.filter.detach().abs().sum(), reference.abs().sum())
        engine.close()


def test_norms_of_complex_parameters_are_real(run_on):
    run_on(2, measure_complex)
