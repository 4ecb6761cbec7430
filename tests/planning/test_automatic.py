"""``strategy="zero_auto"``: what the advisor chooses, and that training then gives the usual numbers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.pytorch import seed_everything
from lightning_utilities.core import rank_zero
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from lightning_zero import ZeroAutoStrategy
from lightning_zero.planning.automatic import by_formula, sample_batch
from lightning_zero.pytorch_lightning import ZeroAutoStrategy as OtherZeroAutoStrategy
from tests.planning.projects import Block, Net
from tests.support.trainer import make_trainer
from tests.support.workers import rank

SPEED = {"flops": 1e11, "memory_bandwidth": 1e10, "link_bandwidth": 1e9}


class Rows(Dataset):
    """Random rows, drawn on access: if the advisor drew some, later rows would change."""

    read = 0

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        Rows.read += 1
        return torch.randn(16, 64)


class Stream(IterableDataset):
    taken = 0

    def __iter__(self):
        for _ in range(16):
            Stream.taken += 1
            yield torch.randn(16, 64)


class Says(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class Own(torch.optim.Optimizer):
    """An elementwise optimizer of a class that the engine does not know."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad
        return loss


class TrainsWithOwn(Net):
    def configure_optimizers(self) -> Any:
        return Own(self.parameters())


def trained(
    strategy: str,
    memory: float | None = None,
    stream: bool = False,
    net: type[Net] = Net,
    options: dict[str, Any] | None = None,
    of_trainer: dict[str, Any] | None = None,
    **speed: float,
) -> dict[str, Any]:
    said, log = Says(), rank_zero.log  # that of lightning or pytorch_lightning, whichever was imported last
    log.addHandler(said)
    seed_everything(3, verbose=False)
    Stream.taken = Rows.read = 0
    chosen: Any = strategy
    if memory is not None:
        chosen = ZeroAutoStrategy(resources={**SPEED, **speed, "memory": memory}, **(options or {}))
    module = net()
    trainer = make_trainer(chosen, max_steps=3, **(of_trainer or {}))
    log.setLevel(logging.INFO)
    trainer.fit(module, DataLoader(Stream() if stream else Rows(), batch_size=4))
    log.removeHandler(said)
    choice = getattr(trainer.strategy, "choice", None)
    return {
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "choice": choice,
        "stage": getattr(trainer.strategy, "stage", None),
        "said": [sentence for sentence in said.said if choice is not None and sentence in choice.why],
        "taken": Stream.taken,
        "read": Rows.read,
    }


@pytest.mark.exhaustive
def test_training_under_zero_auto_gives_ddps_numbers(run_on):
    expected, found = run_on(2, trained, strategy="ddp"), run_on(2, trained, strategy="zero_auto")
    for theirs, ours in zip(expected, found):
        assert all(map(torch.equal, theirs["weights"], ours["weights"]))
        assert ours["choice"] == found[0]["choice"]
    assert found[0]["said"] == list(found[0]["choice"].why)
    assert found[0]["said"][0].startswith(f"zero_auto chose zero{found[0]['stage']}")
    assert any("samples/s" in sentence for sentence in found[0]["said"])
    assert found[1]["said"] == []
    assert found[0]["read"] == expected[0]["read"] + 1 and found[1]["read"] == expected[1]["read"]


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"shard_within": None, "compression": None}, "zero[123]"),
        ({"shard_within": "node"}, r"zero3 \(shard_within='node'\)"),
        ({"compression": "int8"}, r"zero[123] \(compression='int8'\)"),
    ],
)
def test_zero_auto_chooses_a_stage_that_its_options_allow(run_on, options, name):
    found = run_on(2, trained, strategy="", memory=1e9, options=options)[0]
    assert re.fullmatch(f"zero_auto chose {name}[.]", found["choice"].why[0])
    assert f"zero{found['stage']}" in found["choice"].why[0]


@pytest.mark.parametrize(
    ("options", "roomy", "tight"),
    [({}, 1, 3), ({"shard_within": 2}, 3, 3), ({"compression": "int8"}, 1, 3), ({"compression": None}, 1, 3)],
)
def test_the_formula_chooses_among_the_stages_that_the_options_allow(options, roomy, tight):
    stages = ZeroAutoStrategy(**options).stages
    chosen = [by_formula(Net(), 2, memory, None, "of a test", stages).stage for memory in (1e9, 1.0)]
    assert chosen == [roomy, tight]


