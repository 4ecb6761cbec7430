"""Memory of a rank, at rest and at its peak, compared with the paper's formula and the bound on buffers."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import OddModel, Square, adam
from tests.support.selection import one_at_a_time
from tests.support.training import Recipe, batch, prepare
from tests.support.workers import world_size

WIDTH, LAYERS = 256, 8
UNIT = WIDTH * WIDTH  # elements of a layer; 8 * 4 divides them, so nothing is padded
PSI = LAYERS * UNIT

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
SIZES = pytest.mark.parametrize("size", [2, 4])
KINDS = pytest.mark.parametrize("kind", ["fp32", "mixed", "true"])
ROUNDED: dict[str, dict[str, Any]] = {
    "states": {"state_dtype": "bf16"},
    "no masters": {"masters": False},
    "lean": {"state_dtype": "bf16", "masters": False},
}
"""Kinds whose states or parameters are in bf16 and rounded stochastically: "lean" has 8 bytes an element at stage 3."""


def wide() -> nn.Module:
    return Square(WIDTH, LAYERS)


def make(stage: int, kind: str = "fp32", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model of 8 equal layers and no root unit, in fp32, in fp32 computed in bf16, in pure bf16, or in fp64."""
    from lightning_zero.engine import Engine

    low = dict.fromkeys(("true", "no masters", "lean"), torch.bfloat16)
    dtype = {**low, "fp64": torch.float64}.get(kind, torch.float32)
    module, optimizer = prepare(Recipe(wide, adam, dtype=dtype))
    if kind == "mixed":
        options["compute_dtype"] = torch.bfloat16
    options |= ROUNDED.get(kind, {})
    return module, optimizer, Engine(module, [optimizer], stage=stage, **options)


def loss_of(module: nn.Module, index: int, kind: str = "fp32") -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=kind not in ("fp32", "fp64", "states")):
        return module(*batch(index))


def held(engine: Any) -> dict[str, int]:
    return {category: nbytes for category, nbytes in engine.report().at_rest.items() if nbytes}


