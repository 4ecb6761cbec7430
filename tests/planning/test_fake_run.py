"""Planned memory is that of the real engine: to the byte with real tensors, and within 2 % on real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.planning.fake_run import fake_run
from tests.engine.test_growth import NEARLY, count
from tests.planning.projects import (
    GPT2,
    T5,
    Adversaries,
    Llama,
    Net,
    Quantised,
    Reading,
    Sharing,
    ViT,
    WithAdafactor,
    WithStepCount,
    batch,
    labelled_pictures,
    pictures,
    tokens,
)
from tests.support.trainer import make_trainer
from tests.support.transports import in_use

LEAN: dict[str, Any] = {"state_dtype": "bf16", "masters": False}
REAL = in_use()  # the transport of the real ranks


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fake_tensors_take_as_many_bytes_as_real_tensors(stage, offload):
    runs = [
        fake_run(
            partial(Net, width=256), torch.randn(4, 16, 256), ranks=2, stage=stage, offload=offload, with_values=real
        )
        for real in (False, True)
    ]
    assert runs[0].peak_bytes == runs[1].peak_bytes and runs[0].host_bytes == runs[1].host_bytes
    assert runs[0].disk_bytes == runs[1].disk_bytes and bool(runs[0].disk_bytes) == (offload == "nvme")
    assert runs[0].traffic_bytes == runs[1].traffic_bytes
    assert runs[0].events == runs[1].events


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(("stage", "offload"), [(1, "cpu"), (3, None)])
def test_fake_states_in_bf16_take_as_many_bytes_as_real_ones(stage, offload):
    """At this width, an update on the CPU is one chunk, as it is on the devices that plans are for."""
    full, fake, real = (
        fake_run(
            partial(Net, width=128),
            torch.randn(4, 4, 128),
            ranks=2,
            stage=stage,
            offload=offload,
            precision="bf16-true",
            **options,
        )
        for options in ({}, LEAN, {**LEAN, "with_values": True})
    )
    assert fake.peak_bytes == real.peak_bytes and fake.host_bytes == real.host_bytes
    assert fake.events == real.events
    assert fake.peak_bytes["optimizer"] == full.peak_bytes["optimizer"] // 2
    assert fake.total_bytes + fake.host_bytes < 0.75 * (full.total_bytes + full.host_bytes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "bytes_of_state"), [("32-true", 12), ("bf16-true", 14)])
def test_resilience_keeps_three_copies_of_a_ranks_states(stage, precision, bytes_of_state):
    for machines in (1, 2):
        plain, keeping = (
            fake_run(
                partial(Net, width=256),
                torch.randn(4, 16, 256),
                ranks=4,
                stage=stage,
                precision=precision,
                machines=machines,
                **options,
            )
            for options in ({}, {"resilience": "memory"})
        )
        kept = keeping.host_bytes - plain.host_bytes
        assert kept == pytest.approx(3 * bytes_of_state * plain.parameters / 4, rel=0.01)
        assert keeping.peak_bytes == plain.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_states_in_files_take_as_many_bytes_as_their_elements(precision):
    offload = {"optimizer": "nvme", "parameters": "nvme", "path": "."}
    runs = [
        fake_run(partial(Net, width=256), torch.randn(4, 16, 256), ranks=2, stage=3, precision=precision, **options)
        for options in ({}, {"offload": offload}, {"offload": offload, "with_values": True})
    ]
    assert runs[1].peak_bytes == runs[2].peak_bytes and runs[1].events == runs[2].events
    copy = 2 if precision == "bf16-true" else 0  # the copy is in the file, too, since the masters are fp32
    shard = runs[1].parameters / 2
    assert runs[1].disk_bytes == pytest.approx((12 + copy) * shard, rel=0.02)
    assert runs[1].host_bytes == pytest.approx(3 * runs[1].disk_bytes / 4, rel=0.01), "three buckets of four"
    assert runs[1].peak_bytes["optimizer"] == 0 and runs[1].peak_bytes["parameters"] == 0
    assert runs[1].total_bytes < runs[0].total_bytes - 0.8 * 12 * shard
    moved = sum(event.nbytes for event in runs[1].events if event.kind == "disk")
    gathers = (4 - copy) * runs[1].parameters  # in forward and backward, the last unit once
    assert 0.85 * gathers < moved - 2 * runs[1].disk_bytes < 0.95 * gathers


def test_a_plan_needs_no_memory_for_states_on_a_disk():
    """A unit's states take 2 TB here."""
    offload = {"optimizer": "nvme", "parameters": "nvme", "path": "."}
    run = fake_run(partial(Net, width=2**18), torch.randn(1, 2**18), ranks=1, stage=3, offload=offload)
    assert run.disk_bytes >= 12 * run.parameters > 2**43


