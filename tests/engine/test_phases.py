"""What a unit is needed for, from forward to backward: each transition of its phase, and what is gathered meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.engine.runtime.schedule import TRANSITIONS, Phase, Unit

IDLE, AWAITED, KEPT = Phase


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Model(nn.Module):
    """A block between two layers of the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), Block(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x))).sum()


class Walk:
    """A sharded model, and the transitions that its units have taken."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model, self.x = Model(), torch.ones(2, 4)
        self.engine = Engine(self.model, stage=3, units=[Block], prefetch=0)
        self.root, self.block = self.engine.units
        self.taken: set[tuple[str, Phase]] = set()
        self.in_forward: list[tuple[Phase, Phase]] = []
        before = Unit.now

        def now(unit: Unit, event: str) -> None:
            self.taken.add((event, unit.phase))
            before(unit, event)

        patch.setattr(Unit, "now", now)
        self.model.block.register_forward_hook(lambda *_: self.in_forward.append(self.phases))

    @property
    def phases(self) -> tuple[Phase, Phase]:
        return self.root.phase, self.block.phase

    @property
    def gathered(self) -> tuple[bool, ...]:
        return tuple(all(bucket.is_ready for bucket in unit.buckets) for unit in (self.root, self.block))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def walk() -> None:
    with pytest.MonkeyPatch.context() as patch:
        go = Walk(patch)
        model, x = go.model, go.x
        assert go.phases == (IDLE, IDLE) and go.gathered == (False, False)

        with torch.no_grad():
            model(x)
        assert go.in_forward.pop() == (IDLE, IDLE)
        assert go.phases == (IDLE, IDLE) and go.gathered == (False, False)

        loss = model(x)
        assert go.in_forward.pop() == (AWAITED, AWAITED)
        assert go.phases == (AWAITED, AWAITED) and go.gathered == (True, True), "backward begins with the block"
        with torch.no_grad():  # an evaluation between a forward and its backward
            model(x)
        assert go.phases == (AWAITED, AWAITED) and go.gathered == (True, False)
        model(x)  # a second forward before the first one's backward
        loss.backward()
        assert go.phases == (IDLE, IDLE) and go.gathered == (False, False)

        with go.engine.window():  # as in manual optimization
            model(x).backward()
            assert go.phases == (IDLE, IDLE) and go.gathered == (True, False)
            with torch.no_grad():
                model.first(x)
        model(x).backward()
        loss = model.block(x).sum()
        assert go.phases == (IDLE, AWAITED), "of a graph without the root unit"
        with go.engine.window():
            loss.backward()
            assert go.phases == (IDLE, IDLE)
        model(x).backward()

        interrupt = model.block.register_forward_pre_hook(interrupted)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(x)
        interrupt.remove()
        assert go.phases == (IDLE, IDLE), "torch has called no hook"
        with torch.no_grad():
            model(x)
        assert go.phases == (IDLE, IDLE) and go.gathered == (False, False)

        model(x)
        torch.func.grad(lambda y: model(y))(x)
        assert go.block.phase is KEPT and go.gathered == (True, True)
        torch.func.grad(lambda y: model(y))(x)  # begins a window
        assert go.block.phase is KEPT
        torch.func.grad(lambda y: model.first(model.block(y)).sum())(x)
        with torch.no_grad():
            model(x)
        assert go.block.phase is IDLE and not go.gathered[1]

        model(x).backward()
        torch.func.grad(lambda y: model.first(y).sum())(x)  # outside a window
        assert go.root.phase is KEPT
        loss = model.block(x).sum()
        assert go.block.phase is AWAITED
        loss.backward()
        with torch.no_grad():
            model(x)
        assert go.phases == (IDLE, IDLE) and go.gathered == (False, False)
        go.engine.close()
    possible = {(event, phase) for event, nexts in TRANSITIONS.items() for phase in nexts}
    assert go.taken == possible, (possible - go.taken, go.taken - possible)


def test_units_take_every_transition_of_the_table(run_on):
    run_on(2, walk)
