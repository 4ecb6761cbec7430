"""Plans with tensor parallelism, compared with what real ranks hold and what the paper says."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.commands.plan import main
from lightning_zero.planning.advice import make_plans
from lightning_zero.planning.fake_run import fake_run
from tests.planning.papers import CONFIGURATIONS
from tests.planning.test_fake_run import Watch
from tests.support.selection import exhaustive_but
from tests.support.trainer import make_trainer

WIDTH, DEPTH, SAMPLES = 128, 6, 256


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Divided(LightningModule):
    """Layers of a column-wise and a row-wise matrix, so that each needs one sum over tensor-parallel ranks."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        self.width, self.depth = width, depth

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.ModuleList(Layer(self.width) for _ in range(self.depth))
        if self.device_mesh is not None:
            for layer in self.layers:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch(samples: int = SAMPLES, width: int = WIDTH) -> Tensor:
    return torch.randn(samples, width)


CASES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2, "offload": "cpu"},
    {"stage": 3},
    {"stage": 2, "activation_checkpointing": "units", "partition_activations": True},
    {
        "stage": 3,
        "activation_checkpointing": "units",
        "partition_activations": True,
        "offload": {"optimizer": None, "activations": "cpu"},
    },
]


def hold_divided() -> list[dict[str, int]]:
    held = []
    for options in CASES:
        watch = Watch()
        strategy = ZeroStrategy(tensor_parallel_size=2, unit_numel=0, **options)
        trainer = make_trainer(strategy, callbacks=[watch], max_steps=2)
        trainer.fit(Divided(), DataLoader(batch(4 * SAMPLES), batch_size=SAMPLES))
        held.append(watch.peak)
    return held


@pytest.mark.exhaustive
def test_planned_bytes_are_those_of_real_ranks(run_on):
    of_ranks = run_on(4, hold_divided)
    for number, options in enumerate(CASES):
        run = fake_run(
            Divided, batch(), ranks=4, tensor_parallel_size=2, transport="shared memory", unit_numel=0, **options
        )
        for held in of_ranks:
            real = {category: nbytes for category, nbytes in held[number].items() if nbytes}
            assert {each: nbytes for each, nbytes in run.report_peak.items() if nbytes} == pytest.approx(real, rel=0.02)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("together", [2, 4])
def test_sums_over_tensor_parallel_ranks_are_planned(together):
    run = fake_run(Divided, batch(), ranks=8, stage=3, tensor_parallel_size=together)
    sums = 2 * DEPTH - 1  # one in each layer's forward and backward; the first layer's input has no gradient
    assert run.traffic_bytes["tensor_parallel"] == sums * SAMPLES * WIDTH * 4
    sent = sums * SAMPLES * WIDTH * 4 * 2 * (together - 1) / together
    whole = fake_run(Divided, batch(), ranks=8, stage=3)
    assert run.parameters == whole.parameters
    of_zero = sum(
        run.traffic_bytes[kind] * (8 // together - 1) / (8 // together) for kind in ("all_gather", "reduce_scatter")
    )
    assert sum(event.nbytes for event in run.events if event.kind == "launch") == pytest.approx(sent + of_zero)
    assert sum(event.flops for event in run.events) == pytest.approx(
        sum(event.flops for event in whole.events) / together, rel=0.01
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 16)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Llama(Divided):
    """Layers of attention and a gated MLP, each with one sum over tensor-parallel ranks in forward, one in backward."""

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(self.depth))
        columns, rows = ColwiseParallel(), RowwiseParallel()
        whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        plan = {f"attention.{name}": columns for name in "qkv"} | {"attention.out": rows, "attention": whole}
        plan |= {"mlp.gate": columns, "mlp.up": columns, "mlp.down": rows, "mlp": whole}
        for layer in self.layers:
            parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.first(batch), batch_idx)


@pytest.mark.exhaustive
@pytest.mark.parametrize("together", [2, 4])
def test_partitioned_activations_add_a_tenth_to_the_traffic_of_tensor_parallelism(together):
    """Section 8.1: at most 10 %. With s tokens of width h a layer has six all-reduces, two in forward, two as it is
    recomputed (the last is omitted: nothing needs its result) and two in backward, each of 2 (T - 1) / T s h; and
    one all-gather of (T - 1) / T s h."""
    sent, gathered, reduced = [], [], []
    for depth in (3, 6):
        for is_partitioned in (False, True):
            run = fake_run(
                partial(Llama, depth=depth),
                torch.randn(2, 64, WIDTH),
                ranks=8,
                stage=1,
                tensor_parallel_size=together,
                activation_checkpointing=LlamaLayer,
                partition_activations=is_partitioned,
            )
            sent.append(sum(event.nbytes for event in run.events if event.kind == "launch"))
            gathered.append(run.traffic_bytes.get("activations", 0))
            reduced.append(run.traffic_bytes["tensor_parallel"])
    tokens, part = 2 * 64 * WIDTH * 4, (together - 1) / together
    assert gathered == [0, 2 * tokens, 0, 5 * tokens], "the last layer's input is still there"
    assert reduced[0] == reduced[1] and reduced[2] == reduced[3]
    a_layer = (reduced[2] - reduced[0]) / 3
    assert a_layer in (5 * tokens, 6 * tokens)
    added = (sent[3] - sent[2]) / 5
    assert added == pytest.approx(part * tokens)
    assert added <= 0.10 * 2 * part * a_layer