def hold_whole_parameters(stage: int, offload: str | None) -> dict[str, int]:
    watch = Watch()
    trainer = make_trainer(ZeroStrategy(stage=stage, offload=offload, unit_numel=0), callbacks=[watch], max_steps=2)
    trainer.fit(WithAdafactor(width=128, depth=16), DataLoader(torch.randn(24, 16, 128), batch_size=4))
    return watch.peak


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.exhaustive
def test_with_whole_parameters_the_rank_that_holds_the_most_is_planned(run_on, stage, offload):
    held = run_on(3, hold_whole_parameters, stage=stage, offload=offload)
    run = fake_run(
        partial(WithAdafactor, width=128, depth=16),
        torch.randn(4, 16, 128),
        ranks=3,
        stage=stage,
        offload=offload,
        unit_numel=0,
        transport=REAL,
    )
    totals = [sum(of_rank.values()) for of_rank in held]
    assert sum(run.report_peak.values()) == pytest.approx(max(totals), rel=0.02)


def hold_within_groups(precision: str, accumulate: int) -> dict[str, int]:
    watch = Watch()
    strategy = ZeroStrategy(stage=3, shard_within=2, unit_numel=0)
    options = {"precision": precision, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(strategy, callbacks=[watch], max_steps=2, **options)
    trainer.fit(Net(width=128), DataLoader(torch.randn(32 * accumulate, 16, 128), batch_size=4))
    return watch.peak


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_planned_memory_of_sharding_within_groups_is_what_real_ranks_hold(run_on, precision, accumulate):
    held = run_on(4, hold_within_groups, precision=precision, accumulate=accumulate)
    run = fake_run(
        partial(Net, width=128),
        torch.randn(4, 16, 128),
        ranks=4,
        stage=3,
        shard_within=2,
        unit_numel=0,
        transport=REAL,
        precision=precision,
        accumulate=accumulate,
    )
    for of_rank in held:
        assert sum(run.report_peak.values()) == pytest.approx(sum(of_rank.values()), rel=0.02)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "elements"),
    # half of each gather and each reduction, of 4 bytes an element, leaves one of two machines
    [({"stage": 2}, 3), ({"stage": 3}, 6), ({"stage": 3, "shard_within": "node"}, 2), ({"stage": 1}, 2)],
    ids=str,
)
def test_traffic_that_leaves_a_machine_is_planned(options, elements):
    run = fake_run(Net, batch(), ranks=4, machines=2, accumulate=2, transport="shared memory", unit_numel=0, **options)
    whole = 0.5 * 4 * elements * run.parameters
    assert 0.85 * whole < run.leaving_bytes < 1.02 * whole  # backward starts with a gathered unit
    assert fake_run(Net, batch(), ranks=4, accumulate=2, transport="shared memory", **options).leaving_bytes == 0


def test_traffic_within_groups_that_span_machines_is_planned():
    options = {"stage": 3, "shard_within": 4, "accumulate": 2, "unit_numel": 0}
    run = fake_run(Net, batch(), ranks=8, machines=4, transport="shared memory", **options)
    within = (4 + 2) / 2  # half of four gathers and two reductions in groups of two machines
    between = (1 + 1) * 2 / 4 / 2  # half of one of each, for the quarters of both ranks of a machine
    assert 0.85 * within < run.leaving_bytes / (4 * run.parameters) - between < 1.02 * within


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_fake_tensors_of_other_precisions_take_as_many_bytes_as_real_tensors(precision):
    runs = [
        fake_run(Net, batch(), ranks=2, stage=3, precision=precision, accumulate=2, clip=1.0, with_values=real)
        for real in (False, True)
    ]
    assert runs[0].peak_bytes == runs[1].peak_bytes


