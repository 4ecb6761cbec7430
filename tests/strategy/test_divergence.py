"""If ranks run different units or numbers of batches, an error within seconds names the units and the ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import process_group
from lightning_zero.engine.comm.failures import fail, failure, reason_of
from tests.strategy.test_uneven_loops import Stream
from tests.support import rank
from tests.support.patience import PATIENCE, little_patience
from tests.support.trainer import Learner, make_trainer


class Forked(nn.Module):
    """Two blocks; a rank may run only one of them."""

    def __init__(self, choose):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.choose = choose

    def forward(self, x):
        for block in self.choose(self.a, self.b):
            x = block(x)
        return x.sum()


def own_block(a, b):
    return [a if rank() == 0 else b]


def both(a, b):
    return [a, b]


def is_block(name, module):
    return name in ("a", "b")


def seconds_until_error(function, message):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        function()
    return time.monotonic() - begin


@little_patience()
def run_other_blocks(choose, prefetch):
    torch.manual_seed(0)
    module = Forked(choose)
    engine = Engine(module, stage=3, units=is_block, prefetch=prefetch)

    def steps():
        for _ in range(2):
            module(torch.ones(2, 4)).backward()

    text = (
        r"needs every rank for the gather of unit '[ab]'.*, but rank\(s\) .* asked for the gather of unit '[ab]'. Every"
    )
    seconds = seconds_until_error(steps, text)
    engine.close(communicate=False)
    return seconds


@pytest.mark.behaviour(
    "The module",
    "Whole blocks skipped, different ones on each rank",
    notes={3: "an error within seconds that names units and ranks"},
)
@pytest.mark.parametrize(("size", "prefetch"), [(2, 0), (3, 1)])
def test_if_ranks_run_different_units_an_error_in_seconds_names_units_and_ranks(run_on, size, prefetch):
    assert max(run_on(size, run_other_blocks, choose=own_block, prefetch=prefetch)) < 20


@little_patience()
def run_other_blocks_later(prefetch):
    """The ranks run the same blocks in the first two steps, so that they have agreed on the order of gathers."""
    torch.manual_seed(0)
    module = Forked(both)
    engine = Engine(module, stage=3, units=is_block, prefetch=prefetch)

    def steps():
        for step in range(5):
            if step == 2 and rank() == 0:
                module.choose = lambda a, b: [b, a]
            module(torch.ones(2, 4)).backward()

    try:
        steps()
    except RuntimeError as error:
        said = str(error)
    engine.close(communicate=False)
    return said


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_that_turn_to_another_order_of_units_get_an_error(run_on, prefetch):
    for said in run_on(2, run_other_blocks_later, prefetch=prefetch):
        assert "the gather of unit" in said and "Every rank must run the same units" in said


@little_patience()
def run_other_blocks_with_evaluation(when):
    torch.manual_seed(0)
    module = Forked(own_block)
    engine = Engine(module, stage=3, units=is_block)
    engine.take_turn(0)
    if when == "after":
        engine.take_turn(None)
    text = "needs every rank for the gather of unit '[ab]'.*asked for the gather of unit '[ab]'"
    seconds = seconds_until_error(lambda: module(torch.ones(2, 4)), text)
    engine.close(communicate=False)
    return seconds


@pytest.mark.parametrize("when", ["during", "after"])
def test_ranks_that_run_different_units_in_or_after_an_evaluation_loop_get_an_error(run_on, when):
    assert max(run_on(2, run_other_blocks_with_evaluation, when=when)) < 20


@little_patience()
def run_other_blocks_while_a_rank_is_absent():
    torch.manual_seed(0)
    module = Forked(own_block)
    engine = Engine(module, stage=3, units=is_block)

    def run():
        try:
            engine.take_turn(0 if rank() < 2 else None)
            if rank() < 2:
                module(torch.ones(2, 4))
        except RuntimeError as error:
            fail(reason_of(error))  # as in a Trainer
            raise

    seconds = seconds_until_error(run, "rank 1 gathers unit 'b', but rank 0 gathers unit 'a'. Every rank must run")
    engine.close(communicate=False)
    return seconds


def test_ranks_that_run_different_units_while_another_rank_is_absent_get_an_error(run_on):
    assert max(run_on(3, run_other_blocks_while_a_rank_is_absent)) < 20


class Forgetful(Learner):
    """A rank that does not call backward, in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.model(*batch)
        if self.global_rank == 0:
            self.manual_backward(loss)


