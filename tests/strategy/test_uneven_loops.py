"""Join (uneven inputs): evaluation loops that end at different batches on different ranks, compared with DDP."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from lightning_zero import ZeroStrategy
from tests.support import rank
from tests.support.trainer import make_trainer

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Classifier(LightningModule):
    """Three units and a root; logs one mean by `sync_dist` and one by a torchmetric, for each dataloader."""

    def __init__(self, norm=nn.Identity, sync_dist=True):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), norm(), nn.Linear(8, 5))
        self.head = nn.Linear(5, 3)
        self.sync_dist = sync_dist
        self.accuracy = MeanMetric()
        self.seen = []

    def forward(self, x):
        return self.head(self.backbone(x))

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def evaluation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.loss(batch)
        self.accuracy.update((self(batch[0]).argmax(-1) == batch[1]).float())
        self.seen.append((dataloader_idx, batch_idx, loss.item()))
        if self.sync_dist:
            self.log("loss", loss, sync_dist=True)

    validation_step = test_step = evaluation_step

    def on_evaluation_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()

    on_validation_epoch_end = on_test_epoch_end = on_evaluation_epoch_end

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Norm(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(8)


class Stream(IterableDataset):
    """Samples without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def loader(counts, seed=0, sized=True):
    """A loader with this rank's number of batches in `counts`, of two samples each."""
    generator = torch.Generator().manual_seed(100 * seed + rank())
    count = 2 * counts[rank()]
    x, y = torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    samples = TensorDataset(x, y)
    return DataLoader(samples if sized else Stream([samples[i] for i in range(count)]), batch_size=2)


def trainer_of(strategy, **options):
    return make_trainer(strategy, use_distributed_sampler=False, **options)


def evaluate(strategy, model, loaders):
    """Results of each kind of evaluation on this rank, and the batches it saw."""
    found = []
    for kind in ("validate", "test", "predict"):
        trainer = trainer_of(strategy())
        outputs = getattr(trainer, kind)(model, loaders, **({} if kind == "predict" else {"verbose": False}))
        found.append((outputs, dict(trainer.callback_metrics)))
    return found, model.seen


def evaluate_as_under_ddp(counts, stage=3, backend="gloo", sized=True, sync_dist=True):
    torch.manual_seed(0)
    model = Classifier(sync_dist=sync_dist)
    reference = copy.deepcopy(model)
    loaders = [loader(each, seed, sized) for seed, each in enumerate(counts)]
    expected, batches = evaluate(lambda: "ddp", reference, loaders)
    got, seen = evaluate(lambda: ZeroStrategy(stage=stage, process_group_backend=backend), model, loaders)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(seen, batches, **CLOSE)
    each = [(index, batch) for index, each in enumerate(counts) for batch in range(each[rank()])]
    assert [batch[:2] for batch in seen] == 2 * each, "no batch is lost"


@pytest.mark.behaviour(
    "The Trainer", "`validate`, `test` and `predict` on loaders that end at different batches on different ranks"
)
@STAGES
def test_loops_of_uneven_length_give_ddps_metrics_and_predictions(run_on, stage):
    run_on(2, evaluate_as_under_ddp, stage=stage, counts=[[1, 3]])


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_a_rank_without_any_batch_joins_the_collectives_of_the_others(run_on, backend):
    run_on(3, evaluate_as_under_ddp, counts=[[1, 3, 0]], backend=backend, sized=False, sync_dist=False)


def test_each_of_several_dataloaders_may_be_uneven(run_on):
    run_on(3, evaluate_as_under_ddp, counts=[[1, 3, 2], [2, 1, 1], [1, 1, 3]])


def test_loaders_without_a_length_may_be_uneven(run_on):
    run_on(2, evaluate_as_under_ddp, counts=[[3, 1], [1, 2]], sized=False)


class Empty(Classifier):
    def __init__(self):
        super().__init__(sync_dist=False)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def on_evaluation_epoch_end(self):
        pass

    on_validation_epoch_end = on_test_epoch_end = on_evaluation_epoch_end


def skip_on_one_rank():
    torch.manual_seed(0)
    model = Empty()
    trainer = trainer_of("zero3")
    trainer.validate(model, loader([2, 0]), verbose=False)
    assert len(model.seen) == (2 if rank() == 0 else 0)
    trainer.validate(model, loader([0, 0]), verbose=False)
    assert type(model.head.weight) is nn.Parameter


def test_a_rank_may_skip_a_loop_for_lack_of_data(run_on):
    run_on(2, skip_on_one_rank)


