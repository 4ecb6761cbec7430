"""Compression of data sent between machines. The machines are simulated, as in test_several_machines."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from lightning_zero import CompressionConfig, full_grad
from lightning_zero.engine import Engine, EngineConfig
from lightning_zero.engine.comm import process_group
from tests.engine.test_several_machines import on_machines, train_on
from tests.support.lost import die, run_ranks
from tests.support.models import OddModel, Square, adam
from tests.support.training import Recipe, batch, prepare, same_runs, same_tensors
from tests.support.workers import rank

BF16 = Recipe(OddModel, adam, dtype=torch.bfloat16)
WITHIN = {"stage": 3, "shard_within": "node"}
PLACED = [{"stage": 1}, {"stage": 2}, WITHIN]
PLACEMENTS = pytest.mark.parametrize("placement", PLACED, ids=str)
EIGHT_BITS = {"gradients": "int8", "exempt_numel": 0}
FOUR_BITS = {"gradients": "int4", "exempt_numel": 0}


# -- quantised gradients ----------------------------------------------------------------------------------------------


def wide() -> torch.nn.Module:
    return Square(64, 4)


def count(**options: Any) -> None:
    """Bytes sent between machines in a step, as the engine counts them, with Adam's small changes in 16 bits."""
    numel = 4 * 64 * 64

    def crossed(compression: Any) -> dict[str, int]:
        module, optimizer = prepare(Recipe(wide, lambda module: torch.optim.Adam(module.parameters(), lr=1e-4)))
        chosen = {"compression": compression, "compute_dtype": torch.bfloat16, **options}
        with on_machines("aabb"):
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
        found = crossed({"gradients": name, "exempt_numel": 64})
        assert found == {"all_gather": 2 * numel // 4, "reduce_scatter": (width + 4 / 128) * numel // 4}


@pytest.mark.exhaustive(but=1)
@PLACEMENTS
def test_compression_sends_fewer_bytes_between_machines(run_on, placement):
    run_on(4, count, **placement)


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def train_nearly(compression: dict[str, Any], bound: float, micro_batches: int, **options: Any) -> None:
    recipe = Recipe(OddModel, sgd, micro_batches=micro_batches)
    found = train_on("aabb", recipe=recipe, compression=compression, **options)
    same_runs(found, expected := train_on("aabb", recipe=recipe, **options), bound=bound)
    assert any(not torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("placement", [{"stage": 1}, {"stage": 2}, {"stage": 3}, WITHIN], ids=str)
@pytest.mark.parametrize(
    ("compression", "bound", "micro_batches"),
    [(EIGHT_BITS, 1e-2, 1), (FOUR_BITS, 1e-1, 2), (EIGHT_BITS, 1e-2, 2), (FOUR_BITS, 1e-1, 1)],
    ids=["int8-1", "int4-2", "int8-2", "int4-1"],
)
def test_quantised_gradients_train_nearly_the_same(run_on, placement, micro_batches, compression, bound):
    run_on(4, train_nearly, compression=compression, bound=bound, micro_batches=micro_batches, **placement)


def sum_up() -> None:
    """The owner adds its machine's sum unchanged and the other's to within half a quantisation step, in fp32."""
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    module = torch.nn.Linear(64, 64, bias=False)
    with on_machines("aabb"):
        engine = Engine(module, stage=2, compression=EIGHT_BITS)
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
    compression = CompressionConfig(gradients="int8", exempt_numel=100)
    with on_machines("aabb"):
        engine = Engine(module, [optimizer], stage=2, compression=compression)
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


def skip_a_step(compression: Any, **options: Any) -> None:
    """A step that finds an overflow changes nothing, and the next step trains."""
    with on_machines("aabb"):
        module, optimizer = prepare(Recipe(OddModel, adam))
        engine = Engine(module, [optimizer], compression=compression, **options)
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
    run_on(4, skip_a_step, compression=EIGHT_BITS, stage=2)


# -- errors and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"compression": "zip"},
            "compression='zip' must be None, 'int8', 'int4', a CompressionConfig or a mapping of its fields",
        ),
        ({"compression": {"weights": "int8"}}, "'weights' is not an option. The options are gradients, block"),
        ({"compression": {"gradients": "exact"}}, "gradients='exact' must be 'int8', 'int4' or None"),
        ({"compression": {"gradients": "int8", "block": 3}}, "block=3 must be an even number"),
        (
            {"compression": {"gradients": "int8", "exempt_numel": -1}},
            "exempt_numel=-1 must be an integer of at least 0",
        ),
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


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        ({"gradients": "int8"}, r"compression=.*int8.* has no effect: every trained parameter has fewer than two"),
        ("int4", "compression='int4' has no effect: .* fewer than exempt_numel=65536 elements"),
    ],
    ids=str,
)
def test_compression_without_any_effect_is_refused(run_on, compression, said):
    """All parameters are small."""
    run_on(4, refuse, machines="aabb", recipe=Recipe(), said=said, stage=2, compression=compression)


def over_another_backend(**options: Any) -> None:
    from lightning_zero.engine.comm import backend_transport

    with pytest.MonkeyPatch.context() as patch:
        new_group = process_group.new_group
        for module in (process_group, backend_transport):
            patch.setattr(module, "backend_name", lambda *_: "another")
        patch.setattr(process_group, "new_group", lambda ranks, _, timeout: new_group(ranks, "gloo", timeout))
        if "shard_within" in options:
            train_nearly(EIGHT_BITS, 1e-2, 1, **options)
        else:
            refuse("aabb", BF16, "works over NCCL only with shard_within", compression="int8", **options)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("placement", [WITHIN, {"stage": 2}], ids=str)
def test_over_another_backend_than_gloo_gradients_are_compressed_with_shard_within(run_on, placement):
    run_on(4, over_another_backend, **placement)


def warn(machines: str, recipe: Recipe, compression: Any, warning: str) -> None:
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
    with on_machines(machines):
        module, optimizer = prepare(BF16)
        engine = Engine(module, [optimizer], unit_numel=0, compression=EIGHT_BITS, **placement)
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
