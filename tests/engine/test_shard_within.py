"""Parameters sharded within each machine, master weights over all ranks (``shard_within``).

The machines are simulated, as in test_several_machines.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero import full_grad, iter_full_parameters, uneven_forwards
from lightning_zero.engine import Engine, EngineConfig
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.plan.mesh import Topology
from tests.engine.test_several_machines import MACHINES, on_machines, train_on
from tests.support import whole
from tests.support.lost import die, run_ranks
from tests.support.models import OddModel, Square, adam
from tests.support.training import CLOSE, Recipe, Run, batch, prepare, same_runs, same_tensors, train_ddp
from tests.support.workers import rank, world_size


def train_as_flat(machines: str, recipe: Recipe, bound: float = CLOSE, **options: Any) -> None:
    within = train_on(machines, 3, recipe, shard_within="node", **options)
    same_runs(within, train_on(machines, 3, recipe, **options))
    same_runs(within, train_ddp(recipe), bound=bound)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The numbers",
    "`shard_within`: stage 3 within each machine, the optimizer over all ranks",
    notes={1: "refused", 2: "refused"},
)
@MACHINES
@pytest.mark.parametrize(
    "options",
    [{}, {"unit_numel": 2**20}, {"offload": "cpu"}, {"overlap": False}, {"prefetch": 0, "reduction_buffers": 1}],
    ids=str,
)
def test_training_equals_stage_3_bit_for_bit(run_on, machines, options):
    run_on(4, train_as_flat, machines=machines, recipe=Recipe(OddModel, adam), **options)


def train_in_bf16(options: dict[str, Any], dtype: torch.dtype) -> None:
    recipe = Recipe(OddModel, adam, dtype=dtype)
    within = train_on("aabb", 3, recipe, shard_within="node", **options)
    same_runs(within, train_on("aabb", 3, recipe, **options))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"compute_dtype": torch.bfloat16}, torch.float32),
        ({"reduce_dtype": "bf16"}, torch.float32),
        ({"offload": "cpu"}, torch.bfloat16),
        ({"state_dtype": "bf16", "masters": False}, torch.bfloat16),
        ({"offload": {"optimizer": "cpu", "gradients": "cpu"}, "compute_dtype": torch.bfloat16}, torch.float32),
    ],
    ids=str,
)
def test_low_precision_training_equals_stage_3_bit_for_bit(run_on, options, dtype):
    run_on(4, train_in_bf16, options=options, dtype=dtype)


def train_on_disk(folder: str) -> None:
    offload = {"optimizer": "nvme", "path": folder}
    train_as_flat("aabb", Recipe(OddModel, adam), offload=offload)
    train_in_bf16({"offload": offload}, torch.bfloat16)


@pytest.mark.exhaustive
def test_states_on_a_disk_are_sharded_over_all_ranks(run_on, tmp_path):
    run_on(4, train_on_disk, folder=str(tmp_path))


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("optimizer", "bound"),
    [(whole.adafactor, 1e-5), (whole.muon_and_adamw, 1e-2)],  # Newton-Schulz in bf16 amplifies differences of sums
    ids=["adafactor", "muon"],
)
def test_owners_of_whole_parameters_train_as_at_stage_3(run_on, optimizer, bound):
    run_on(4, train_as_flat, machines="aabb", recipe=Recipe(whole.Layered, optimizer), bound=bound)


def freeze_some(module: nn.Module) -> torch.optim.Optimizer:
    for parameter in (*module.embed.parameters(), *module.blocks[0].parameters()):  # type: ignore[operator, union-attr, index]
        parameter.requires_grad_(False)
    return adam(module)


def test_frozen_weights_stay_and_the_others_train(run_on):
    run_on(4, train_as_flat, machines="aabb", recipe=Recipe(OddModel, freeze_some))


# -- groups of ranks --------------------------------------------------------------------------------------------------


def train_in_groups() -> None:
    recipe = Recipe(OddModel, adam)
    within = train_on("aaaa", 3, recipe, shard_within=2)
    same_runs(within, train_on("aabb", 3, recipe, shard_within="node"))
    same_runs(within, train_on("abab", 3, recipe, shard_within=2), bound=CLOSE)


def test_a_number_forms_groups_of_adjacent_ranks_within_a_machine(run_on):
    run_on(4, train_in_groups)


def train_flat(machines: str, within: Any) -> None:
    recipe = Recipe(OddModel, adam, steps=3)
    run = train_on(machines, 3, recipe, shard_within=within)
    same_runs(run, train_on(machines, 3, recipe))
    with on_machines(machines):
        module, optimizer = prepare(recipe)
        engine = Engine(module, [optimizer], shard_within=within)
    assert all(bucket.part is None and bucket.layout.nodes == 1 for bucket in engine.buckets)
    engine.close()


@pytest.mark.parametrize(
    ("size", "machines", "within"),
    [(2, "aa", "node"), (2, "ab", "node"), (4, "aaaa", 4), (4, "aabb", 4), (1, "a", "node")],
)
@pytest.mark.exhaustive
def test_one_group_or_groups_of_one_rank_equal_stage_3(run_on, size, machines, within):
    run_on(size, train_flat, machines=machines, within=within)


def refuse(machines: str, within: Any, said: str) -> None:
    module, optimizer = prepare(Recipe(Square, adam))
    before = copy.deepcopy(module.state_dict())
    with on_machines(machines), pytest.raises(ValueError, match=said):
        Engine(module, [optimizer], shard_within=within)
    same_tensors(dict(module.state_dict()), dict(before), bound=0)
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    Engine(module, [optimizer]).close()


@pytest.mark.parametrize(
    ("size", "machines", "within", "said"),
    [
        (4, "aabb", 3, "shard_within=3 does not divide 4 ranks: write 2 or 'node'"),
        (3, "aab", "node", "the machines run 2 and 1 ranks: leave it out"),
    ],
)
def test_impossible_groups_are_refused_on_every_rank(run_on, size, machines, within, said):
    run_on(size, refuse, machines=machines, within=within, said=said)


@pytest.mark.parametrize(
    ("machines", "within", "said"),
    [
        ("aaaabbbb", 3, "shard_within=3 does not divide 8 ranks: write 2, 4 or 'node'."),
        ("aaaaabb", 3, "shard_within=3 does not divide 7 ranks: leave it out."),
        ("abcdefg", 3, "shard_within=3 does not divide 7 ranks: write 'node'."),
        ("aaaabb", 4, "shard_within=4 does not divide 6 ranks: write 2 or 3."),
        ("aaaaaaaabbbb", "node", "the machines run 8 and 4 ranks: write a number of ranks per group (2 or 4)."),
        ("aaabbc", "node", "the machines run 3, 2 and 1 ranks: write a number of ranks per group (2 or 3)."),
    ],
)
def test_the_error_for_an_impossible_group_lists_the_possible_ones(machines, within, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Topology(tuple(machines)).groups(within)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 2}, "shard_within='node' requires stage 3: at stage 2 every rank keeps all parameters"),
        ({"shard_within": "nodes"}, "shard_within='nodes' must be 'node', an integer of at least 2 or None"),
        ({"shard_within": 1}, "shard_within=1 must be 'node', an integer of at least 2 or None"),
        ({"shard_within": True}, "shard_within=True must be"),
        ({"offload": {"optimizer": "cpu", "parameters": "cpu"}}, "parameters='cpu' would offload them"),
    ],
)
def test_options_that_contradict_shard_within_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(**({"shard_within": "node"} | options))


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"offload": "cpu"},
        {"offload": {"optimizer": "cpu", "gradients": "cpu"}},
        {"overlap": False},
        {"reduce_dtype": "fp32", "unit_numel": 2**20},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", [None, nn.utils.clip_grad_norm_], ids=["", "clipped"])
def test_accumulated_micro_batches_train_as_ddp(run_on, options, clip):
    recipe = Recipe(OddModel, adam, micro_batches=3, clip=None if clip is None else clipped)
    run_on(4, train_micro_batches, recipe=recipe, options=options)


def clipped(parameters: Any) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.5)


def train_micro_batches(recipe: Recipe, options: dict[str, Any]) -> None:
    same_runs(train_on("aabb", 3, recipe, shard_within="node", **options), train_ddp(recipe), bound=CLOSE)


class Sums(nn.Module):
    """Its gradients are integers, whose sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding(11, 16) for _ in range(4))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return sum(layer(tokens + 0 * number).sum() * (number + 1) for number, layer in enumerate(self.layers))  # type: ignore[return-value]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=2**-10)


