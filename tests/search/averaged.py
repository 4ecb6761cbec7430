"""The model of the random programs, and the reference: all ranks' plain modules in one process, gradients averaged.

Computes the result of DistributedDataParallel with ``find_unused_parameters=True`` without communication: a parameter
that any rank has used gets the mean over ranks of the local ``.grad`` after backward; others keep their gradients.
Under ``no_sync`` each rank keeps its own gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.search.programs import Setup

WIDTH = 3


class Block(nn.Module):
    """Two layers, each used by a forward pass only if named in its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, parts: str) -> Tensor:
        for part in parts:
            x = torch.tanh(self.a(x) if part == "a" else self.b(x))
        return x


class Own(nn.Module):
    """Parameters beside the blocks; where they are not the root's own, another module's, with an engine of its own."""

    def __init__(self, has_number: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        if has_number:
            self.number = nn.Parameter(torch.rand(()))

    def scaled(self, x: Tensor) -> Tensor:
        return (self.scale * x.square()).sum() * getattr(self, "number", 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Net(Own):
    def __init__(self, setup: Setup) -> None:
        if setup.several:
            nn.Module.__init__(self)
            self.own = Own(setup.has_number)
        else:
            super().__init__(setup.has_number)
        self.is_mixed = setup.precision == "mixed"
        self.blocks = nn.ModuleList(Block() for _ in range(setup.blocks))
        if setup.is_tied:
            for block in self.blocks:
                block.b.weight = self.blocks[0].b.weight

    def forward(self, x: Tensor, uses: tuple[str, ...], scaled: bool, checkpointed: bool) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.is_mixed):
            return self.total(x, uses, scaled, checkpointed)

    def total(self, x: Tensor, uses: tuple[str, ...], scaled: bool, checkpointed: bool) -> Tensor:
        total = x.sum() * 0
        for block, parts in zip(self.blocks, uses):
            if parts:  # a block that is not used is not called
                y = checkpoint(block, x, parts, use_reentrant=False) if checkpointed else block(x, parts)
                total = total + y.square().sum()
        if scaled:
            total = total + (self.own(x) if hasattr(self, "own") else self.scaled(x))
        return total

    def parts(self) -> list[nn.Module]:
        """The modules that have an engine each."""
        return [self.own, *self.blocks] if hasattr(self, "own") else [self]


def make_net(setup: Setup) -> Net:
    torch.manual_seed(1)
    return Net(setup).to(dtype_of(setup))


def dtype_of(setup: Setup) -> torch.dtype:
    return {"fp64": torch.float64, "mixed": torch.float32}.get(setup.precision, torch.bfloat16)


def of_unknown_needs(kind: Any) -> Any:
    """A subclass of an optimizer class for which the engine's table does not say what it needs."""

    class OfUnknownNeeds(kind):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure) if self.param_groups else None

    return OfUnknownNeeds


def make_optimizers(setup: Setup, parameters: list[nn.Parameter]) -> list[Optimizer]:
    made: list[Optimizer] = []
    of = of_unknown_needs if setup.whole else lambda kind: kind
    for number, kind in enumerate(setup.optimizers):
        own = [p for p, owner in zip(parameters, setup.owner_of) if owner == number]
        # An empty group is allowed, an empty list is not.
        groups: Any = [{"params": own}]
        match kind:
            case "adam":
                made.append(of(torch.optim.Adam)(groups, lr=0.05, eps=0.1))
            case "adamw":
                made.append(of(torch.optim.AdamW)(groups, lr=0.05, eps=0.1, weight_decay=0.1, amsgrad=True))
            case "rmsprop":
                # Centred, it divides by nearly ``eps`` in its first steps: a small one would amplify rounding in bf16.
                made.append(of(torch.optim.RMSprop)(groups, lr=0.05, eps=1.0, momentum=0.5, centered=True))
            case _:
                made.append(of(torch.optim.SGD)(groups, lr=0.125, momentum=0.5 if kind == "momentum" else 0.0))
    return made


