"""`iter_full_parameters`: whole tensors, a few at a time, with the next ones on their way, within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine import Engine
from lightning_zero.engine.tensor.sharded_tree import on_cpu
from tests.support import rank, world_size
from tests.support.models import OddModel
from tests.support.training import CLOSE, STEPS, Recipe, batch, prepare, same_tensors, train_ddp


class Mixed(OddModel):
    """Has a frozen weight, a tied one, and buffers of which one is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.blocks[2].squeeze.weight = self.blocks[0].squeeze.weight
        self.register_buffer("seen", torch.arange(5))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)


def trained(stage: int, between: Callable[[Engine, nn.Module], Any], steps: int = STEPS) -> dict[str, Tensor]:
    """Train under the engine, call a function between steps, and return the weights."""
    module, optimizer = prepare(Recipe(Mixed))
    engine = Engine(module, [optimizer], stage=stage)
    for index in range(steps):
        module(*batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(engine, module)
    engine.close()
    return {name: value.clone() for name, value in module.state_dict().items()}


def is_whole(module: nn.Module, expected: dict[str, Tensor], **options: Any) -> None:
    found = dict(lightning_zero.iter_full_parameters(module, **options))
    assert list(found) == list(expected)
    assert all(type(value) is Tensor for value in found.values())
    assert not {value.data_ptr() for value in found.values() if value.numel()} & {
        value.data_ptr() for value in module.buffers()
    }
    same_tensors(found, expected, bound=0)


def between_steps(stage: int) -> None:
    def check(engine: Engine, module: nn.Module) -> None:
        expected = engine.full_state_dict()
        sizes = {name: value.nbytes for name, value in expected.items()}
        held = engine.ledger.now["gathered"]
        largest = max(sizes.values())
        for most in (largest, 2 * largest, 3 * largest, 10**9):
            engine.reset_peak()
            found = {}
            for number, (name, value) in enumerate(lightning_zero.iter_full_parameters(module, most), 1):
                found[name] = value
                ahead = engine.ledger.now["gathered"] - held - sizes[name]
                if number < len(sizes) and most > 2 * largest:
                    assert ahead > 0, "the next gather begins before a tensor is yielded"
            assert list(found) == list(expected)
            same_tensors(found, expected, bound=0)
            assert engine.ledger.peak["gathered"] - held <= most
            assert engine.ledger.now["gathered"] == held
        block = {name.removeprefix("blocks.1."): v for name, v in expected.items() if name.startswith("blocks.1.")}
        is_whole(module.blocks[1], block)
        is_whole(module, expected, max_bytes=1)  # each tensor alone

    reference = train_ddp(Recipe(Mixed))
    same_tensors(trained(stage, check), reference.weights, bound=0 if world_size() < 3 else CLOSE)
    module, _ = prepare(Recipe(Mixed))  # never sharded
    is_whole(module, module.state_dict())


@pytest.mark.behaviour("The module", "`iter_full_parameters(module, max_bytes=...)`: whole weights as a stream")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive(but=0))])
def test_whole_tensors_are_those_of_the_state_dict_within_max_bytes_and_training_goes_on(run_on, stage, ranks):
    run_on(ranks, between_steps, stage=stage)


def read_as_a_state_dict() -> None:
    module, optimizer = prepare(Recipe(Mixed))
    engine = Engine(module, [optimizer], stage=3, units=[type(module.blocks[0])], unit_numel=0)
    with lightning_zero.full_parameters(module):
        expected = {name: value.detach().clone() for name, value in module.state_dict().items()}
    gathered: list[int] = []

    def leaf(tensor: Tensor) -> Tensor:
        value = on_cpu(tensor)
        gathered.append(engine.ledger.now["gathered"] - value.nbytes)
        return value

    rest = engine.ledger.now["gathered"]
    state = engine.full_state_dict(leaf=leaf)
    same_tensors(state, expected, bound=0)
    assert state["blocks.2.squeeze.weight"] is state["blocks.0.squeeze.weight"], "tied weights stay tied"
    assert gathered[0] > rest, "the next gather begins before the first tensor is converted"
    assert engine.ledger.now["gathered"] == rest
    engine.close()