def train_on_integers() -> None:
    recipe = Recipe(Sums, sgd, micro_batches=4)
    same_runs(train_on("aabb", 3, recipe, shard_within="node"), train_ddp(recipe))


def test_accumulated_gradients_equal_ddps_bit_for_bit_where_sums_are_exact(run_on):
    run_on(4, train_on_integers)


@contextlib.contextmanager
def sharded(machines: str = "aabb", recipe: Recipe | None = None, **options: Any) -> Iterator[tuple[Any, Any, Engine]]:
    module, optimizer = prepare(recipe or Recipe(OddModel, adam))
    with on_machines(machines):
        engine = Engine(module, [optimizer], shard_within="node", **options)
    yield module, optimizer, engine
    engine.close()


def crossed(engine: Engine, kind: str = "reduce_scatter") -> int:
    """Elements that have crossed between machines, from or to this rank."""
    return engine.communicator.counters.elements[kind, "across"]


def read_between() -> None:
    with sharded() as (module, optimizer, engine):
        expected, _ = prepare(Recipe(OddModel, adam))
        reference = nn.parallel.DistributedDataParallel(expected)
        for index in range(3):
            with engine.no_sync() if index < 2 else contextlib.nullcontext():
                module(*batch(index)).backward()
            reference(*batch(index)).backward()
            if index == 0:
                assert crossed(engine) == 0
                same_tensors({"grad": full_grad(module.head.weight)}, {"grad": expected.head.weight.grad}, CLOSE)
                once = crossed(engine)
                assert once > 0
                full_grad(module.head.bias)  # of the same bucket, which is complete
                assert crossed(engine) == once
        for (name, parameter), theirs in zip(module.named_parameters(), expected.parameters()):
            if parameter.numel():
                same_tensors({name: full_grad(parameter)}, {name: theirs.grad}, 1e-5)


