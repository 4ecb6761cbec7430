"""Compression of data sent between machines. The machines are simulated, as in test_several_machines."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero import full_grad
from lightning_zero.engine import Engine, EngineConfig
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.init import bucketing
from tests.engine.test_several_machines import on_machines, train_on
from tests.support.lost import die, run_ranks
from tests.support.models import OddModel, Square, adam
from tests.support.training import Recipe, batch, prepare, same_runs, same_tensors
from tests.support.workers import rank

BF16 = Recipe(OddModel, adam, dtype=torch.bfloat16)
WITHIN = {"stage": 3, "shard_within": "node"}
PLACED = [{"stage": 1}, {"stage": 2}, WITHIN]
PLACEMENTS = pytest.mark.parametrize("placement", PLACED, ids=str)


@contextmanager
def exempting(numel: int) -> Iterator[None]:
    """Context in which parameters with fewer elements are exempt: the models of these tests are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucketing, "EXEMPT_NUMEL", numel)
        yield


# -- quantised gradients ----------------------------------------------------------------------------------------------


def wide() -> torch.nn.Module:
    return Square(64, 4)


def count(**options: Any) -> None:
    """Bytes sent between machines in a step, as the engine counts them, with Adam's small changes in 16 bits."""
    numel = 4 * 64 * 64

    def crossed(compression: str | None) -> dict[str, int]:
        module, optimizer = prepare(Recipe(wide, lambda module: torch.optim.Adam(module.parameters(), lr=1e-4)))
        chosen = {"compression": compression, "compute_dtype": torch.bfloat16, **options}
        with on_machines("aabb"), exempting(64):
            engine = Engine(module, [optimizer], unit_numel=0, **chosen)
        for step in range(3):
            engine.reset_counters()
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(*batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        nbytes = dict(engine.communicator.counters.bytes)
        engine.close()
        return {kind: nbytes[kind, "across"] for kind in ("all_gather", "reduce_scatter")}

    assert crossed(None) == {"all_gather": 2 * numel // 4, "reduce_scatter": 4 * numel // 4}
    for name, width in (("int8", 1), ("int4", 0.5)):
        found = crossed(name)
        assert found == {"all_gather": 2 * numel // 4, "reduce_scatter": (width + 4 / 128) * numel // 4}


@pytest.mark.exhaustive(but=1)
@PLACEMENTS
def test_compression_sends_fewer_bytes_between_machines(run_on, placement):
    run_on(4, count, **placement)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def train_nearly(compression: str, bound: float, micro_batches: int, **options: Any) -> None:
    recipe = Recipe(OddModel, sgd, micro_batches=micro_batches)
    with exempting(0):
        found = train_on("aabb", recipe=recipe, compression=compression, **options)
    same_runs(found, expected := train_on("aabb", recipe=recipe, **options), bound=bound)
    assert any(not torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("placement", [{"stage": 1}, {"stage": 2}, {"stage": 3}, WITHIN], ids=str)
@pytest.mark.parametrize(
    ("compression", "bound", "micro_batches"),
    [("int8", 1e-2, 1), ("int4", 1e-1, 2), ("int8", 1e-2, 2), ("int4", 1e-1, 1)],
)
def test_quantised_gradients_train_nearly_the_same(run_on, placement, micro_batches, compression, bound):
    run_on(4, train_nearly, compression=compression, bound=bound, micro_batches=micro_batches, **placement)


def sum_up() -> None:
    """The owner adds its machine's sum unchanged and the other's to within half a quantisation step, in fp32."""
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    module = torch.nn.Linear(64, 64, bias=False)
    with on_machines("aabb"), exempting(0):
        engine = Engine(module, stage=2, compression="int8")
    (module(torch.eye(64)) * gradients[rank()].T).sum().backward()
    found = full_grad(module.weight)
    assert found is not None
    mean = sum(gradients) / 4
    step = max(float((gradients[0] + gradients[1]).abs().max()), float((gradients[2] + gradients[3]).abs().max())) / 127
    error = (found - mean).abs()
    assert 0 < error.max() <= 0.5 * step / 4 + 1e-6
    engine.close()


def test_sums_over_machines_are_within_half_a_quantisation_step(run_on):
    run_on(4, sum_up)


def exempt() -> None:
    """Biases, norms and small weights are sent unchanged, whatever is next to them in the bucket."""
    module, optimizer = prepare(Recipe(OddModel, adam))
    with on_machines("aabb"), exempting(100):
        engine = Engine(module, [optimizer], stage=2, compression="int8")
    plain, _ = prepare(Recipe(OddModel, adam))
    with on_machines("aabb"):
        exact = Engine(plain, stage=2)
    for each in (module, plain):
        each(*batch(0)).backward()
    compared = {True: 0, False: 0}
    for found, expected in zip(module.parameters(), plain.parameters()):
        is_exempt = found.dim() < 2 or found.numel() < 100
        ours, theirs = full_grad(found), full_grad(expected)
        assert ours is not None and theirs is not None
        compared[is_exempt] += not torch.equal(ours, theirs)
    assert compared[False] > 2 and compared[True] == 0
    for each in (engine, exact):
        each.close()


def test_small_and_one_dimensional_parameters_are_exempt_from_quantisation(run_on):
    run_on(4, exempt)


def skip_a_step(**options: Any) -> None:
    """A step that finds an overflow changes nothing, and the next step trains."""
    with on_machines("aabb"), exempting(0):
        module, optimizer = prepare(Recipe(OddModel, adam))
        engine = Engine(module, [optimizer], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        before = engine.full_state_dict()
        scaler.scale(module(*batch(step)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = engine.full_state_dict()
        is_same = all(torch.equal(before[name], value) for name, value in after.items())
        assert is_same == (factor != 1.0) and all(value.isfinite().all() for value in after.values())
    engine.close()


def test_an_overflow_in_quantised_gradients_skips_the_step_on_all_ranks(run_on):
    run_on(4, skip_a_step, compression="int8", stage=2)


# -- errors and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "zip"}, "compression='zip' must be 'int8', 'int4' or None"),
        ({"compression": {"gradients": "int8"}}, "compression={'gradients': 'int8'} must be 'int8', 'int4' or None"),
        ({"compression": "int8", "stage": 2, "reduce_dtype": "bf16"}, "both determine how gradients are sent"),
    ],
    ids=str,
)
def test_wrong_compression_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


def refuse(machines: str, recipe: Recipe, said: str, **options: Any) -> None:
    module, optimizer = prepare(recipe)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with on_machines(machines), pytest.raises(ValueError, match=said):
        Engine(module, [optimizer], **options)
    same_tensors(dict(module.state_dict()), before, bound=0)


def test_compression_without_any_effect_is_refused(run_on):
    """All parameters are small."""
    said = "compression='int4' has no effect: every trained parameter has .*, or fewer than 65,536 elements"
    run_on(4, refuse, machines="aabb", recipe=Recipe(), said=said, stage=2, compression="int4")


def over_another_backend(**options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        new_group = process_group.new_group
        patch.setattr(process_group, "backend_name", lambda *_: "another")
        patch.setattr(process_group, "new_group", lambda ranks, _, timeout: new_group(ranks, "gloo", timeout))
        if "shard_within" in options:
            train_nearly("int8", 1e-2, 1, **options)
        else:
            refuse("aabb", BF16, "works over NCCL only with shard_within", compression="int8", **options)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("placement", [WITHIN, {"stage": 2}], ids=str)
def test_over_another_backend_than_gloo_gradients_are_compressed_with_shard_within(run_on, placement):
    run_on(4, over_another_backend, **placement)


def warn(machines: str, recipe: Recipe, compression: str, warning: str) -> None:
    module, optimizer = prepare(recipe)
    with warnings.catch_warnings(record=True) as caught, on_machines(machines):
        warnings.simplefilter("always")
        engine = Engine(module, [optimizer], stage=2, compression=compression)
    assert sum(warning in str(each.message) for each in caught) == (rank() == 0)
    module(*batch(0)).backward()
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_compression_on_one_machine_warns_that_it_has_no_effect(run_on, ranks):
    said = f"compression='int8' has no effect: all {ranks} ranks are on one machine"
    run_on(ranks, warn, machines="aa", recipe=BF16, compression="int8", warning=said)


def be_killed(machines: str, **placement: Any) -> str:
    with on_machines(machines), exempting(0):
        module, optimizer = prepare(BF16)
        engine = Engine(module, [optimizer], unit_numel=0, compression="int8", **placement)
    for step in range(40):
        if rank() == 3 and step == 20:
            die()
        module(*batch(step)).backward()
        optimizer.step()
    engine.close()
    return "trained on"


def kill_one(machines: str, **placement: Any) -> None:
    *others, killed = run_ranks(partial(be_killed, machines, **placement), 4)
    assert killed.code == -9
    for ending in others:
        assert ending.code == 1 and "rank 3 was killed" in ending.said and ending.seconds < 15


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("machines", "placement"), [("aabb", WITHIN), ("aabb", {"stage": 2}), ("abcd", {"stage": 2})], ids=str
)
def test_a_killed_rank_ends_the_others(run_on, machines, placement):
    run_on(1, kill_one, machines=machines, **placement)