@little_patience()
def forget_backward():
    module = Forgetful()
    return seconds_until_error(
        lambda: make_trainer("zero3").fit(module),
        r"(?s)rank 0 waits for the .*of unit '[\w.]+', rank 1 waits for the next training batch",
    )


def test_a_rank_that_does_not_call_backward_is_named_in_seconds(run_on):
    assert max(run_on(2, forget_backward)) < 20


@little_patience()
def forget_backward_of_a_small_model(stage):
    """No rank waits for a gradient before the messages at the end of backward and before the next batch."""
    return seconds_until_error(
        lambda: make_trainer(ZeroStrategy(stage, unit_numel=2**20)).fit(Forgetful()),
        "(the end of backward|the next training batch) did not complete: .*is at another line",
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_a_small_model_that_does_not_call_backward_gets_an_error(run_on, stage):
    assert max(run_on(2, forget_backward_of_a_small_model, stage=stage)) < 20


class Uneven(Learner):
    """Rank 0 has two training batches, and rank 1 has four, unless a rank stops earlier.

    Arguments:
        ends: how rank 0's loop ends: its loader "sized" or a "stream", or "stopped" after two batches.
        validates: whether there is a validation loop.
    """

    def __init__(self, ends, validates):
        super().__init__()
        self.ends, self.validates = ends, validates

    def train_dataloader(self):
        samples = super().train_dataloader().dataset
        count = 8 if self.global_rank == 0 and self.ends != "stopped" else 16
        samples = [samples[i] for i in range(count)]
        return DataLoader(Stream(samples) if self.ends == "stream" else samples, batch_size=4)

    def val_dataloader(self):
        return super().train_dataloader() if self.validates else []

    def validation_step(self, batch, batch_idx):
        self.model(*batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.ends == "stopped" and self.global_rank == 0:
            self.trainer.should_stop = batch_idx == 1

    def on_train_epoch_end(self):
        self.model.head.weight.norm()  # without the check, the error would name this read


def end_early(stage, ends, validates):
    seconds = seconds_until_error(
        lambda: make_trainer(f"zero{stage}", use_distributed_sampler=False).fit(Uneven(ends, validates)),
        r"^Rank\(s\) \[0\] have ended their training loop in epoch 0 after 2 batches, but rank\(s\) \[1\] have not",
    )
    make_trainer(f"zero{stage}").fit(Learner())  # every rank has raised the error, so the processes can go on
    return seconds


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("ends", ["sized", "stream", "stopped"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_has_ended_its_training_loop_is_named_on_every_rank(run_on, stage, ends, validates):
    assert max(run_on(2, end_early, stage=stage, ends=ends, validates=validates)) < 20


@little_patience()
def be_late():
    module = Forked(both)
    engine = Engine(module, stage=3, units=is_block)
    if rank() == 0:
        time.sleep(3)
    module(torch.ones(2, 4)).backward()
    full = module.a[0].weight.grad.norm().item()
    engine.close()
    return full


@pytest.mark.exhaustive
def test_a_slow_rank_is_waited_for(run_on):
    first, second = run_on(2, be_late)
    assert first == second > 0


@little_patience()
def be_slow_to_transfer():
    """All ranks wait, and for different collectives, but each has begun both: the transfers take long."""
    control = Engine(Forked(both), stage=3, units=is_block).communicator.control
    gathers = [control.waiting("the gather of unit 'a'"), control.waiting("the gather of unit 'b'")]
    with gathers[rank() % 2]:
        time.sleep(3 * PATIENCE)
    dist.barrier()
    return failure()


@pytest.mark.exhaustive
def test_ranks_that_wait_long_for_transfers_are_not_taken_for_a_deadlock(run_on):
    assert run_on(3, be_slow_to_transfer) == [None] * 3


def miss_the_timeout():
    """Rank 1 waits for nothing that the other ranks can see, and arrives too late."""
    process_group.restart(timeout=timedelta(seconds=2))
    module = Forked(both)
    engine = Engine(module, stage=3, units=is_block)

    def run():
        if rank() == 0:
            module(torch.ones(2, 4))
        else:
            time.sleep(3)
            with engine.communicator.everyone.waiting("something else"):
                dist.barrier()

    seconds = seconds_until_error(run, "did not complete: another rank ended, or did not take part in time")
    engine.close(communicate=False)
    process_group.restart()  # for the pool
    return seconds


@pytest.mark.exhaustive
def test_a_divergence_that_cannot_be_proven_ends_at_the_process_groups_timeout(run_on):
    assert max(run_on(2, miss_the_timeout)) < 20