def test_reading_a_gradient_between_micro_batches_completes_it(run_on):
    run_on(4, read_between)


def drop_between() -> None:
    with sharded() as (module, optimizer, engine):
        with engine.no_sync():
            module(*batch(0)).backward()
        module.widen.weight.grad = None
        optimizer.zero_grad()
        module(*batch(1)).backward()
        found = {name: full_grad(p) for name, p in module.named_parameters() if p.numel()}
    with sharded() as (module, optimizer, engine):
        module(*batch(1)).backward()
        same_tensors(found, {name: full_grad(p) for name, p in module.named_parameters() if p.numel()}, bound=0)


def test_dropped_gradients_leave_nothing_behind(run_on):
    run_on(4, drop_between)


def keep_what_is_dropped(keepers: list[int]) -> None:
    """Between micro-batches a gradient is dropped on all ranks, but some ranks still refer to it."""
    expected, _ = prepare(Recipe(OddModel, adam))
    reference = nn.parallel.DistributedDataParallel(expected)
    reference(*batch(0)).backward()
    norm = expected.widen.weight.grad.norm()
    reference.zero_grad()
    with sharded() as (module, _, engine):
        with engine.no_sync(), reference.no_sync():
            module(*batch(0)).backward()
            reference(*batch(0)).backward()
        kept = module.widen.weight.grad if rank() in keepers else None
        module.widen.weight.grad = expected.widen.weight.grad = None
        module(*batch(1)).backward()
        reference(*batch(1)).backward()
        for (name, parameter), theirs in zip(module.named_parameters(), expected.parameters()):
            if parameter.numel():
                same_tensors({name: full_grad(parameter)}, {name: theirs.grad}, 1e-5)
        if kept is not None and len(keepers) == world_size():  # it is sharded, so all ranks must read it
            same_tensors({"kept": kept.norm()}, {"kept": norm}, 1e-5)


