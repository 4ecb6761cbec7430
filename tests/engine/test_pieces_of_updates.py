"""Chunked updates of large master weights: parameters and states are bit-equal to those of undivided updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from tests.support.training import same_values
from tests.support.workers import rank

CLASSES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (Adam, {}),
    (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"fused": True}),
    (AdamW, {"foreach": True}),
    (Adagrad, {"initial_accumulator_value": 0.1}),
    (Adadelta, {}),
    (Adamax, {}),
    (ASGD, {"t0": 2}),
    (NAdam, {}),
    (RAdam, {}),
    (RMSprop, {"momentum": 0.5, "centered": True}),
    (Rprop, {}),
]


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(67, 31), nn.Linear(31, 129, bias=False), nn.Linear(129, 5))


def train(optimizer_class: Any, options: dict[str, Any], piece_numel: int) -> tuple[Any, Any, int]:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.optim import chunked_update, masters

    class Counted(chunked_update.ChunkedMaster):
        made = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Counted.made += 1

    before, chunked_update.PIECE_NUMEL = chunked_update.PIECE_NUMEL, piece_numel
    uncounted, masters.ChunkedMaster = masters.ChunkedMaster, Counted
    try:
        model = module()
        optimizer = optimizer_class(model.parameters(), **options)
        engine = Engine(model, [optimizer], stage=2, unit_numel=2**20)
        generator = torch.Generator().manual_seed(rank())
        for step in range(5):
            if step == 3:  # half of them have none, and masters are cut anew
                model[1].requires_grad_(False)
            loss = model(torch.randn(4, 67, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(optimizer.state) < 10, "pieces are left in the state"
            if step == 1:  # what is loaded has other tensors
                optimizer.load_state_dict(optimizer.state_dict())
        state = engine.full_optimizer_state_dict(optimizer)
        weights = engine.full_state_dict()
        engine.close()
    finally:
        chunked_update.PIECE_NUMEL, masters.ChunkedMaster = before, uncounted
    return weights, state, Counted.made


def compare(optimizer_class: Any, options: dict[str, Any]) -> None:
    weights, state, cut = train(optimizer_class, options, piece_numel=32)
    expected_weights, expected_state, never = train(optimizer_class, options, piece_numel=2**30)
    assert never == 0 and (cut == 0) == ("fused" in options or "foreach" in options)
    same_values(weights, expected_weights, "weights")
    same_values(state, expected_state, "state")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer_class, options", CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_updates_in_pieces_are_bit_equal_to_those_of_whole_masters(run_on, size, optimizer_class, options):
    run_on(size, compare, optimizer_class=optimizer_class, options=options)


def count_pieces(options: dict[str, Any], numel: int) -> int:
    from lightning_zero.engine.optim.chunked_update import ChunkedMaster

    master = nn.Parameter(torch.zeros(numel))
    optimizer = AdamW([master], **options)
    master.grad = torch.ones(numel)
    if not ChunkedMaster.is_of_use(optimizer, optimizer.param_groups[0], master):
        return 1
    return len(ChunkedMaster(master, {}).pieces)


def test_only_what_is_larger_than_the_cache_is_cut_and_only_where_kernels_go_over_it_again():
    assert count_pieces({}, 2**19 - 1) == 1
    assert count_pieces({}, 2**19) == 2
    assert count_pieces({}, 2**20 + 1) == 5
    assert count_pieces({"fused": True}, 2**20) == 1
    assert count_pieces({"foreach": True}, 2**20) == 1


def fail_in_a_step() -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.optim import chunked_update

    before, chunked_update.PIECE_NUMEL = chunked_update.PIECE_NUMEL, 32
    try:
        for steps_before in (0, 1):
            model = module()
            optimizer = AdamW(model.parameters())
            engine = Engine(model, [optimizer], stage=2, unit_numel=2**20)
            for step in range(steps_before + 1):
                model(torch.ones(4, 67)).square().mean().backward()
                if step == steps_before:
                    group = optimizer.param_groups[0]
                    group["lr"], lr = "no number", group["lr"]
                    with pytest.raises((TypeError, RuntimeError)):
                        optimizer.step()
                    group["lr"] = lr
                    with engine.window():
                        pass
                    assert all(parameter.shape.numel() for parameter in group["params"])
                optimizer.step()
                optimizer.zero_grad()
            assert set(engine.full_optimizer_state_dict(optimizer)["state"]) == {0, 1, 2, 3, 4}
            engine.close()
    finally:
        chunked_update.PIECE_NUMEL = before


def test_a_step_that_fails_leaves_nothing_in_pieces(run_on):
    run_on(2, fail_in_a_step)
