"""``after_fit``: the form of the module when a run ends; no run runs out of memory after its last step."""

from __future__ import annotations

import copy
import ctypes
import re
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy, full_parameters
from lightning_zero.engine import ShardedTensor, engine_of
from lightning_zero.engine.init import host_room
from tests.support import rank, world_size
from tests.support.trainer import make_trainer
from tests.support.training import same_tensors
from tests.support.workers import WorkerKind, WorkerPools

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
INPUTS = torch.arange(12.0).view(2, 6) / 12


class Model(LightningModule):
    def __init__(self, keeps_average=False):
        super().__init__()
        self.keeps_average = keeps_average
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)
        self.seen_at_the_end = None

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, *_):
        if self.keeps_average:
            self.average = [parameter.detach().clone() for parameter in self.parameters()]

    def on_fit_end(self):
        self.seen_at_the_end = self.head.weight.norm().item()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader(samples=24):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def runs(make_strategy):
    """Fit, compute an output, save and test; returns the trainer, the module and all values found on the way."""
    torch.manual_seed(0)
    model, found = Model(), {}
    trainer = make_trainer(make_strategy(), max_epochs=2, enable_checkpointing=False)
    trainer.fit(model, loader())
    found["norm in on_fit_end"] = torch.tensor(model.seen_at_the_end)
    with torch.no_grad():
        found["output"] = model.eval()(INPUTS).clone()
    trainer.save_checkpoint("after.ckpt")
    if rank() == 0:
        checkpoint = torch.load("after.ckpt", weights_only=True)
        found |= {f"saved {name}": value for name, value in checkpoint["state_dict"].items()}
        for number, state in checkpoint["optimizer_states"][0]["state"].items():
            found |= {f"saved {key} of {number}": value for key, value in state.items()}
    found["test"] = torch.tensor(trainer.test(model, loader(16), verbose=False)[0]["test"])
    return trainer, model, found


def train_on(make_strategy, model):
    trainer = make_trainer(make_strategy(), max_epochs=1, enable_checkpointing=False)
    trainer.fit(model, loader())
    return {name: getattr(value, "whole", value.clone)() for name, value in model.state_dict().items()}


def keep_sharded(stage, after_fit):
    """``"auto"``, on a host without memory for the ordinary module, gives the same as ``"sharded"``."""

    def sharded(**options):
        return lambda: ZeroStrategy(stage=stage, after_fit=after_fit, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "available_memory", lambda: 0)
        check_sharded(stage, sharded)


def check_sharded(stage, sharded):
    _, reference, expected = runs(lambda: "ddp")
    trainer, model, found = runs(sharded())
    same_tensors(found, expected, bound=2e-6)
    engine = trainer.strategy.engine
    assert engine is engine_of(model) and all(isinstance(p, ShardedTensor) for p in model.parameters())
    if stage == 3:
        report = engine.report()
        assert report.at_rest["gathered"] == 0, report.at_rest
        assert report.at_rest["parameters"] == 4 * report.padded_numel // 2

    same_tensors(train_on(sharded(), model), train_on(lambda: "ddp", reference), bound=2e-6)
    assert engine_of(model) is engine, "the next run goes on with the module as it is"
    same_tensors(train_on(sharded(prefetch=0), model), train_on(lambda: "ddp", reference), bound=2e-6)
    assert engine_of(model) is not engine, "other options set the module up anew"
    other_stage = 2 if stage == 3 else 3
    same_tensors(
        train_on(lambda: ZeroStrategy(stage=other_stage, after_fit="full"), model),
        train_on(lambda: "ddp", reference),
        bound=2e-6,
    )
    assert engine_of(model) is None and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The Trainer",
    '`after_fit="sharded"`, or `"auto"` without host memory for an ordinary module: every later run continues with '
    "the module as it is",
)
@STAGES
@pytest.mark.parametrize("after_fit", ["sharded", "auto"])
def test_the_module_stays_sharded_and_later_runs_equal_ddps(run_on, stage, after_fit):
    run_on(2, keep_sharded, stage=stage, after_fit=after_fit)


# ------------------------------------------------------------------------------------------------------------ "auto"