@pytest.mark.parametrize("keepers", [[1], [0, 1, 2, 3]])
def test_ranks_may_keep_a_gradient_that_is_dropped_between_micro_batches(run_on, keepers):
    run_on(4, keep_what_is_dropped, keepers=keepers, timeout=60)


class Partly(OddModel):
    """A model with a layer that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.widen.unused = nn.Linear(3, 3)


def accumulate_partly() -> None:
    with sharded(recipe=Recipe(Partly, adam), unit_numel=2**20) as (module, optimizer, engine):
        for micro_batch in range(4):
            assert crossed(engine) == 0
            with engine.no_sync() if micro_batch < 3 else contextlib.nullcontext():
                module(*batch(micro_batch)).backward()
        assert crossed(engine) == sum(bucket.layout.padded_numel for bucket in engine.buckets) // 4
        assert module.widen.unused.weight.grad is None
        optimizer.step()


def test_unused_parameters_do_not_make_gradients_cross_more_often(run_on):
    run_on(4, accumulate_partly)


def refuse_a_read() -> None:
    """Ranks that read different things are refused, and the accumulated gradients stay."""
    results = []
    for reads in (False, True):
        with sharded() as (module, optimizer, engine):
            with engine.no_sync():
                module(*batch(0)).backward()
            if reads:
                with pytest.raises(RuntimeError, match="so far summed only within each machine"):
                    if rank() == 1:
                        module.head.weight.grad.norm()
                    engine.communicator.rendezvous.meet("another read")
            module(*batch(1)).backward()
            optimizer.step()
            results.append(engine.full_state_dict())
    same_tensors(results[1], results[0], bound=0)


def test_a_refused_read_loses_no_gradients(run_on):
    run_on(4, refuse_a_read)


def fail_after_backward() -> None:
    """An exception between backward and step."""
    with sharded(offload="cpu", unit_numel=0) as (module, optimizer, engine):
        for step in range(3):
            try:
                module(*batch(step)).backward()
                if step == 2:
                    raise KeyError
            except KeyError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            module(*batch(0))
        parts_are_those_of(module, engine)


def test_after_a_failed_step_both_machines_have_the_same_weights(run_on):
    run_on(4, fail_after_backward)


# -- memory and traffic -----------------------------------------------------------------------------------------------

WIDTH, LAYERS = 64, 8
PSI = WIDTH * WIDTH * LAYERS


def wide() -> nn.Module:
    return Square(WIDTH, LAYERS)


def measure(kind: str, micro_batches: int) -> None:
    """With R ranks on machines of G, in bf16, bytes per parameter: 2 / G + 16 / R; accumulating 6 / G + 12 / R."""
    recipe = Recipe(wide, adam, dtype=torch.bfloat16 if kind == "true" else torch.float32)
    options = {"compute_dtype": torch.bfloat16} if kind == "mixed" else {}
    width, ranks, here = 4 if kind == "fp32" else 2, 4, 2
    parameters = width * PSI // here + (0 if kind == "fp32" else 4 * PSI // ranks)
    with sharded(recipe=recipe, unit_numel=0, **options) as (module, optimizer, engine):
        assert held(engine) == {"parameters": parameters}
        for step in range(3):
            for micro_batch in range(micro_batches):
                is_last = micro_batch + 1 == micro_batches
                with torch.autocast("cpu", torch.bfloat16, enabled=kind != "fp32"):
                    loss = module(*batch(step))
                with contextlib.nullcontext() if is_last else engine.no_sync():
                    loss.backward()
                gradients = 4 * PSI // (ranks if is_last else here)
                states = {"optimizer": 8 * PSI // ranks} if step else {}
                assert held(engine) == {"parameters": parameters, "gradients": gradients} | states
            optimizer.step()
            optimizer.zero_grad()
        at_rest = {"parameters": parameters, "optimizer": 8 * PSI // ranks}
        assert held(engine) == at_rest
        assert engine.report().formula == sum(at_rest.values()) + 4 * PSI // ranks


def held(engine: Engine) -> dict[str, int]:
    return {category: nbytes for category, nbytes in engine.report().at_rest.items() if nbytes}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("kind", ["fp32", "mixed", "true"])
def test_a_ranks_memory_follows_the_formula(run_on, kind, micro_batches):
    run_on(4, measure, kind=kind, micro_batches=micro_batches)


def count(micro_batches: int) -> None:
    with sharded(recipe=Recipe(wide, adam), unit_numel=0) as (module, optimizer, engine):
        for step in range(3):
            if step == 1:
                engine.reset_counters()
            for micro_batch in range(micro_batches):
                with contextlib.nullcontext() if micro_batch + 1 == micro_batches else engine.no_sync():
                    module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        elements = engine.communicator.counters.elements
        for kind in ("all_gather", "reduce_scatter"):
            assert elements[kind, "across"] == 2 * PSI // 4, "half of this rank's part, once a step"
        layer = WIDTH * WIDTH
        assert elements["all_gather", "within"] == 2 * (micro_batches * (2 * PSI - layer) + PSI // 4)
        assert elements["reduce_scatter", "within"] == 2 * (micro_batches * PSI + PSI // 4)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_parameter_and_each_gradient_crosses_between_machines_once_a_step(run_on, micro_batches):
    run_on(4, count, micro_batches=micro_batches)


def count_frozen() -> None:
    def freeze(module: nn.Module) -> torch.optim.Optimizer:
        for layer in list(module.children())[0][1:]:  # type: ignore[index]
            layer.requires_grad_(False)
        return adam(module)

    with sharded(recipe=Recipe(wide, freeze), unit_numel=0) as (module, optimizer, engine):
        for step in range(2):
            module(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        layer = WIDTH * WIDTH
        assert crossed(engine, "all_gather") == crossed(engine) == 2 * layer // 4


def test_frozen_weights_never_cross_between_machines(run_on):
    run_on(4, count_frozen)


# -- one copy ---------------------------------------------------------------------------------------------------------


def parts_are_those_of(module: nn.Module, engine: Engine) -> None:
    """Each rank's part of the parameters at rest equals the master weights of all ranks, in the compute dtype."""
    values = engine.full_state_dict()
    for bucket in engine.buckets:
        assert bucket.part is not None
        low, high = bucket.layout.own_part
        found = bucket.part.values()
        for segment in bucket.layout.segments:
            start, stop = max(segment.start, low), min(segment.stop, high)
            if stop > start:
                part = values[segment.name].flatten()[start - segment.start : stop - segment.start]
                same_tensors({segment.name: found[start - low : stop - low]}, {segment.name: part.to(found.dtype)}, 0)


