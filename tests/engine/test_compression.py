"""Compression of what crosses between machines. Machines are pretended ones, as in test_several_machines."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_zero import CompressionConfig, full_grad
from lightning_zero.engine import Engine, EngineConfig
from lightning_zero.engine.comm import process_group
from tests.engine.test_several_machines import on_machines, train_on
from tests.engine.test_shard_within import WRITERS, parts_are_those_of
from tests.support import whole
from tests.support.lost import die, run_ranks
from tests.support.models import OddModel, Square, adam
from tests.support.training import Recipe, batch, prepare, same_runs, same_tensors
from tests.support.workers import rank

BF16 = Recipe(OddModel, adam, dtype=torch.bfloat16)
WITHIN = {"stage": 3, "shard_within": "node"}
PLACEMENTS = pytest.mark.parametrize("placement", [{"stage": 1}, {"stage": 2}, WITHIN], ids=str)
EIGHT_BITS = {"gradients": "int8", "exempt_numel": 0}
FOUR_BITS = {"parameters": "int4", "exempt_numel": 0}


def train(machines: str, recipe: Recipe, stage: int, **options: Any) -> Any:
    return train_on(machines, stage, recipe, **options)


# -- without loss -----------------------------------------------------------------------------------------------------


def train_exactly(machines: str, recipe: Recipe, compression: Any = "exact", **options: Any) -> None:
    same_runs(train(machines, recipe, compression=compression, **options), train(machines, recipe, **options))


@pytest.mark.behaviour("The numbers", '`compression="exact"` between machines', notes={3: "with `shard_within`"})
@PLACEMENTS
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({}, torch.float16),
        ({"compute_dtype": torch.bfloat16}, torch.float32),
        ({"offload": "cpu"}, torch.bfloat16),
        ({"offload": {"optimizer": "cpu", "gradients": "cpu"}, "compute_dtype": torch.bfloat16}, torch.float32),
        ({"overlap": False, "unit_numel": 2**20}, torch.bfloat16),
    ],
    ids=str,
)
def test_exact_compression_changes_no_bit(run_on, placement, options, dtype):
    run_on(4, train_exactly, machines="aabb", recipe=Recipe(OddModel, adam, dtype=dtype), **placement, **options)


@pytest.mark.exhaustive
@PLACEMENTS
def test_exact_compression_from_a_disk_changes_no_bit(run_on, tmp_path, placement):
    offload = {"optimizer": "nvme", "path": str(tmp_path)}
    run_on(4, train_exactly, machines="aabb", recipe=BF16, offload=offload, **placement)


@pytest.mark.parametrize(("ranks", "machines"), [(2, "ab"), (3, "aab"), (4, "abab")])
def test_machines_may_have_one_rank_or_different_numbers_of_them(run_on, ranks, machines):
    run_on(ranks, train_exactly, machines=machines, recipe=BF16, stage=2)


@pytest.mark.parametrize("optimizer", [whole.adafactor, whole.muon_and_adamw], ids=["adafactor", "muon"])
def test_owners_of_whole_parameters_send_changes(run_on, optimizer):
    recipe = Recipe(whole.Layered, optimizer, dtype=torch.bfloat16)
    run_on(4, train_exactly, machines="aabb", recipe=recipe, stage=2)


def wide() -> torch.nn.Module:
    return Square(64, 4)


def count(**options: Any) -> None:
    """Bytes that cross in a step, by what the engine counts, with Adam's small changes of 16-bit parameters."""
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
    found = crossed("exact")
    assert found["reduce_scatter"] == 4 * numel // 4
    assert found["all_gather"] < 0.6 * 2 * numel // 4, "most changes take four bits or fewer"
    found = crossed({"parameters": "int4", "gradients": "int8", "exempt_numel": 64})
    assert found["reduce_scatter"] == (1 + 4 / 128) * numel // 4
    assert found["all_gather"] == (0.5 + 4 / 128) * numel // 4


@PLACEMENTS
def test_fewer_bytes_cross(run_on, placement):
    run_on(4, count, **placement)


# -- gradients in 8 bits, changes in 4 --------------------------------------------------------------------------------


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def train_nearly(compression: dict[str, Any], bound: float, micro_batches: int = 1, **options: Any) -> None:
    recipe = Recipe(OddModel, sgd, micro_batches=micro_batches)
    found = train("aabb", recipe, compression=compression, **options)
    same_runs(found, expected := train("aabb", recipe, **options), bound=bound)
    assert any(not torch.equal(found.weights[name], value) for name, value in expected.weights.items())