def test_a_full_state_dict_is_read_while_the_next_tensors_are_gathered(run_on):
    run_on(2, read_as_a_state_dict)


def with_views(stage: int) -> None:
    """A project's hook adds views of parameters, and what it computes from them, to the state dict."""
    module, optimizer = prepare(Recipe(Mixed))

    def add(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        weight = module.blocks[0].squeeze.weight  # type: ignore[index, union-attr]
        state["turned"], state["row"], state["doubled"] = weight.t(), weight[1], weight * 2

    module._register_state_dict_hook(add)
    with torch.no_grad():
        expected = {name: value.detach().clone() for name, value in module.state_dict().items()}
    engine = Engine(module, [optimizer], stage=stage, units=[type(module.blocks[0])], unit_numel=0)
    same_tensors(engine.full_state_dict(), expected, bound=0)
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_state_dict_may_have_views_of_parameters(run_on, stage):
    run_on(2, with_views, stage=stage)


def ends_early(stage: int) -> None:
    def check(engine: Engine, module: nn.Module) -> None:
        held, expected = engine.ledger.now["gathered"], engine.full_state_dict()
        for _ in lightning_zero.iter_full_parameters(module, 4000):
            break
        with pytest.raises(ZeroDivisionError):
            for _ in lightning_zero.iter_full_parameters(module, 4000):
                raise ZeroDivisionError
        assert engine.ledger.now["gathered"] == held
        with pytest.raises(RuntimeError, match="asked for (the stream of weights from|a norm)"):
            for number, _ in enumerate(lightning_zero.iter_full_parameters(module, 4000)):
                if number == 2 and rank() == 1:
                    module.head.weight.norm()
        assert engine.ledger.now["gathered"] == held
        is_whole(module, expected)

    weights = trained(stage, check, steps=2)
    same_tensors(weights, trained(stage, lambda engine, module: None, steps=2), bound=0)


def one_rank_alone(stage: int) -> None:
    def check(engine: Engine, module: nn.Module) -> None:
        expected = engine.full_state_dict()
        for chosen in range(world_size()):
            found = dict(lightning_zero.iter_full_parameters(module, 1000, rank=chosen))
            same_tensors(found, expected if rank() == chosen else {}, bound=0)
        for wrong in (world_size(), -1):
            with pytest.raises(ValueError, match=f"iter_full_parameters: rank={wrong} must be "):
                lightning_zero.iter_full_parameters(module, rank=wrong)

    trained(stage, check, steps=2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_alone_may_receive_the_tensors(run_on, stage, ranks):
    run_on(ranks, one_rank_alone, stage=stage)


def test_a_loop_may_end_early_on_all_ranks_and_on_one_rank_the_others_get_an_error(run_on):
    run_on(2, ends_early, stage=3)


def in_bf16(stage: int) -> None:
    torch.manual_seed(0)
    module = Mixed().bfloat16()
    optimizer = torch.optim.Adam((p for p in module.parameters() if p.requires_grad), lr=0.01)
    engine = Engine(module, [optimizer], stage=stage)
    module(*batch(0)).backward()
    optimizer.step()
    is_whole(module, engine.full_state_dict())
    engine.close()


@pytest.mark.parametrize("ranks, stage", [(1, 3), (2, 1), (2, 3)])
def test_values_have_the_parameters_dtype(run_on, ranks, stage):
    run_on(ranks, in_bf16, stage=stage)


def compiled_and_partly_sharded() -> None:
    module = nn.ModuleDict({"sharded": torch.compile(OddModel(), backend="eager"), "other": nn.Linear(2, 2)})
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    engine = Engine(module["sharded"], stage=3)
    is_whole(module, expected)
    assert "sharded._orig_mod.head.weight" in expected
    engine.close()


def test_names_are_those_of_the_state_dict_for_compiled_modules_and_parts_that_are_not_sharded(run_on):
    run_on(2, compiled_and_partly_sharded)