def average(module: nn.Module) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for parameter in module.parameters():
        parameter.mul_(0.5)
    averaged.update_parameters(module)
    for parameter, mean in zip(module.parameters(), averaged.module.parameters()):
        parameter.copy_(mean)


def load(module: nn.Module) -> None:
    other, _ = prepare(Recipe(OddModel, adam))
    module.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})


def clamp(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.clamp_(-0.01, 0.01)


def clamp_together(module: nn.Module) -> None:
    torch._foreach_mul_(list(module.parameters()), 0.5)


def set_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter, 0.25)


def write_elements(module: nn.Module) -> None:
    module.head.weight[3, 4] = 7.0  # type: ignore[union-attr, index, operator]
    module.embed.weight[2].fill_(0.5)  # type: ignore[union-attr, index, operator]


def write_in_full(module: nn.Module) -> None:
    from lightning_zero import full_parameters

    with full_parameters(module, writeback=True):
        for parameter in module.parameters():
            parameter.fill_(0.125)


def write_in_a_forward(module: nn.Module) -> None:
    def write(inner: nn.Module, *_: Any) -> None:
        inner.weight.mul_(0.5)  # type: ignore[operator, union-attr]

    handle = module.widen.register_forward_pre_hook(write)  # type: ignore[union-attr]
    module(*batch(3, of=0))
    handle.remove()


