"""Models for optimizers that need whole parameters, and such optimizers, as picklable functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from tests.support.models import CLASSES, VOCABULARY


class Layer(nn.Module):
    """A residual block with vectors and two matrices: one with 3/2 as many rows as columns, and one with 2/3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width * 3 // 2), nn.Linear(width * 3 // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Layered(nn.Module):
    """Embedding, three layers, and a head; with `skips`, only some batches use the last layer."""

    def __init__(self, skips: bool = False, width: int = 16) -> None:
        super().__init__()
        self.skips = skips
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 2 and tokens[0, 0] % 2):
                x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


def skipping() -> nn.Module:
    return Layered(skips=True)


def wide() -> nn.Module:
    """Matrices of 6,144 elements, which 8-bit optimizers quantise, unlike those below 4,096."""
    return Layered(width=64)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that Muon trains."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")]


def others(model: nn.Module) -> list[nn.Parameter]:
    chosen = {id(p) for p in matrices(model)}
    return [p for p in model.parameters() if id(p) not in chosen]


class Together:
    """Several optimizers with the methods of one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def muon_and_adamw(model: nn.Module) -> Any:
    return Together(
        Muon(matrices(model), lr=0.02, weight_decay=0.1),
        AdamW(others(model), lr=0.01, weight_decay=0.0),
    )


def adafactor(model: nn.Module) -> Optimizer:
    return Adafactor(model.parameters(), lr=0.01)


def adafactor_with_momentum(model: nn.Module) -> Optimizer:
    """Its momentum is in bf16."""
    from pytorch_optimizer import AdaFactor

    return AdaFactor(model.parameters(), lr=0.01)


def transformers_adafactor(model: nn.Module) -> Optimizer:
    from transformers import Adafactor

    return Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True)


def soap(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr=0.01, precondition_frequency=2)


def shampoo(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import Shampoo

    return Shampoo(model.parameters(), lr=0.01, preconditioning_compute_steps=2)


def lamb(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(model.parameters(), lr=0.01)


def lars(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import LARS

    return LARS(model.parameters(), lr=0.1)


def came(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import CAME

    return CAME(model.parameters(), lr=0.01)


def lion(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), lr=0.001)


def cautious_lion(model: nn.Module) -> Optimizer:
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), lr=0.001, cautious=True)


def muon_of_mixed_groups(model: nn.Module) -> Optimizer:
    """One optimizer whose groups differ: Muon for matrices, AdamW for the rest."""
    from pytorch_optimizer import Muon

    return Muon(
        [
            {"params": matrices(model), "use_muon": True, "lr": 0.02},
            {"params": others(model), "use_muon": False, "lr": 0.01},
        ]
    )


def adamw_8bit_of_torchao(model: nn.Module) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=0.01)


def adamw_4bit_of_torchao(model: nn.Module) -> Optimizer:
    from torchao.optim import AdamW4bit

    return AdamW4bit(model.parameters(), lr=0.01)


def adamw_8bit_of_bitsandbytes(model: nn.Module) -> Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=0.01)


def lion_8bit_of_bitsandbytes(model: nn.Module) -> Optimizer:
    from bitsandbytes.optim import Lion8bit

    return Lion8bit(model.parameters(), lr=0.001)
