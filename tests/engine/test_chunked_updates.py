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


def train(optimizer_class: Any, options: dict[str, Any], chunk_numel: int) -> tuple[Any, Any, int]:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.offload import Update
    from lightning_zero.engine.optim import updating

    act, chunks = Update.act, 0

    def counted(update: Any, values: Any, *args: Any) -> Any:
        nonlocal chunks
        chunks += len(values)
        return act(update, values, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updating, "CHUNK_NUMEL", chunk_numel)
        patch.setattr(Update, "act", counted)
        model = module()
        optimizer = optimizer_class(model.parameters(), **options)
        engine = Engine(model, [optimizer], stage=2, unit_numel=2**20)
        generator = torch.Generator().manual_seed(rank())
        for step in range(5):
            if step == 3:  # half of the parameters have no gradient, so that masters are split
                model[1].requires_grad_(False)
            loss = model(torch.randn(4, 67, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:  # loaded states are new tensors
                optimizer.load_state_dict(optimizer.state_dict())
        state = engine.full_optimizer_state_dict(optimizer)
        weights = engine.full_state_dict()
        engine.close()
    return weights, state, chunks


def compare(optimizer_class: Any, options: dict[str, Any]) -> None:
    weights, state, chunks = train(optimizer_class, options, chunk_numel=32)
    expected_weights, expected_state, never = train(optimizer_class, options, chunk_numel=2**30)
    assert never == 0 and (chunks == 0) == ("fused" in options or "foreach" in options)
    same_values(weights, expected_weights, "weights")
    same_values(state, expected_state, "state")


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer_class, options", CLASSES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_chunked_updates_are_bit_equal_to_undivided_ones(run_on, size, optimizer_class, options):
    run_on(size, compare, optimizer_class=optimizer_class, options=options)


def is_chunked(options: dict[str, Any], numel: int) -> bool:
    from lightning_zero.engine.optim.updating import gains_by_chunks

    return gains_by_chunks(AdamW, options, torch.empty(numel))


def test_only_masters_of_at_least_two_chunks_without_fused_kernels_are_updated_in_chunks():
    assert not is_chunked({}, 2**19 - 1)
    assert is_chunked({}, 2**19) and is_chunked({"fused": None, "foreach": False}, 2**19 + 1)
    assert not is_chunked({"fused": True}, 2**19)
    assert not is_chunked({"foreach": True}, 2**19)


def fail_in_a_step() -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.optim import updating

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updating, "CHUNK_NUMEL", 32)
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


def test_a_step_that_fails_in_a_chunk_can_be_repeated(run_on):
    run_on(2, fail_in_a_step)