def test_ddp_takes_sixteen_bytes_a_parameter_plus_its_buckets():
    run = fake_run(Net, batch(), ranks=2, stage=None)
    numel = sum(parameter.numel() for parameter in Net().parameters())
    states = sum(run.peak_bytes[category] for category in ("parameters", "gradients", "reduction", "optimizer"))
    steps = 4 * len(list(Net().parameters()))  # Adam's step counts
    assert run.parameters == numel and states == 20 * numel + steps
    assert run.traffic_bytes == {"all_reduce": 4 * numel}


def test_ddp_reduces_gradients_once_a_step_or_in_each_backward_of_manual_optimization():
    numel = sum(parameter.numel() for parameter in Net().parameters())
    run = fake_run(Net, batch(), ranks=2, stage=None, accumulate=8)
    sent = sum(event.nbytes for event in run.events if event.kind == "launch")  # in a ring of two ranks, each byte once
    assert run.traffic_bytes == {"all_reduce": 4 * numel} and sent == 4 * numel
    made = Adversaries()
    generator, critic = (sum(p.numel() for p in each.parameters()) for each in (made.generator, made.critic))
    # the second backward of a step also gives gradients to the critic
    by_hand = fake_run(Adversaries, pictures(), ranks=2, stage=None)
    assert by_hand.traffic_bytes == {"all_reduce": 4 * (2 * critic + generator)}


def test_states_of_no_parameter_are_counted_under_ddp():
    run = fake_run(WithStepCount, batch(), ranks=2, stage=None)
    assert run.peak_bytes["optimizer"] == 4 * run.parameters + 8  # momentum, and the count of steps