def expected_at_rest(stage: int, kind: str) -> dict[str, int]:
    """With Adam's state and without gradients: P_os, P_os+g, P_os+g+p of figure 1, for masters of 4 or 8 bytes."""
    ranks, master = world_size(), master_bytes(kind)
    if stage == 3:
        parameters = master * PSI // ranks  # the masters; a bf16 copy exists only while it is gathered
    elif kind not in ("mixed", "true"):
        parameters = master * PSI  # the masters are this rank's slice of the parameters
    else:
        parameters = 2 * PSI + master * PSI // ranks
    return {"parameters": parameters, "optimizer": 2 * state_bytes(kind) * PSI // ranks}


def master_bytes(kind: str) -> int:
    """Of masters, or of the parameters if there are none, and of gradients."""
    return {"fp64": 8, "no masters": 2, "lean": 2}.get(kind, 4)


def state_bytes(kind: str) -> int:
    return {"fp64": 8, "states": 2, "lean": 2}.get(kind, 4)


def measure_at_rest(stage: int, kind: str) -> None:
    torch.set_default_dtype(torch.float64 if kind == "fp64" else torch.float32)  # the dtype of the inputs
    module, optimizer, engine = make(stage, kind)
    expected = expected_at_rest(stage, kind)
    assert held(engine) == {"parameters": expected["parameters"]}, "before the first step there is no state"
    for index in range(2):
        loss_of(module, index, kind).backward()
        gradients = master_bytes(kind) * PSI // world_size()
        optimizer_state = expected["optimizer"] if index else 0
        with_gradients = {k: v for k, v in (expected | {"optimizer": optimizer_state}).items() if v}
        assert held(engine) == with_gradients | {"gradients": gradients}, "reduced gradients are sharded"
        optimizer.step()
        optimizer.zero_grad()
        assert held(engine) == expected, f"{held(engine)} instead of {expected}"
    # The formula includes gradients: a shard, or at stage 1 all of them, which accumulation at that stage requires.
    # Without masters, they are accumulated in fp32 there.
    gradients = max(master_bytes(kind), 4) * PSI if stage == 1 else master_bytes(kind) * PSI // world_size()
    formula = sum(expected.values()) + gradients
    assert engine.report().formula == formula, f"{engine.report().formula} instead of {formula}"
    engine.close()


@pytest.mark.exhaustive(but=2)
@STAGES
@SIZES
@pytest.mark.parametrize("kind", ["fp32", "mixed", "true", "fp64"])
def test_the_memory_of_a_rank_at_rest_equals_the_papers_formula(run_on, stage, size, kind):
    run_on(size, measure_at_rest, stage=stage, kind=kind)


@pytest.mark.parametrize(("stage", "kind", "size"), one_at_a_time([3, 1, 2], ["lean", "states", "no masters"], [2, 4]))
def test_states_and_parameters_in_bf16_take_two_bytes_an_element(run_on, stage, kind, size):
    run_on(size, measure_at_rest, stage=stage, kind=kind)


def measure_owners(stage: int, kind: str) -> None:
    """Muon has one state. On three ranks, the largest share is three of eight equal matrices."""
    from lightning_zero.engine import Engine

    dtype = torch.bfloat16 if kind == "true" else torch.float32
    module, optimizer = prepare(Recipe(wide, muon, dtype=dtype))
    engine = Engine(module, [optimizer], stage=stage, compute_dtype=torch.bfloat16 if kind == "mixed" else None)
    for index in range(2):
        loss_of(module, index, kind).backward()
        gradients = held(engine)["gradients"]
        optimizer.step()
        optimizer.zero_grad()
    owned = max(engine.communicator.control.gather_numbers(held(engine)["optimizer"] // 4, "elements that a rank owns"))
    assert owned == -(-LAYERS // world_size()) * UNIT
    mine = held(engine)["optimizer"] // 4
    replicated = 0 if stage == 3 else 2 * PSI if kind != "fp32" else 4 * PSI
    masters = 0 if kind == "fp32" and stage < 3 else 4 * mine  # in fp32 a slice of the parameters
    formula = replicated + masters + 4 * mine + 4 * mine  # masters, momentum and reduced gradients in fp32
    total = sum(held(engine).values()) + gradients
    assert formula <= total <= 1.02 * formula, f"{held(engine)} and {gradients} of gradients instead of {formula}"
    engine.close()


def muon(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(module.parameters())


@pytest.mark.parametrize(("stage", "kind", "size"), one_at_a_time([3, 1, 2], ["mixed", "fp32", "true"], [3, 2, 4]))
def test_with_owned_matrices_the_memory_of_a_rank_at_rest_follows_the_formula(run_on, stage, size, kind):
    run_on(size, measure_owners, stage=stage, kind=kind)


def measure_frozen(kind: str) -> None:
    from lightning_zero.engine import Engine

    dtype = torch.bfloat16 if kind == "true" else torch.float32
    for stage in (1, 2, 3):
        module, _ = prepare(Recipe(wide, adam, dtype=dtype))
        engine = Engine(
            module.requires_grad_(False), [], stage=stage, compute_dtype=torch.bfloat16 if kind == "mixed" else None
        )
        # In pure bf16, frozen parameters have no fp32 masters.
        parameters = {"fp32": 4 * PSI, "true": 2 * PSI, "mixed": 2 * PSI + 4 * PSI // 2}[kind]
        if stage == 3:
            parameters = (2 if kind == "true" else 4) * PSI // 2
        assert held(engine) == {"parameters": parameters}
        assert engine.report().formula == parameters
        engine.close()


@KINDS
def test_frozen_parameters_need_no_memory_beyond_their_own_values(run_on, kind):
    run_on(2, measure_frozen, kind=kind)


def accumulate_at_stage_1() -> None:
    module, optimizer, engine = make(1)
    with engine.no_sync():
        loss_of(module, 0).backward()
    gradients = sum(nbytes for category, nbytes in held(engine).items() if category in ("gradients", "reduction"))
    assert gradients == 4 * PSI
    assert engine.report().formula >= sum(held(engine).values())
    loss_of(module, 1).backward()
    assert held(engine)["gradients"] == 4 * PSI // world_size()
    assert "reduction" not in held(engine)
    engine.close()


def test_stage_1_holds_all_gradients_only_while_it_accumulates(run_on):
    run_on(2, accumulate_at_stage_1)


def large_storages(least: int) -> dict[int, int]:
    """Bytes of every tensor storage above a size in this process, by address, regardless of what references it."""
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and type(item) in (torch.Tensor, nn.Parameter):
            storage = item.untyped_storage()
            if storage.nbytes() >= least:
                found[storage.data_ptr()] = storage.nbytes()
    return found


def watch(module: nn.Module, look: Callable[[str], None]) -> None:
    """Call `look` inside the forward and the backward of each layer, while its weights are gathered."""
    for layer in module.layers:
        layer.linear.register_forward_hook(lambda *_: look("forward"))
        layer.linear.register_full_backward_hook(lambda *_: look("backward"))


def measure_peak(stage: int, kind: str, prefetch: int, reduction_buffers: int) -> None:
    module, optimizer, engine = make(stage, kind, prefetch=prefetch, reduction_buffers=reduction_buffers)
    width = 4 if kind == "fp32" else 2
    gathered: dict[str, int] = {"forward": 0, "backward": 0}

    def look(phase: str) -> None:
        gathered[phase] = max(gathered[phase], held(engine).get("gathered", 0))

    watch(module, look)
    for index in range(3):
        if index == 1:
            engine.reset_peak()  # from now on with optimizer state
        loss_of(module, index, kind).backward()
        optimizer.step()
        optimizer.zero_grad()
    # With prefetch=1, two units in forward and three in backward; one more for each further unit, one less without.
    units = {"forward": 1 + prefetch, "backward": 2 + prefetch} if stage == 3 else {"forward": 0, "backward": 0}
    for phase, most in units.items():
        assert gathered[phase] <= most * width * UNIT, f"{gathered[phase] / (width * UNIT)} units in {phase}"
        assert (gathered[phase] > 0) == (most > 0)
    at_rest = sum(expected_at_rest(stage, kind).values())
    gradients = 4 * PSI // world_size()
    # K buffers in reduction, each with the data received from other ranks, and one that backward fills meanwhile.
    received = (world_size() - 1) * UNIT // world_size()
    reduction = 4 * (reduction_buffers * (UNIT + received) + UNIT)
    bound = at_rest + gradients + units["backward"] * width * UNIT + reduction
    peak = engine.report().peak
    assert at_rest < sum(peak.values()) <= bound, f"{peak}, together {sum(peak.values())}, allowed {bound}"
    assert peak.get("gathered", 0) <= units["backward"] * width * UNIT
    assert peak.get("reduction", 0) <= reduction
    engine.close()


@pytest.mark.exhaustive(but=2)
@STAGES
@SIZES
@KINDS
def test_buffers_at_the_peak_are_bounded_regardless_of_the_models_size(run_on, stage, size, kind):
    run_on(size, measure_peak, stage=stage, kind=kind, prefetch=1, reduction_buffers=2)


@pytest.mark.parametrize(("prefetch", "reduction_buffers"), [(0, 1), (2, 1), (2, 3)])
def test_each_unit_of_prefetch_and_each_reduction_buffer_adds_one_unit_of_memory(run_on, prefetch, reduction_buffers):
    run_on(2, measure_peak, stage=3, kind="fp32", prefetch=prefetch, reduction_buffers=reduction_buffers)


def compare_with_the_process(stage: int) -> None:
    """The engine's report agrees with all large storages in the process."""
    least = 4 * UNIT // world_size()  # a shard of a layer; activations are smaller: 24 rows instead of 64 or more
    before = large_storages(least)
    module, optimizer, engine = make(stage, prefetch=1, reduction_buffers=2)
    excess = {"forward": 0, "backward": 0}
    # Also in flight: the gradient of one layer on its way into the flat buffer, and the sum of one reduction.
    allowed = {"forward": 0, "backward": 4 * UNIT + 4 * UNIT // world_size()}

    def total() -> int:
        return sum(n for address, n in large_storages(least).items() if address not in before)

    def unknown(allowed: int) -> int:
        # The minimum of several readings: a Gloo thread releases its last tensor a moment after the wait for it.
        readings = [total() - sum(held(engine).values())]
        while readings[-1] > allowed and len(readings) < 20:
            time.sleep(0.005)
            readings.append(total() - sum(held(engine).values()))
        return min(readings)

    def look(phase: str) -> None:
        excess[phase] = max(excess[phase], unknown(allowed[phase]))

    watch(module, look)
    for index in range(2):
        loss_of(module, index).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert unknown(0) == 0, f"{total()} are there, {held(engine)} are known"
    for phase, found in excess.items():
        assert found <= allowed[phase], f"{found} bytes more than known in {phase}"
    engine.close()


@STAGES
@SIZES
def test_the_engines_report_covers_every_large_buffer_in_the_process(run_on, stage, size):
    run_on(size, compare_with_the_process, stage=stage)


class Block(nn.Module):
    """A residual block of four matrices and two norms, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)
        self.up, self.down = nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(torch.tanh(self.mix(self.norms[0](x))))
        return x + self.down(torch.tanh(self.up(self.norms[1](x))))


class Stack(nn.Module):
    """An embedding, blocks and a head; returns the loss."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


class WithoutBlocks(nn.Module):
    """Layers that are each smaller than a quarter of the model, so that all of them form the root unit."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(6):
            setattr(self, f"layer{index}", nn.Linear(448, 448))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.linspace(-1, 1, 448).requires_grad_() * tokens.unsqueeze(-1)
        for index in range(6):
            x = torch.tanh(getattr(self, f"layer{index}")(x))
        return (x.mean(-1) - targets).square().mean()


SMALL_MODELS: dict[str, Callable[[], nn.Module]] = {
    "0.8 M, 16 blocks": partial(Stack, 64, 16, 64),
    "1.2 M, 6 blocks": partial(Stack, 128, 6, 64),
    "1.2 M, 24 blocks": partial(Stack, 64, 24, 64),
    "1.2 M, no blocks": WithoutBlocks,
    "2.5 M, 3 blocks": partial(Stack, 256, 3, 256),
    "1.7 M, 2 blocks and a large root unit": partial(Stack, 192, 2, 2048),
}


def compare_with_ddp(stage: int, model: str, clip: bool, micro_batches: int) -> None:
    """The engine's report, and all large tensors in the process, against 16 bytes per parameter."""
    from lightning_zero.engine import Engine
    from lightning_zero.engine.plan import units

    units.UNIT_NUMEL = 2**20  # the default outside of these tests
    before = set(large_storages(2**15))
    module, optimizer = prepare(Recipe(SMALL_MODELS[model], adam))
    numel = sum(parameter.numel() for parameter in module.parameters())
    engine = Engine(module, [optimizer], stage=stage)
    report = engine.report()
    assert report.replicated == 16 * numel and sum(report.units.values()) == numel
    # Parameters begin at aligned offsets, which leaves gaps in all flat buffers.
    bound, most = 16 * report.padded_numel, 0

    def look(*_: Any) -> None:
        nonlocal most
        storages = large_storages(2**15)  # larger than most activations, which have 24 rows
        most = max(most, sum(nbytes for address, nbytes in storages.items() if address not in before))

    for index in range(2):
        if index == 1:  # with optimizer state
            engine.reset_peak()
            layers = [inner for inner in module.modules() if isinstance(inner, (Block, nn.Linear))]
            for layer in layers[:: max(1, len(layers) // 12)]:
                layer.register_full_backward_hook(look)
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            with nullcontext() if is_last or stage > 1 else engine.no_sync():
                module(*batch(index)).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()
    peak = engine.report().peak
    assert sum(peak.values()) <= bound, f"{peak}, together {sum(peak.values())}, where DDP has {16 * numel}"
    assert most <= bound, f"{most} bytes are there, {peak} known, where DDP has {16 * numel}"
    engine.close()


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The numbers", "A model of a million parameters takes no more memory than under DDP")
@pytest.mark.parametrize(
    ("stage", "clip", "micro_batches", "model"),
    [
        (1, True, 1, "1.2 M, 6 blocks"),
        (1, True, 3, "2.5 M, 3 blocks"),
        (2, True, 3, "1.2 M, 6 blocks"),
        (2, False, 1, "2.5 M, 3 blocks"),
        (3, True, 3, "2.5 M, 3 blocks"),
        (3, True, 3, "0.8 M, 16 blocks"),
        (3, True, 3, "1.2 M, 24 blocks"),
        (3, True, 3, "1.2 M, no blocks"),
        (3, True, 3, "1.7 M, 2 blocks and a large root unit"),
    ],
)
def test_a_small_model_takes_no_more_memory_than_under_ddp(run_on, stage, clip, micro_batches, model):
    run_on(2, compare_with_ddp, stage=stage, model=model, clip=clip, micro_batches=micro_batches)


def test_a_small_model_on_four_ranks_takes_no_more_memory_than_under_ddp(run_on):
    run_on(4, compare_with_ddp, stage=3, model="1.2 M, 6 blocks", clip=True, micro_batches=3)


def measure_buffers(stage: int, model: str, part: float) -> None:
    """Measure the peak of gathered and reduction buffers together, as a share of the bytes of all parameters.

    Args:
        part: the largest unit's or bucket's share of the parameters.
    """
    from lightning_zero.engine import Engine
    from lightning_zero.engine.plan import units

    units.UNIT_NUMEL = 2**20
    module, optimizer = prepare(Recipe(SMALL_MODELS[model], adam))
    numel = sum(parameter.numel() for parameter in module.parameters())
    engine = Engine(module, [optimizer], stage=stage)
    most, add = 0, engine.ledger.add

    def watched(category: str, nbytes: int) -> None:
        nonlocal most
        add(category, nbytes)
        most = max(most, engine.ledger.now.get("gathered", 0) + engine.ledger.now.get("reduction", 0))

    engine.ledger.add = watched  # type: ignore[method-assign]
    for index in range(2):
        module(*batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Three units are gathered in backward at stage 3, or the whole model if it is one unit. Two buffers are in
    # reduction, each with a half received from the other rank, while a third fills: four units in all.
    gathered = {2: 0.0, 3: 1.0 if numel <= 2**20 else 3 * part}[stage]
    assert 0 < most <= 1.01 * (gathered + 4 * part) * 4 * numel, f"{most / (4 * numel)} of the parameters"
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("0.8 M, 16 blocks", 1 / 4),
        ("1.2 M, 6 blocks", 1 / 6),
        ("1.2 M, 24 blocks", 1 / 4),
        ("1.2 M, no blocks", 1 / 4),
        ("2.5 M, 3 blocks", 1 / 4),
    ],
)
def test_buffers_of_a_small_model_take_a_few_times_its_largest_unit(run_on, stage, model, part):
    run_on(2, measure_buffers, stage=stage, model=model, part=part)


def look_at_released_storages() -> None:
    module, optimizer, engine = make(3, prefetch=0)
    phases: list[int] = []

    def full() -> list[int]:
        return [bucket.full.untyped_storage().nbytes() for bucket in engine.buckets]

    def look(_: str) -> None:
        nbytes = full()
        assert set(nbytes) <= {0, 4 * UNIT}
        phases.append(sum(n > 0 for n in nbytes))

    watch(module, look)
    assert full() == [0] * LAYERS
    loss = loss_of(module, 0)
    assert phases == [1] * LAYERS, "one at a time"
    assert full() == [0] * (LAYERS - 1) + [4 * UNIT], "backward begins with the one that forward ended with"
    loss.backward()
    assert full() == [0] * LAYERS
    optimizer.step()
    assert full() == [0] * LAYERS
    with torch.no_grad():
        module(*batch(1))
    assert full() == [0] * LAYERS
    engine.full_state_dict()
    assert full() == [0] * LAYERS
    engine.close()


@SIZES
def test_a_released_units_storage_has_zero_bytes(run_on, size):
    run_on(size, look_at_released_storages)


def delete(stage: int, kind: str, training: bool) -> None:
    """With the garbage collector disabled, so that a reference cycle would keep memory."""
    gc.collect()
    gc.disable()
    before = large_storages(1)
    module, optimizer, engine = make(stage, kind)
    if training:
        for index in range(2):
            loss_of(module, index, kind).backward()
            optimizer.step()
            if index == 0:
                optimizer.zero_grad()  # the last gradients stay
    assert len(large_storages(1)) > len(before)
    watched = [weakref.ref(item) for item in (module, module.layers[0], optimizer, engine)]
    watched += [weakref.ref(bucket) for bucket in engine.buckets]
    del module, optimizer, engine
    alive = [reference() for reference in watched if reference() is not None]
    assert not alive, f"still there: {[type(item).__name__ for item in alive]}"
    # A Gloo thread releases its last tensor a moment after the wait for it has returned; a leak stays forever.
    deadline = time.monotonic() + 2
    while (left := large_storages(1).keys() - before.keys()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"{len(left)} storages are still held"


@pytest.mark.behaviour(
    "The module", "Deleting the module and the trainer frees the memory without a garbage collection"
)
@STAGES
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["fp32", "mixed"])
@pytest.mark.parametrize("training", [False, True], ids=["new", "trained"])
def test_deleting_model_optimizer_and_engine_frees_everything_without_the_garbage_collector(
    run_on, stage, size, kind, training
):
    run_on(size, delete, stage=stage, kind=kind, training=training)


CLIPPINGS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "none": lambda _: None,
    "norm": partial(nn.utils.clip_grad_norm_, max_norm=1e-3),
    "norm, one by one": partial(nn.utils.clip_grad_norm_, max_norm=1e-3, foreach=False),
    "value": partial(nn.utils.clip_grad_value_, clip_value=1e-6),
    "new lists": lambda parameters: torch._foreach_add(torch._foreach_mul([p.grad for p in parameters], 2.0), 1.0),
    "scaler": lambda parameters: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad for p in parameters], torch.zeros(()), torch.ones(())
    ),
}


def look_for_garbage(stage: int, clipping: str) -> None:
    """With the garbage collector disabled, so that a reference cycle would keep memory."""
    module, optimizer, engine = make(stage)
    parameters = list(module.parameters())
    gc.disable()
    for index in range(3):
        if index == 1:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            engine.reset_peak()
        loss_of(module, index).backward()
        CLIPPINGS[clipping](parameters)
        optimizer.step()
        optimizer.zero_grad()
    try:
        assert engine.report().peak["gradients"] <= 4 * PSI // world_size(), "more than one shard of gradients"
        gc.collect()
        tensors = [item for item in gc.garbage if isinstance(item, torch.Tensor)]
        assert not tensors, f"{len(tensors)} tensors were left to the garbage collector"
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    engine.close()


@STAGES
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_old_gradients_are_freed_without_the_garbage_collector_however_they_were_clipped(run_on, stage, clipping):
    run_on(2, look_for_garbage, stage=stage, clipping=clipping)


def delete_an_odd_model(stage: int) -> None:
    """With a root unit, embeddings and scalars, and after an evaluation."""
    from lightning_zero.engine import Engine

    gc.collect()
    gc.disable()
    module, optimizer = prepare(Recipe(OddModel, adam))
    engine = Engine(module, [optimizer], stage=stage)
    module(*batch(0)).backward()
    optimizer.step()
    with torch.no_grad():
        module(*batch(1))
    watched = [weakref.ref(item) for item in (module, optimizer, engine, *module.modules(), *engine.buckets)]
    del module, optimizer, engine
    alive = [reference() for reference in watched if reference() is not None]
    assert not alive, f"still there: {[type(item).__name__ for item in alive]}"


@pytest.mark.behaviour(
    "The module", "Deleting the module and the trainer frees the memory without a garbage collection"
)
@STAGES
@pytest.mark.parametrize("size", [1, 2])
def test_deleting_a_model_with_a_root_unit_frees_everything_without_the_garbage_collector(run_on, stage, size):
    run_on(size, delete_an_odd_model, stage=stage)


def drop_one_gradient(stage: int) -> None:
    from lightning_zero.engine import Engine
    from lightning_zero.engine.state.gradient_shard import GradientShard

    def shard() -> GradientShard:
        gradient: Any = module[0].weight.grad
        return gradient.kept_object.shard

    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = Engine(module, [adam(module)], stage=stage)
    module(torch.ones(4, 64)).sum().backward()
    before = weakref.ref(shard().flat)
    module[0].bias.grad = None
    module(torch.ones(4, 64)).sum().backward()
    assert before() is None and shard().flat.numel()
    engine.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_memory_of_gradients_is_freed_when_their_values_move_to_a_new_shard(run_on, stage):
    run_on(2, drop_one_gradient, stage=stage)


def freeze_half(stage: int) -> None:
    """Freeze every other layer; the optimizer and the engine receive all layers."""
    from lightning_zero.engine import Engine

    module, optimizer = prepare(Recipe(wide, adam))
    for layer in module.layers[::2]:
        layer.requires_grad_(False)
    engine = Engine(module, [optimizer], stage=stage)
    module(*batch(0)).backward()
    whole = 4 * PSI if stage < 3 else 4 * PSI // world_size()
    assert held(engine) == {"parameters": whole, "gradients": 4 * (PSI // 2) // world_size()}
    assert engine.report().elements["reduce_scatter"] == PSI // 2
    optimizer.step()
    optimizer.zero_grad()
    assert held(engine) == {"parameters": whole, "optimizer": 2 * 4 * (PSI // 2) // world_size()}
    engine.close()


@pytest.mark.behaviour(
    "The module", "Frozen parameters need no gradients, no gradient communication and no optimizer state"
)
@STAGES
@SIZES
def test_frozen_parameters_need_neither_gradients_nor_optimizer_state(run_on, stage, size):
    run_on(size, freeze_half, stage=stage)
