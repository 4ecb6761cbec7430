"""The chunked update: large masters are updated in pieces that fit in the cache.

torch's optimizers go over a tensor once for each of their operations (Adam nine times), unless they are fused. What is
larger than the cache comes from memory each time. Elementwise optimizers may as well do all of a piece before the next
one; every bit is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.optim.compatibility import is_torchs_elementwise
from lightning_zero.engine.optim.kinds import copied, is_by_element

PIECE_NUMEL = 2**18
"""Elements of a piece: a megabyte each of values, gradient and two states, in fp32. A multiple of ``ALIGNMENT``."""


class ChunkedMaster:
    """A master while it is updated in pieces.

    Args:
        master: with its gradient.
        state: the optimizer's, of the whole; of a first update nothing.

    Attributes:
        pieces: parameters over the master's own values, with their part of its gradient.
        states: of each piece, as the optimizer keeps them: views of the whole's where these are elementwise.
    """

    def __init__(self, master: Tensor, state: dict[str, Any]) -> None:
        self.master, self._whole = master, state
        values, gradients = _split(master.detach()), _split(master.grad)
        self.pieces = [nn.Parameter(part) for part in values]
        for piece, gradient in zip(self.pieces, gradients):
            piece.grad = gradient
        self._parts = {key: _split(value) for key, value in state.items() if is_by_element(key, value, master.shape)}
        self.states = [
            {key: self._parts[key][i] if key in self._parts else copied(value) for key, value in state.items()}
            for i in range(len(self.pieces))
        ]

    @staticmethod
    def is_of_use(optimizer: Optimizer, group: dict[str, Any], master: Tensor) -> bool:
        """Whether pieces are quicker to update: not by kernels that go over a tensor once in any case."""
        return (
            master.numel() >= 2 * PIECE_NUMEL
            and master.device.type == "cpu"
            and is_torchs_elementwise(optimizer)
            and not any(group.get(option) for option in ("fused", "foreach", "differentiable", "capturable"))
        )

    def joined(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """The whole's state after the update, of the pieces' own; they are taken over."""
        if not all(states):
            return {}  # a first update that has failed
        first = states[0]
        return {
            key: self._join(key, states) if is_by_element(key, first[key], self.pieces[0].shape) else first[key]
            for key in list(first)
        }

    def _join(self, key: str, states: list[dict[str, Any]]) -> Tensor:
        parts = [state.pop(key) for state in states]
        before = self._parts.get(key, ())
        if len(before) == len(parts) and all(after is part for after, part in zip(parts, before)):
            whole: Tensor = self._whole[key]
            return whole
        return torch.cat(parts).view(self.master.shape)


def _split(tensor: Tensor | None) -> tuple[Tensor, ...]:
    assert tensor is not None
    return tensor.view(-1).split(PIECE_NUMEL)