def validate_in_fit(stage, counts, norm=nn.Identity, **options):
    def train(strategy):
        torch.manual_seed(0)
        model = Classifier(norm)
        trainer = trainer_of(strategy, **{"max_epochs": 2, "num_sanity_val_steps": 2} | options)
        trainer.fit(model, loader([4, 4, 4]), [loader(counts), loader(counts[::-1], seed=1)])
        return trainer.callback_metrics, model.seen, model.state_dict()

    torch.testing.assert_close(train(f"zero{stage}"), train("ddp"), **CLOSE)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "Training continues after a validation of uneven length")
@STAGES
def test_training_continues_after_an_uneven_validation(run_on, stage):
    run_on(2, validate_in_fit, stage=stage, counts=[1, 3], val_check_interval=2)


def train_by_steps(stage):
    def train(strategy):
        torch.manual_seed(0)
        model = Classifier(sync_dist=False)
        options = {"max_epochs": -1, "max_steps": 11, "check_val_every_n_epoch": None, "val_check_interval": 4}
        trainer = trainer_of(strategy, **options)
        trainer.fit(model, loader([2, 5], sized=False), loader([1, 3], seed=1))
        assert trainer.global_step == 11
        return trainer.current_epoch, trainer.callback_metrics, model.seen, model.state_dict()

    torch.testing.assert_close(train(f"zero{stage}"), train("ddp"), **CLOSE)


@pytest.mark.exhaustive(but=1)
@STAGES
def test_epochs_of_a_training_by_steps_may_be_uneven(run_on, stage):
    run_on(2, train_by_steps, stage=stage)


def test_buffers_follow_rank_0s_in_an_uneven_validation(run_on):
    run_on(2, validate_in_fit, stage=3, counts=[2, 1], norm=Norm)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders_may_be_uneven(run_on, mode):
    run_on(2, validate_combined, mode=mode)


class Combined(Classifier):
    def validation_step(self, batch, batch_idx):
        present = [each for each in batch if each is not None]
        self.evaluation_step([torch.cat(parts) for parts in zip(*present)], batch_idx)


def validate_combined(mode):
    found = []
    for strategy in ("ddp", "zero3"):
        torch.manual_seed(0)
        model = Combined()
        loaders = CombinedLoader([loader([1, 3]), loader([2, 4], seed=1)], mode)
        found.append((trainer_of(strategy).validate(model, loaders, verbose=False), model.seen))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


class Iterating(Classifier):
    def validation_step(self, dataloader_iter):
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.evaluation_step(batch, batch_idx, dataloader_idx)


def validate_with_an_iterator(sized):
    found = []
    for strategy in ("ddp", "zero3"):
        torch.manual_seed(0)
        model = Iterating()
        trainer = trainer_of(strategy)
        found.append((trainer.validate(model, loader([1, 3], sized=sized), verbose=False), model.seen))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("sized", [True, False])
def test_steps_that_fetch_their_own_batches_may_be_uneven(run_on, sized):
    run_on(2, validate_with_an_iterator, sized=sized)


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, *_):
        # every rank that has a batch reads a parameter of a unit here
        self.written.append((batch_indices, prediction * pl_module.backbone[0].weight.norm()))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append((batch_indices, predictions))


def predict_with_lightnings_sampler(samples):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(samples, 6)), batch_size=2)
    found = []
    for strategy in ("ddp", "zero3"):
        torch.manual_seed(1)
        writer = Writer()
        predictions = make_trainer(strategy, callbacks=[writer]).predict(Classifier(), data)
        found.append((predictions, writer.written))
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    return len(found[0][0])


def test_predictions_and_what_a_callback_writes_of_them_equal_ddps(run_on):
    assert run_on(2, predict_with_lightnings_sampler, samples=9) == [3, 2]


class Clamping(Classifier):
    def on_validation_batch_end(self, *args):
        with torch.no_grad():
            self.backbone[0].weight.clamp_(-0.1, 0.1)


class Remembering(Classifier):
    def on_validation_start(self):
        self.doubled = 2 * self.backbone[0].weight.detach()

    def on_validation_batch_end(self, *args):
        self.doubled.norm()


def refuse_what_cannot_be_served(model, what):
    trainer = trainer_of("zero3")
    if rank() == 1:
        with pytest.raises(RuntimeError, match=rf"needs every rank for {what}.*rank\(s\) \[0\] have no batch left"):
            trainer.validate(model(), loader([0, 1], sized=False), verbose=False)
    else:
        with pytest.raises(RuntimeError):
            trainer.validate(model(), loader([0, 1], sized=False), verbose=False)


@pytest.mark.parametrize(
    ("model", "what"), [(Clamping, "a write to 'backbone.0.weight'"), (Remembering, "a norm or other reduction")]
)
def test_an_operation_that_ranks_without_a_batch_cannot_join_is_an_error(run_on, model, what):
    run_on(2, refuse_what_cannot_be_served, model=model, what=what)