def inputs(index: int, forward: int, rank: int, net: nn.Module) -> Tensor:
    """A forward's inputs on a rank, which bfloat16 represents exactly, in the dtype of the net's parameters."""
    generator = torch.Generator().manual_seed(10_000 * index + 100 * forward + rank)
    values = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    return values.bfloat16().to(next(net.parameters()).dtype)


class Averaged:
    """Weights common to all ranks, and each rank's ``.grad`` of each parameter.

    Attributes:
        gradients: by parameter, a tensor for each rank, or None. Equal if all ranks have the same gradient.
        is_local: by parameter, whether ranks have local gradients that a later backward will average.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.net = setup, make_net(setup).double()  # which autocast leaves as they are
        self.parameters = list(self.net.parameters())
        self.optimizers = make_optimizers(setup, self.parameters)
        self.gradients: list[list[Tensor] | None] = [None] * len(self.parameters)
        self.is_local = [False] * len(self.parameters)

    def backward(self, local: Callable[[int], None], *, sync: list[bool]) -> None:
        """Run one backward pass on every rank.

        Args:
            local: runs a rank's forward and backward on the net, whose gradients are None before.
            sync: by parameter, whether the backward averages its gradients.
        """
        ranks = self.setup.ranks
        found: list[list[Tensor | None]] = []
        for rank in range(ranks):
            for parameter in self.parameters:
                parameter.grad = None
            local(rank)
            found.append([p.grad for p in self.parameters])
        averaged = self.in_one_engine_with({i for grads in found for i, grad in enumerate(grads) if grad is not None})
        for index in range(len(self.parameters)):
            own = [gradients[index] for gradients in found]
            # Local gradients of ``no_sync`` are averaged by their engine's next synchronised backward, even if unused
            # in it. DDP would leave unused ones as they are, so that ranks diverge.
            if all(gradient is None for gradient in own) and not (
                sync[index] and self.is_local[index] and index in averaged
            ):
                continue
            if not sync[index]:
                self._add_local(index, own)
                continue
            before, nothing = self.gradients[index], torch.zeros_like(self.parameters[index])
            held = [*(before or ()), *(gradient for gradient in own if gradient is not None)]
            mean = sum(held, nothing) / ranks
            if before is None:
                self.gradients[index] = [mean.clone() for _ in range(ranks)]
            else:  # in place, since the program may keep a reference
                for tensor in before:
                    tensor.copy_(mean)
            self.is_local[index] = False

    def in_one_engine_with(self, used: set[int]) -> set[int]:
        """The indices of all parameters of the engines that have any of some parameters."""
        number_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        engines = [{number_of[id(parameter)] for parameter in part.parameters()} for part in self.net.parts()]
        return {index for engine in engines if engine & used for index in engine}

    def _add_local(self, index: int, own: list[Tensor | None]) -> None:
        before = self.gradients[index]
        if before is None:
            # A rank without a gradient counts as zeros.
            before = self.gradients[index] = [torch.zeros_like(self.parameters[index]) for _ in own]
        for tensor, gradient in zip(before, own):
            if gradient is not None:
                tensor.add_(gradient)
        self.is_local[index] = True

    def with_gradients(self, act: Callable[[], Any]) -> Any:
        """Call a function that reads or writes ``p.grad``, the same on every rank, and apply its changes."""
        for index, (parameter, gradients) in enumerate(zip(self.parameters, self.gradients)):
            assert not self.is_local[index] or gradients is None
            parameter.grad = gradients[0] if gradients is not None else None
        out = act()
        for index, parameter in enumerate(self.parameters):
            gradients = self.gradients[index]
            if parameter.grad is None:
                self.gradients[index], self.is_local[index] = None, False
            elif gradients is not None and parameter.grad is gradients[0]:
                for other in gradients[1:]:
                    other.copy_(gradients[0])
            else:
                self.gradients[index] = [parameter.grad, *(parameter.grad.clone() for _ in range(self.setup.ranks - 1))]
            parameter.grad = None
        return out