class WithSparseGradients(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 16, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.table(torch.arange(3, device=batch.device)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_sparse_gradients_are_counted_as_dense_ones(stage):
    run = fake_run(WithSparseGradients, batch(), ranks=2, stage=stage)
    reduced = run.traffic_bytes["reduce_scatter" if stage else "all_reduce"]
    assert 4 * run.parameters <= reduced < 4 * run.parameters + 2**10  # with padding


class Watch(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        list(trainer.optimizers[0].state.items())  # waits for background updates, which then enter their states
        trainer.strategy.engine.report()
        trainer.strategy.engine.reset_peak()

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.peak = trainer.strategy.engine.report().peak


def held_by_real_ranks(
    make_module: Any, samples: list[Any], cases: list[tuple[int, str | None]]
) -> list[tuple[int, dict[str, int]]]:
    """For each case of a stage and an offload: the number of elements in all parameters, and this rank's peak."""
    held = []
    for stage, offload in cases:
        watch, module = Watch(), make_module()
        strategy = ZeroStrategy(stage=stage, offload=offload)
        trainer = make_trainer(strategy, callbacks=[watch], max_steps=2)
        trainer.fit(module, DataLoader(samples * 2 * trainer.world_size, batch_size=len(samples)))
        held.append((sum(parameter.numel() for parameter in module.parameters()), watch.peak))
    return held


def compare_with_real_ranks(
    run_on: Any, ranks: int, make_module: Any, samples: list[Any], cases: list[tuple[int, str | None]]
) -> None:
    of_ranks = run_on(ranks, held_by_real_ranks, make_module=make_module, samples=samples, cases=cases)
    sample = next(iter(DataLoader(samples, batch_size=len(samples))))
    for number, (stage, offload) in enumerate(cases):
        options = {"offload": offload, "transport": REAL, "unit_numel": 0}  # as in the real ranks of tests
        run = fake_run(make_module, sample, ranks=ranks, stage=stage, **options)
        for held in of_ranks:
            numel, peak = held[number]
            real = {category: nbytes for category, nbytes in peak.items() if nbytes}
            assert run.parameters == numel
            assert set(real) == {category for category, nbytes in run.report_peak.items() if nbytes}
            for category, nbytes in real.items():
                assert run.report_peak[category] == pytest.approx(nbytes, rel=0.02), (
                    stage,
                    offload,
                    category,
                    run.report_peak,
                    real,
                )


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_planned_bytes_are_within_two_percent_of_what_real_ranks_hold(run_on, ranks):
    cases = [(stage, offload) for stage in (1, 2, 3) for offload in (None, "cpu", "nvme")]
    compare_with_real_ranks(run_on, ranks, partial(Net, width=256), list(torch.randn(4, 16, 256)), cases)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_a_quantised_model_is_planned(run_on, stage):
    compare_with_real_ranks(run_on, 2, partial(Quantised, width=256), list(torch.randn(4, 16, 256)), [(stage, None)])


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("stage", [3, None])
def test_fake_codes_take_as_many_bytes_as_real_ones(stage, kind):
    runs = [fake_run(partial(Quantised, kind=kind), batch(), ranks=2, stage=stage, with_values=real) for real in (0, 1)]
    assert runs[0].peak_bytes == runs[1].peak_bytes


class Float8Net(Net):
    """Gathers the weights of its linear layers in float8."""

    def configure_model(self):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(self, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))


@pytest.mark.exhaustive
def test_weights_gathered_in_float8_are_planned_with_one_byte_an_element(run_on):
    pytest.importorskip("torchao.float8")
    samples = list(torch.randn(4, 16, 256))
    compare_with_real_ranks(run_on, 2, partial(Float8Net, width=256), samples, [(1, None), (3, None), (3, "cpu")])
    of_float8, of_fp32 = (
        fake_run(partial(kind, width=256), torch.stack(samples), ranks=2, stage=3, unit_numel=0)
        for kind in (Float8Net, Net)
    )
    share = of_float8.traffic_bytes["all_gather"] / of_fp32.traffic_bytes["all_gather"]
    assert share == pytest.approx(1 / 4, abs=0.02)  # biases and norms stay in fp32


SHARING = {"gpt2": (GPT2, tokens), "t5": (T5, tokens), "sharing": (Sharing, batch)}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("project", SHARING)
def test_a_tied_parameter_is_planned_once(run_on, project):
    make_module, make_batch = SHARING[project]
    sample = make_batch()
    names = sample if isinstance(sample, dict) else None
    samples = [{name: sample[name][row] for name in names} if names else sample[row] for row in range(2)]
    compare_with_real_ranks(run_on, 2, make_module, samples, [(1, None), (3, None)])


PROJECTS = {"llama": (Llama, tokens), "vit": (ViT, labelled_pictures), "gan": (Adversaries, pictures)}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [None, 2, 3])
@pytest.mark.parametrize("project", PROJECTS)
def test_unmodified_projects_are_planned(project, stage):
    make_module, make_batch = PROJECTS[project]
    sample = make_batch()
    runs = [fake_run(make_module, sample, ranks=4, stage=stage, with_values=real) for real in (False, True)]
    assert runs[0].parameters == sum(parameter.numel() for parameter in make_module().parameters())
    assert runs[0].peak_bytes == runs[1].peak_bytes and runs[0].peak_bytes["optimizer"] > 0
    left_out = ["training needs the most memory (validation_step did not run)"] if project == "llama" else []
    assert list(runs[0].assumptions) == left_out


def test_values_that_a_project_reads_are_assumed_and_the_line_is_named():
    run = fake_run(Reading, batch(), ranks=2, stage=2)
    read, masked = sorted(run.assumptions)
    assert read.startswith("a mask selects every element") and masked.startswith("a value read from a tensor")
    assert all("projects.py:" in assumption for assumption in run.assumptions)


def calls_of_planning(depth: int, ranks: int) -> int:
    """Count the Python functions called by this thread while a model of this depth is planned."""
    model, sample = partial(Net, width=4608, depth=depth), torch.randn(1, 128, 4608)
    return count(partial(fake_run, model, sample, ranks=ranks, stage=3), of="call")


@pytest.mark.exhaustive
def test_planning_is_linear_in_the_number_of_layers_and_takes_no_longer_for_more_ranks():
    """Counts calls instead of time, which depends on the machine. The largest model has 1.9 billion parameters."""
    calls_of_planning(1, ranks=64)  # imports and caches
    small, middle, large = (calls_of_planning(depth, ranks=64) for depth in (2, 4, 8))
    assert (large - middle) / (middle - small) <= 2 * NEARLY
    assert middle <= NEARLY * calls_of_planning(4, ranks=2)