@pytest.mark.parametrize(("together", "crossing"), [(2, False), (4, True)])
def test_tensor_parallel_ranks_are_consecutive(together, crossing):
    """On two machines with two ranks each, pairs stay within a machine, and groups of four do not."""
    run = fake_run(Divided, batch(), ranks=4, machines=2, stage=2, tensor_parallel_size=together)
    leaving = run.traffic_bytes["tensor_parallel"] * 2 * 3 / 4 * 2 if crossing else 0  # both ranks of a machine send it
    of_zero = 0 if crossing else 2 * 4 * run.parameters / 2 * 2 * 1 / 2  # two rings, each with half of the parameters
    assert run.leaving_bytes == pytest.approx(leaving + of_zero)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("together", [2, 4])
@pytest.mark.parametrize("name", exhaustive_but(["C5"], CONFIGURATIONS))
def test_the_papers_configurations_take_the_memory_that_the_paper_describes(name, together):
    """Table 3: C1 and C3 keep inputs of layers whole, C2 and C4 a part of each, and C5 that part in CPU memory.

    From C3 on, gradients are sharded. With tensor parallelism the engine shards them at stage 1, too.
    """
    sizes: dict[str, Any] = {"ranks": 16, "tensor_parallel_size": together, "precision": "bf16-true", "unit_numel": 0}
    depths = DEPTH, 2 * DEPTH
    fewer, more = (
        make_plans(partial(Divided, depth=depth), batch(4096), **CONFIGURATIONS[name], **sizes)[0] for depth in depths
    )
    for plan, depth in zip((fewer, more), depths):
        numel = 8 * WIDTH * WIDTH * depth
        assert plan.peak_bytes["parameters"] == pytest.approx(2 * numel / together + 4 * numel / 16, rel=0.01)
        assert plan.peak_bytes["optimizer"] == pytest.approx(8 * numel / 16, rel=0.01)
        assert plan.peak_bytes["gradients"] <= 4 * numel / 16
    whole = 2 * 4096 * WIDTH  # bytes of an input
    kept = {"C1": whole, "C2": whole / together, "C3": whole, "C4": whole / together, "C5": 0}
    grown = more.peak_bytes["activations"] - fewer.peak_bytes["activations"]
    assert grown == pytest.approx(DEPTH * kept[name], abs=1024)  # checksums, and numbers of 8 bytes
    assert more.host_bytes == (2 * DEPTH * whole / together if name == "C5" else 0)


@pytest.mark.exhaustive
def test_the_command_plans_choices_of_both_dimensions(capsys):
    project = ["tests.planning.test_tensor_parallel:Divided", "--batch", "float32[256,128]", "--ranks", "8"]
    sizes = ["--option", "tensor_parallel_size=null", "tensor_parallel_size=2"]
    assert main([*project, *sizes, "--stage", "0", "3", "--flops", "1e12", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [(plan["stage"], plan["replicas"]) for plan in plans] == [(0, 8), (3, 8), (3, 4)]
    for plan in plans:  # pairs of ranks share a batch
        samples = SAMPLES * plan["replicas"]
        assert plan["samples_per_second"] == pytest.approx(samples / plan["seconds_per_step"])
    in_parts = ["--checkpointing", "partitioned", "--offload", "none", "activations"]
    assert main([*project, "--option", "tensor_parallel_size=2", "--stage", "1", *in_parts]) == 0
    printed = capsys.readouterr().out
    assert "zero1 (tensor_parallel_size=2, activation_checkpointing='units', partition_activations=True)" in printed
    assert "partition_activations=True, offload={'optimizer': None, 'activations': 'cpu'}" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--option", "tensor_parallel_size=3"], "tensor_parallel_size=3 cannot be used with 8 ranks"),
        (
            ["--checkpointing", "partitioned"],
            "tensor-parallel ranks share, but there is only one such rank",
        ),
    ],
    ids=str,
)
def test_sizes_that_no_mesh_allows_are_refused(capsys, arguments, said):
    project = ["tests.planning.test_tensor_parallel:Divided", "--batch", "float32[256,128]", "--ranks", "8"]
    assert main([*project, "--stage", "3", *arguments]) == 2
    assert said in capsys.readouterr().err


def plan_beside_real_ranks() -> int:
    """Plan on rank 0 only; then train with tensor parallelism, which makes process groups and communicates in them."""
    rank = dist.get_rank()
    planned = fake_run(Divided, batch(), ranks=4, stage=2, tensor_parallel_size=2).total_bytes if rank == 0 else 0
    strategy = ZeroStrategy(stage=2, tensor_parallel_size=2, unit_numel=0)
    make_trainer(strategy, max_steps=1).fit(Divided(), DataLoader(torch.ones(SAMPLES, WIDTH), batch_size=SAMPLES))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group([0, 1]))
    assert ones.item() == 2
    return planned


def test_a_plan_leaves_the_process_groups_of_its_process_as_they_are(run_on):
    planned = run_on(2, plan_beside_real_ranks)[0]
    alone = fake_run(Divided, batch(), ranks=4, stage=2, tensor_parallel_size=2).total_bytes
    assert planned == pytest.approx(alone, abs=64)  # a few scalars differ
