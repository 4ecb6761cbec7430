"""``after_fit="sharded"``: the module stays sharded when a run ends, and the next run continues with it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy
from lightning_zero.engine import ShardedTensor, engine_of
from tests.support import rank
from tests.support.trainer import make_trainer
from tests.support.training import same_tensors

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
INPUTS = torch.arange(12.0).view(2, 6) / 12


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)
        self.seen_at_the_end = None

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def on_fit_end(self):
        self.seen_at_the_end = self.head.weight.norm().item()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def loader(samples=24):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def runs(make_strategy):
    """Fit, evaluate, save, look, and fit again with a new Trainer; all that is found on the way."""
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


def keep_sharded(stage):
    def sharded(**options):
        return lambda: ZeroStrategy(stage=stage, after_fit="sharded", **options)

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
        train_on(lambda: ZeroStrategy(stage=other_stage), model), train_on(lambda: "ddp", reference), bound=2e-6
    )
    assert engine_of(model) is None and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.behaviour("The Trainer", '`after_fit="sharded"`: every next run goes on with the module as it is')
@STAGES
def test_the_module_stays_sharded_and_every_next_run_equals_ddps(run_on, stage):
    run_on(2, keep_sharded, stage=stage)