WRITERS = [average, load, clamp, clamp_together, set_data, write_elements, write_in_full, write_in_a_forward]


def write_by(write: Callable[[nn.Module], None], options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options.pop("is_low", False) else torch.float32
    recipe = Recipe(OddModel, adam, dtype=dtype)
    plain, _ = prepare(recipe)
    with torch.no_grad():
        write(plain)
    with sharded(recipe=recipe, **options) as (module, optimizer, engine):
        with torch.no_grad():
            write(module)
        same_tensors(engine.full_state_dict(), dict(plain.state_dict()), bound=0)
        same_tensors(dict(iter_full_parameters(module, 4000)), dict(plain.state_dict()), bound=0)
        parts_are_those_of(module, engine)
        module(*batch(0)).backward()
        optimizer.step()
        with torch.no_grad():
            write(module)
        parts_are_those_of(module, engine)


@pytest.mark.exhaustive(but=2)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("options", [{}, {"is_low": True}, {"offload": "cpu"}], ids=str)
def test_every_write_reaches_the_parts_of_all_machines(run_on, write, options):
    run_on(4, write_by, write=write, options=options)


# -- turns ------------------------------------------------------------------------------------------------------------


def evaluate_unevenly() -> None:
    """Ranks have different numbers of batches; each machine's ranks take turns among themselves."""
    with sharded(unit_numel=0) as (module, _, engine):
        expected, _ = prepare(Recipe(OddModel, adam))
        for turns in ([1, 3, 0, 5], [0, 0, 2, 2]):
            outputs = []
            for index in range(turns[rank()]):
                engine.take_turn(0)
                with torch.no_grad():
                    outputs.append(module(*batch(index)))
            engine.take_turn(None)
            with torch.no_grad():
                same = [expected(*batch(index)) for index in range(turns[rank()])]
            assert torch.equal(torch.tensor(outputs), torch.tensor(same))


def test_uneven_evaluation_takes_turns_within_machines(run_on):
    run_on(4, evaluate_unevenly)


def read_in_turns() -> None:
    """A rank reads parameters while ranks of the other machine do something else."""
    with sharded(unit_numel=0) as (module, _, engine):
        expected, _ = prepare(Recipe(OddModel, adam))
        for _ in range([3, 2, 0, 1][rank()]):
            engine.take_turn(0)
            with torch.no_grad():
                module(*batch(0))
                assert torch.equal(module.head.weight.sum(), expected.head.weight.sum())
        engine.take_turn(None)


def test_parameters_are_read_in_turns_within_machines(run_on):
    run_on(4, read_in_turns)


def forward_unevenly() -> None:
    with sharded(unit_numel=0) as (module, _, engine), torch.no_grad():
        with uneven_forwards(module):
            for index in range([4, 1, 0, 2][rank()]):
                module(*batch(index))
        before = crossed(engine, "all_gather")
        assert before == 0, "parameters are on both machines"


def test_uneven_forwards_take_turns_within_machines(run_on):
    run_on(4, forward_unevenly)


# -- states -----------------------------------------------------------------------------------------------------------


def resume(first: dict[str, Any], then: dict[str, Any]) -> None:
    """Four steps, the last two possibly with another placement; the states are whole in between."""
    runs = []
    for options in ((first, first), (first, then)):
        module, optimizer = prepare(Recipe(OddModel, adam))
        for half, given in enumerate(options):
            with on_machines("aabb"):
                engine = Engine(module, [optimizer], **given)
            for step in range(2):
                module(*batch(2 * half + step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            engine.close()
        runs.append(Run([], dict(module.state_dict())))
    same_runs(*runs)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("within_first", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
def test_states_carry_over_from_one_placement_to_another(run_on, within_first, stage):
    within, flat = {"shard_within": "node"}, {"stage": stage}
    run_on(4, resume, first=within if within_first else flat, then=flat if within_first else within)


def come_back() -> None:
    """As after a failure on all ranks alike: with a new process group, each rank's own shard is used."""
    for machines, options in (("aabb", {}), ("aabb", {"offload": "cpu"}), ("abab", {})):
        module, optimizer = prepare(Recipe(OddModel, adam))
        with on_machines(machines):
            engine = Engine(module, [optimizer], shard_within="node", **options)
        for step in range(2):
            module(*batch(step)).backward()
            optimizer.step()
        expected = engine.full_state_dict()
        process_group.restart(timeout=timedelta(seconds=60))
        with on_machines(machines):
            engine.rejoin()
        same_tensors(engine.full_state_dict(), expected, bound=0)
        with torch.no_grad():
            module(*batch(0))
        engine.close()
        same_tensors(dict(module.state_dict()), expected, bound=0)


def test_ranks_can_rejoin_save_and_close_after_a_failure(run_on):
    run_on(4, come_back)


def be_killed() -> str:
    module, optimizer = prepare(Recipe(Square, adam))
    with on_machines("aabb"):
        engine = Engine(module, [optimizer], shard_within="node")
    for step in range(3):
        if step == 1 and rank() == 3:
            die()
        module(*batch(step)).backward()
        optimizer.step()
    engine.close()
    return "trained on"


def test_a_killed_rank_ends_the_others_on_both_machines(run_on):
    run_on(1, kill_one)


def kill_one() -> None:
    *others, killed = run_ranks(be_killed, 4)
    assert killed.code == -9
    for ending in others:
        assert ending.code == 1 and "rank 3 was killed" in ending.said and ending.seconds < 15


# -- other backends and wrappers --------------------------------------------------------------------------------------


def train_over_another_backend() -> None:
    """Over Gloo's own collectives under another backend's name, in subgroups."""
    recipe = Recipe(OddModel, adam, steps=3)
    expected = train_ddp(recipe)
    with pytest.MonkeyPatch.context() as patch:
        new_group = process_group.new_group
        patch.setattr(process_group, "backend_name", lambda *_: "another")
        patch.setattr(process_group, "new_group", lambda ranks, _, timeout: new_group(ranks, "gloo", timeout))
        found = train_on("aabb", 3, recipe, shard_within="node")
        accumulated = train_on("aabb", 3, Recipe(OddModel, adam, 3, micro_batches=2), shard_within="node")
    same_runs(found, expected, bound=CLOSE)
    same_runs(accumulated, train_ddp(Recipe(OddModel, adam, 3, micro_batches=2)), bound=CLOSE)


def test_subgroups_of_another_backend_train_as_ddp(run_on):
    run_on(4, train_over_another_backend)


def train_compiled() -> None:
    expected, its_optimizer = prepare(Recipe(OddModel, adam))
    reference = nn.parallel.DistributedDataParallel(expected)
    with sharded() as (module, optimizer, engine):
        compiled = torch.compile(module, backend="aot_eager")
        for step in range(3):
            same_tensors(
                {"loss": compiled(*batch(step)).detach()}, {"loss": reference(*batch(step)).detach()}, bound=1e-5
            )
            compiled(*batch(step)).backward()
            reference(*batch(step)).backward()
            for each in (optimizer, its_optimizer):
                each.step()
                each.zero_grad()
        same_tensors(engine.full_state_dict(), dict(expected.state_dict()), bound=1e-5)


@pytest.mark.exhaustive
def test_compiled_modules_train_as_ddp(run_on):
    run_on(4, train_compiled)
    assert world_size() == 1 and not dist.is_initialized()