def notices(act):
    """Run ``act``; returns the warnings about a module that stays sharded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught if "stays sharded" in str(each.message)]


# 171 parameters: 6 x 8 + 8, 8 x 8 + 8, 8 + 8, 8 x 3 + 3, and Adam's two moments of each in fp32. Each rank has
# one master in each of four units, with a step count of four bytes. The largest unit is gathered in 128 elements.
PARAMETERS = 4 * 171
WHOLE = PARAMETERS + 2 * PARAMETERS + 2 * 4 * 4 + 4 * 128
HALF_PRECISION = WHOLE - PARAMETERS // 2  # two-byte parameters; only rank 0 has the masters


def enough_for(needed):
    """The smallest memory, in bytes, of which a tenth stays free."""
    return -(-needed * 10 // 9)


def decide(memory, stage, precision, averages, message):
    """Fit with one host per rank, each with the given memory; then evaluate within that memory, and without a limit."""
    model = Model(averages)
    trainer = make_trainer(ZeroStrategy(stage=stage), precision=precision, max_epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_room, "this_machine", lambda: f"node{rank()}.123")
        patch.setattr(host_room, "available_memory", lambda: memory[rank()])
        said = notices(lambda: trainer.fit(model, loader()))
        assert type(model.head.weight) is (ShardedTensor if message else nn.Parameter)
        assert len(said) == (bool(message) and rank() == 0)
        assert all(re.search(message, text) for text in said), said
        if message:
            assert not notices(lambda: trainer.test(model, loader(), verbose=False)), "it has been said"
            assert type(model.head.weight) is ShardedTensor
    trainer.test(model, loader(), verbose=False)
    assert type(model.head.weight) is nn.Parameter, "there is memory now"


@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ([WHOLE, WHOLE], {}),
        ([WHOLE, WHOLE], {"stage": 1}),
        ([HALF_PRECISION + PARAMETERS, HALF_PRECISION], {"precision": "bf16-true"}),
        ([WHOLE + PARAMETERS, WHOLE + PARAMETERS], {"averages": True}),
    ],
    ids=["stage 3", "stage 1", "low precision", "an average of the weights"],
)
@pytest.mark.parametrize("short", [None, 0, 1])
def test_the_module_is_ordinary_if_nine_tenths_of_each_hosts_memory_suffice(run_on, needs, options, short):
    """With one byte less on one host the module stays sharded on every rank, and rank 0 warns once."""
    memory = [enough_for(needed) - (rank == short) for rank, needed in enumerate(needs)]
    message = ""
    if short is not None:
        message = rf"The 1 rank\(s\) on node{short} need {needs[short]} bytes .* and {memory[short]} are available\. "
    run_on(2, decide, memory=memory, message=message, **{"stage": 3, "precision": None, "averages": False} | options)


# --------------------------------------------------------------------------------------- changes between two runs


class WrappedMethod(Model):
    """Another model, with a part of one that an earlier run has trained."""

    def __init__(self, body):
        super().__init__()
        self.body = body


def use_a_part_in_another_model():
    model = Model()
    train_on(lambda: ZeroStrategy(after_fit="sharded"), model)
    with pytest.raises(ValueError, match=r"body\.0\.weight is sharded already.*write after_fit='full' in that run"):
        train_on(ZeroStrategy, WrappedMethod(model.body))
    train_on(lambda: ZeroStrategy(after_fit="full"), model)
    reference = WrappedMethod(copy.deepcopy(model.body))
    other = WrappedMethod(model.body)
    other.load_state_dict(reference.state_dict())
    same_tensors(train_on(ZeroStrategy, other), train_on(lambda: "ddp", reference), bound=0)


def test_a_part_of_a_module_that_has_stayed_sharded_is_refused_in_another_model_with_advice(run_on):
    run_on(2, use_a_part_in_another_model)


def new_head(model):
    model.head = nn.Linear(8, 3)


def new_layer(model):
    model.body.append(nn.Linear(8, 8))


def no_change(model):
    pass


def change_between(after_fit, change, precision):
    torch.manual_seed(0)
    model = Model()
    make_trainer(ZeroStrategy(stage=3, after_fit=after_fit), max_epochs=1).fit(model, loader())
    torch.manual_seed(10 + rank())  # new parameters are those of rank 0
    change(model)
    trainer = make_trainer(ZeroStrategy(stage=3, after_fit=after_fit), max_epochs=1, precision=precision)
    trainer.fit(model, loader())
    engine = engine_of(model)
    return model.state_dict() if engine is None else engine.full_state_dict()


def change_between_is_the_same(change, precision):
    found = change_between("sharded", change, precision)
    same_tensors(found, change_between("full", change, precision), bound=0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize(
    ("change", "precision"),
    [(new_head, None), (new_layer, None), (no_change, "bf16-true"), (no_change, "64-true")],
)
def test_changes_between_runs_take_effect_in_a_module_that_has_stayed_sharded(run_on, change, precision):
    run_on(2, change_between_is_the_same, change=change, precision=precision)


class Synced(LayerSync):
    """Counts conversions, as a stand-in for ``sync_batchnorm``, which needs a GPU."""

    def __init__(self):
        self.state = 0

    def apply(self, model):
        self.state += 1
        return model

    def revert(self, model):
        self.state -= 1
        return model


def synchronise_layers():
    model, sync = Model(), Synced()
    options = {"plugins": [sync], "max_epochs": 1}
    trainer = make_trainer(ZeroStrategy(stage=3, after_fit="sharded"), **options)
    trainer.test(model, loader(), verbose=False)
    assert sync.state == 0
    trainer.fit(model, loader())
    make_trainer(ZeroStrategy(stage=3, after_fit="sharded"), **options).fit(model, loader())
    assert sync.state == 1, "applied once, since the module has stayed sharded"
    make_trainer(ZeroStrategy(stage=3, after_fit="sharded"), max_epochs=1).fit(model, loader())
    assert sync.state == 0, "this fit is without synchronised layers"


def test_layers_are_synchronised_in_a_module_that_has_stayed_sharded(run_on):
    run_on(2, synchronise_layers)


# ------------------------------------------------------------------------------------------- memory that is limited

WIDTH, LAYERS = 1024, 8
LAYER = 4 * WIDTH * WIDTH  # bytes
# In addition to its shards, half of the model, a rank at stage 3 holds gradients of half of it, two gathered layers,
# two layers in reduction, and a layer of activations and workspace.
TO_TRAIN = LAYERS // 2 * LAYER + 5 * LAYER
# With Adam's moments the ordinary module takes three times the memory of its parameters.
TO_END = 3 * LAYERS * LAYER


class Wide(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def wide_loader():
    return DataLoader(TensorDataset(torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))), batch_size=2)


def used():
    """Bytes that count towards ``RLIMIT_DATA``."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["VmData"].split()[0])


