"""The models that systems are compared on: of tokens, (batch, sequence) of bytes, with their layers in `blocks`."""

import torch
from common import GPTS
from torch import Tensor, nn

from lightning_zero.zoo.gpt import GPT


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(nn.Module):
    """Many small layers, each of which is a block: what a step costs beside its arithmetic shows."""

    def __init__(self, width: int = 64, depth: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(name: str, context: int) -> nn.Module:
    """One of ``common.GPTS``, or ``deep``, for sequences of so many tokens."""
    return Deep() if name == "deep" else GPT(**GPTS[name], context=context, tied=False)