@pytest.mark.parametrize("placement", [{"stage": 1}, {"stage": 2}, {"stage": 3}, WITHIN], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_in_8_bits_train_nearly_alike(run_on, placement, micro_batches):
    run_on(4, train_nearly, compression=EIGHT_BITS, bound=1e-2, micro_batches=micro_batches, **placement)


@PLACEMENTS
def test_changes_in_4_bits_train_nearly_alike(run_on, placement):
    run_on(4, train_nearly, compression=FOUR_BITS, bound=2e-2, compute_dtype=torch.bfloat16, **placement)


@PLACEMENTS
def test_what_other_machines_have_of_parameters_in_16_bits_is_their_value(run_on, placement):
    """Which is read and saved, so it is never an approximation."""
    run_on(4, train_exactly, machines="aabb", recipe=BF16, compression=FOUR_BITS, **placement)


def sum_up() -> None:
    """The owner adds its own sum as it is and the other machine's within half a step, in fp32."""
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


def test_sums_are_within_half_a_step(run_on):
    run_on(4, sum_up)


def exempt() -> None:
    """Biases, norms and small weights are sent as they are, whatever their neighbours are."""
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


def test_small_parameters_and_those_of_one_dimension_are_exempt(run_on):
    run_on(4, exempt)


# -- one copy ---------------------------------------------------------------------------------------------------------


def copies_are_alike(engine: Engine) -> None:
    """What other machines keep of a rank's shard is what the rank keeps of it."""
    for bucket in engine.buckets:
        kept = bucket.part.values() if bucket.part is not None else bucket.full
        start = bucket.layout.own_part[0] if bucket.part is not None else 0
        bucket.wait()
        copies: list[Any] = [None] * 4
        dist.all_gather_object(copies, (start, kept.clone()))
        for begin, copy in copies:
            if begin == start:
                assert torch.equal(copy, kept), bucket.unit_name


def write_and_train(write: Any, compression: dict[str, Any], **options: Any) -> None:
    is_mixed = compression == FOUR_BITS
    with on_machines("aabb"):
        module, optimizer = prepare(Recipe() if is_mixed else BF16)
        options |= {"compute_dtype": torch.bfloat16} if is_mixed else {}
        engine = Engine(module, [optimizer], unit_numel=0, compression=compression, **options)
    for turn in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = module(*batch(turn))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        copies_are_alike(engine)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            write(module)
        copies_are_alike(engine)
        if compression.get("parameters") == "exact" and "shard_within" in options:
            parts_are_those_of(module, engine)
    engine.close()


@PLACEMENTS
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("compression", [{"parameters": "exact"}, FOUR_BITS], ids=str)
def test_all_machines_have_the_same_parameters_after_every_write(run_on, write, compression, placement):
    run_on(4, write_and_train, write=write, compression=compression, **placement)


def skip_a_step(compression: Any, **options: Any) -> None:
    """A step that finds an overflow changes nothing, and the next one goes on."""
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


def test_an_overflow_skips_the_step_everywhere(run_on):
    run_on(4, skip_a_step, compression=EIGHT_BITS, stage=2)


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compression": "zip"}, "compression='zip' must be None, 'exact', 'int8', 'int4' or a CompressionConfig"),
        ({"compression": {"weights": "int4"}}, "'weights' is not an option. The options are parameters, gradients"),
        ({"compression": {"gradients": "exact"}}, "gradients='exact' must be None, 'int8' or 'int4'"),
        ({"compression": {"parameters": "int8"}}, "parameters='int8' must be None, 'exact' or 'int4'"),
        ({"compression": {"gradients": "int8", "block": 3}}, "block=3 must be an even number of at least 2"),
        (
            {"compression": {"gradients": "int8", "exempt_numel": -1}},
            "exempt_numel=-1 must be an integer of at least 0",
        ),
        ({"compression": "exact", "stage": 3}, "at stage 3 they have none. Write shard_within='node'"),
        ({"compression": "int8", "stage": 2, "reduce_dtype": "bf16"}, "both say how gradients are sent"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**options)


def refuse(machines: str, recipe: Recipe, said: str, **options: Any) -> None:
    module, optimizer = prepare(recipe)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with on_machines(machines), pytest.raises(ValueError, match=said):
        Engine(module, [optimizer], **options)
    same_tensors(dict(module.state_dict()), before, bound=0)


@pytest.mark.parametrize("compression", ["exact", {"gradients": "int8"}], ids=str)
def test_compression_of_nothing_is_refused(run_on, compression):
    """Nothing is in 16 bits; all parameters are small."""
    run_on(
        4, refuse, machines="aabb", recipe=Recipe(), said="compresses nothing here", stage=2, compression=compression
    )


def refuse_over_another_backend() -> None:
    with pytest.MonkeyPatch.context() as patch:
        new_group = process_group.new_group
        patch.setattr(process_group, "backend_name", lambda *_: "another")
        patch.setattr(process_group, "new_group", lambda ranks, _, timeout: new_group(ranks, "gloo", timeout))
        refuse("aabb", BF16, "is for ranks on CPUs that communicate over Gloo", stage=2, compression="exact")


def test_other_backends_are_refused(run_on):
    run_on(4, refuse_over_another_backend)


def warn_on_one_machine() -> None:
    module, optimizer = prepare(BF16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = Engine(module, [optimizer], stage=2, compression="exact")
    said = [str(each.message) for each in caught if "nothing is compressed" in str(each.message)]
    assert len(said) == (rank() == 0)
    module(*batch(0)).backward()
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_machine_is_warned_that_nothing_is_compressed(run_on, ranks):
    run_on(ranks, warn_on_one_machine)


def be_killed() -> str:
    with on_machines("aabb"):
        module, optimizer = prepare(BF16)
        engine = Engine(module, [optimizer], unit_numel=0, compression="exact", **WITHIN)
    for step in range(40):
        if rank() == 3 and step == 20:
            die()
        module(*batch(step)).backward()
        optimizer.step()
    engine.close()
    return "trained on"


def kill_one() -> None:
    *others, killed = run_ranks(be_killed, 4)
    assert killed.code == -9
    for ending in others:
        assert ending.code == 1 and "rank 3 was killed" in ending.said and ending.seconds < 15


def test_a_killed_rank_ends_the_others(run_on):
    run_on(1, kill_one)