@contextmanager
def limited() -> Iterator[Callable[[int], None]]:
    """Yield a function that limits this process to a number of further bytes, until the context ends.

    The ranks of the machine together then have as much more as their limits leave.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)

    def limit(more: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (used() + more, hard))
        stop = used() + more
        patch.setattr(host_room, "available_memory", lambda: (stop - used()) * world_size())

    with pytest.MonkeyPatch.context() as patch:
        try:
            yield limit
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def return_memory_at_once():
    """Return freed memory at once, as with MALLOC_MMAP_THRESHOLD_, so that it no longer counts towards the limit."""
    assert ctypes.CDLL(None).mallopt(-3, 2**16)


@pytest.fixture(scope="module")
def run_limited() -> Iterator[Callable[..., list[Any]]]:
    """Like ``run_on``, but in separate processes that return freed memory at once."""
    pools = WorkerPools(WorkerKind(prepare=return_memory_at_once))
    yield pools.run_on
    pools.close()


def train_wide(strategy, limit, more):
    """Fit, with room for ``more`` bytes beyond those in use after the first step."""
    torch.manual_seed(0)
    model = Wide()
    after_first_step = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: limit(more) if more and trainer.global_step == 1 else None
    )
    trainer = make_trainer(strategy, max_epochs=1, limit_train_batches=3, callbacks=[after_first_step])
    trainer.fit(model, wide_loader())
    return trainer, model


def end_with_little_memory(stage, folder):
    _, reference = train_wide("ddp", None, 0)
    expected = {name: value.clone() for name, value in reference.state_dict().items()}
    del reference
    with limited() as limit:
        with pytest.raises(RuntimeError, match="allocate memory|failed with RuntimeError"):
            train_wide(ZeroStrategy(stage=stage, after_fit="full"), limit, TO_TRAIN)
    with limited() as limit:
        strategy = ZeroStrategy(stage=stage, checkpoint="sharded")
        trainer, model = train_wide(strategy, limit, TO_TRAIN)
        assert all(type(p) is ShardedTensor for p in model.parameters())
        (validated,) = trainer.validate(model, wide_loader(), verbose=False)
        assert len(trainer.predict(model, wide_loader())) == 6 // world_size()
        trainer.save_checkpoint(folder / "last.ckpt")
        (tested,) = trainer.test(model, wide_loader(), verbose=False)
        assert tested == validated and all(type(p) is ShardedTensor for p in model.parameters())
    with full_parameters(model):
        same_tensors({name: p.detach() for name, p in model.named_parameters()}, expected, bound=0)
    # A mapped file counts towards the limit, though it takes no memory.
    (tested,) = trainer.test(model, wide_loader(), ckpt_path=folder / "last.ckpt", verbose=False)
    assert tested == validated and all(type(p) is nn.Parameter for p in model.parameters())


def end_with_memory(stage):
    _, reference = train_wide("ddp", None, 0)
    with limited() as limit:
        _, model = train_wide(ZeroStrategy(stage=stage), limit, TO_END * 2)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    same_tensors(model.state_dict(), reference.state_dict(), bound=0)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="needs Linux")
@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 1), (2, 3)])
def test_no_training_runs_out_of_memory_after_its_last_step(run_limited, tmp_path, size, stage):
    """Where ``after_fit="full"`` exhausts memory, the default leaves the module sharded, and every use of it works."""
    run_limited(size, end_with_little_memory, stage=stage, folder=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="needs Linux")
def test_with_enough_memory_the_module_is_ordinary_and_equals_ddps_bit_for_bit(run_limited):
    run_limited(2, end_with_memory, stage=3)
