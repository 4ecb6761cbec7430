"""The models that systems are compared on: of tokens, (batch, sequence) of bytes, with their layers in `blocks`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_zero.zoo.gpt import GPT


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(nn.Module):
    """Many small layers, each of which is a block: what a step costs beside its arithmetic shows.

    Args:
        context: of no use here.
    """

    def __init__(self, width: int = 64, depth: int = 100, context: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "25m": partial(GPT, width=512, depth=8, heads=8, tied=False),  # 25.5 M parameters with a head of its own
    "tiny": partial(GPT, width=64, depth=2, heads=2, tied=False),
    "deep": Deep,
}