def test_zero_auto_plans_with_the_users_options(run_on):
    options = {
        "whole_parameters": False,
        "prefetch": 0,
        "checkpoint": "sharded",
        "async_save": True,
        "units": [Block],
    }
    options |= {"units": [Block], "timeout": 60, "after_fit": "full", "resilience": None, "shard_within": None}
    found = run_on(2, trained, strategy="", memory=1e9, net=TrainsWithOwn, options=options)[0]
    assert any("samples/s" in sentence for sentence in found["choice"].why), "of a plan, not of the formula"


def sentences_on_two_machines(machine_bandwidth: float) -> tuple[str, ...]:
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank()), LOCAL_WORLD_SIZE="1")
    trainer = {"devices": 1, "num_nodes": 2}
    found = trained("", memory=1e9, of_trainer=trainer, machine_bandwidth=machine_bandwidth)
    return found["choice"].why


def test_zero_auto_plans_for_the_trainers_number_of_machines(run_on):
    why = run_on(2, sentences_on_two_machines, machine_bandwidth=1e5)[0]  # the model has 0.8 MB of parameters
    assert any("the device waits for communication" in sentence for sentence in why)


@pytest.mark.exhaustive
def test_with_less_memory_zero_auto_shards_more_and_then_recomputes(run_on):
    states = 16 * sum(parameter.numel() for parameter in Net().parameters())
    roomy, tight = (run_on(2, trained, strategy="", memory=part * states)[0]["choice"] for part in (8, 0.5))
    assert roomy.offload is None and roomy.activation_checkpointing is None
    # on a CPU the host's memory is the device's, so offload would free nothing
    assert (tight.stage, tight.offload, tight.activation_checkpointing) == (3, None, "units")
    assert any("Nothing fits" in sentence for sentence in tight.why)


class OfOther(pytorch_lightning.LightningModule):
    """``Net`` for the package whose classes differ from those of ``lightning.pytorch``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Net().blocks

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def chosen_by_the_other_package(memory: float) -> tuple[Any, list[torch.Tensor]]:
    seed_everything(3, verbose=False)
    module, speed = OfOther(), {**SPEED, "memory": memory}
    strategy = OtherZeroAutoStrategy(resources=speed)
    trainer = make_trainer(strategy, pytorch_lightning.Trainer, max_steps=2)
    trainer.fit(module, DataLoader(Rows(), batch_size=4))
    return trainer.strategy.choice, [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.exhaustive
def test_zero_auto_also_plans_for_pytorch_lightning(run_on):
    states = 16 * sum(parameter.numel() for parameter in OfOther().parameters())
    (roomy, weights), (tight, same) = (
        run_on(2, chosen_by_the_other_package, memory=part * states)[0] for part in (8, 0.5)
    )
    assert any("samples/s" in sentence for sentence in roomy.why), "of a plan, not of the formula"
    assert (tight.stage, tight.activation_checkpointing) == (3, "units")
    assert all(map(torch.equal, weights, same))


class Samples(Net):
    """Compares the batch for plans with the first training batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen, self.sampled = batch.shape, sample_batch(self.trainer).shape
        return super().training_step(batch.view(-1, 16, 64), batch_idx)


class BySize:
    """A batch sampler that gives its batches, but not their size."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3])


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 100},
        {"batch_sampler": BatchSampler(range(32), 3, drop_last=False)},
        {"batch_size": None},
    ],
    ids=["batches", "larger than the dataset", "a batch sampler", "items are batches"],
)
def test_the_batch_for_a_plan_has_the_shape_of_the_loaders_batches(options):
    module = Samples()
    make_trainer("auto", max_steps=1).fit(module, DataLoader(Rows(), **options))
    assert module.sampled == module.seen


def test_a_batch_sampler_of_unknown_batch_size_is_not_read_for_a_plan():
    with pytest.raises(ValueError, match="requires a batch sampler with the attribute batch_size, but BySize has none"):
        make_trainer("auto", max_steps=1).fit(Samples(), DataLoader(Rows(), batch_sampler=BySize()))


def test_zero_auto_does_not_read_a_stream_to_choose(run_on):
    expected, found = (
        run_on(2, trained, strategy="ddp", stream=True),
        run_on(2, trained, strategy="zero_auto", stream=True),
    )
    assert [each["taken"] for each in found] == [each["taken"] for each in expected]
    assert found[0]["choice"].why[0].startswith("zero_auto chose zero1 by a formula, since this training run cannot")
    assert all(map(torch.equal, expected[0]["weights"], found[0]["weights"]))


@pytest.mark.parametrize("name", ["stage", "offload", "activation_checkpointing"])
def test_options_that_zero_auto_chooses_cannot_be_given(name):
    ZeroAutoStrategy(**{name: None})
    with pytest.raises(TypeError, match=f"zero_auto does not accept {name}: the advisor chooses stage"):
        ZeroAutoStrategy(**{name: 1})
