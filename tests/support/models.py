"""Small models with sizes that no world size divides, and optimizers for them, as picklable functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

VOCABULARY, CLASSES = 11, 16


class Block(nn.Module):
    """A residual block with weights of (7, 15), (3, 7) and (15, 3), a scalar, and a parameter with `rows` rows."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(15)
        self.squeeze = nn.Linear(15, 7)
        self.middle = nn.Linear(7, 3, bias=False)
        self.spread = nn.Linear(3, 15)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.rows = nn.Parameter(torch.zeros(rows, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.spread(self.middle(torch.tanh(self.squeeze(self.norm(x)))))
        return x + self.gain * y + self.rows.sum()


class OddModel(nn.Module):
    """Embedding, three blocks, and a head with a weight of (16, 17); returns the loss of the targets.

    Arguments:
            rows: of one parameter in each block. With 0 the parameter is empty; torch has no infinity norm of it.
    """

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 15)
        self.blocks = nn.ModuleList(Block(rows) for _ in range(3))
        self.widen = nn.Linear(15, 17)
        self.head = nn.Linear(17, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(torch.tanh(self.widen(x))) * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Repeated(OddModel):
    """Uses each weight of two layers many times in a step: in calls of the layer, and within one call of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())
        self.out = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.linspace(-1, 1, 16, device=tokens.device) * tokens[:, :1]
        states = []
        for step in range(12):
            x = self.cell(x + step / 12) + self.cell(x)
            states.append(self.out(x))
        return super().forward(tokens, targets) + torch.stack(states).float().square().mean()


class Scalars(nn.Module):
    """Three blocks of one or two elements each: on four ranks most shards are padding only."""

    class Affine(nn.Module):
        def __init__(self, with_bias: bool) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.9))
            self.bias = nn.Parameter(torch.tensor([0.1])) if with_bias else None

        def forward(self, x: Tensor) -> Tensor:
            x = torch.sin(x * self.scale)
            return x if self.bias is None else x + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Affine(True), self.Affine(False), self.Affine(True))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return (self.layers(tokens.float()) - targets).square().mean()


class Square(nn.Module):
    """Layers of width by width without biases: backward needs each unit's weights, and 4 divides each."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.linear(x))

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # The input requires a gradient, so backward uses the first layer's weight too, as behind an embedding.
        x = torch.linspace(-1, 1, self.width).requires_grad_() * tokens.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return (x.mean(-1) - targets).square().mean()


def clip(parameters: Iterable[nn.Parameter]) -> Tensor:
    return nn.utils.clip_grad_norm_(parameters, 0.01)


def exact_sgd(model: nn.Module) -> Optimizer:
    """SGD whose products are exact, so that a CPU's fused kernel rounds as a device's separate kernels do."""
    return SGD(model.parameters(), lr=2.0**-4, momentum=0.5)


def decay_groups(model: nn.Module) -> list[dict[str, object]]:
    """Parameter groups as in many projects: weight decay for matrices, none for vectors and scalars."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def adam(model: nn.Module, **options: object) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, **options)


def adam_with_large_eps(model: nn.Module) -> Optimizer:
    """For comparing gradients summed in different orders: with a large eps, rounding errors are not amplified."""
    return adam(model, eps=1e-2)


def adam_fused(model: nn.Module) -> Optimizer:
    return adam(model, fused=True)


def adam_foreach(model: nn.Module) -> Optimizer:
    return adam(model, foreach=True)


def adam_amsgrad(model: nn.Module) -> Optimizer:
    return adam(model, amsgrad=True, weight_decay=0.01)


def adamw_with_decay_groups(model: nn.Module) -> Optimizer:
    return AdamW(decay_groups(model), lr=0.01)


def adamw_with_decay_groups_fused(model: nn.Module) -> Optimizer:
    return AdamW(decay_groups(model), lr=0.01, fused=True)


def sgd_nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def sgd_nesterov_fused(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)


def sgd_nesterov_foreach(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def adagrad_with_initial_accumulator(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1, lr_decay=0.01)


def rmsprop(model: nn.Module) -> Optimizer:
    return RMSprop(model.parameters(), lr=0.005, momentum=0.5, centered=True)


def nadam(model: nn.Module) -> Optimizer:
    return NAdam(model.parameters(), lr=0.01)


def several_groups(model: nn.Module) -> Optimizer:
    """Distributes parameters over three groups in turn, so that neighbours in a unit never share a group."""
    parameters = list(model.parameters())
    settings = [{"lr": 0.01, "betas": (0.9, 0.99)}, {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.003, "eps": 1e-4}]
    return Adam([{"params": parameters[i::3], **setting} for i, setting in enumerate(settings)])


def with_an_empty_group(model: nn.Module) -> Optimizer:
    return AdamW([{"params": []}, {"params": list(model.parameters()), "lr": 0.01}, {"params": [], "lr": 1.0}])
