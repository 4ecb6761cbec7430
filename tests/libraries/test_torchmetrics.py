"""torchmetrics with a transformers model: logged values equal DDP's, in training, validation and test."""

from __future__ import annotations

import warnings

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.text import Perplexity

from tests.libraries.models import VOCABULARY
from tests.libraries.training import Learner, fit
from tests.support.trainer import make_trainer


class Measured(Learner):
    """Metrics as attributes, in a collection, logged as objects and by value, in steps and epochs."""

    def __init__(self):
        super().__init__("GPT-2")
        self.perplexity = Perplexity(ignore_index=-100)
        classes = {"num_classes": VOCABULARY, "average": "micro"}
        scores = MetricCollection([MulticlassAccuracy(**classes), MulticlassF1Score(**classes)])
        self.learned, self.held_out = scores.clone(prefix="train_"), scores.clone(prefix="val_")
        self.seen = []

    def training_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.learned.update(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log_dict(self.learned, on_step=True, on_epoch=True)
        self.log("loss", output.loss, on_epoch=True, sync_dist=True)
        return output.loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.perplexity(output.logits[:, :-1], batch["labels"][:, 1:])
        self.log("perplexity", self.perplexity, on_epoch=True)
        self.held_out.update(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def on_validation_epoch_end(self):
        self.log_dict(self.held_out.compute(), sync_dist=True)
        self.held_out.reset()

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.seen.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})

    def test_dataloader(self):
        return self.val_dataloader()


def logged(strategy):
    warnings.simplefilter("ignore")
    module = fit(strategy, Measured, max_epochs=2).module
    tested = make_trainer(strategy).test(module, verbose=False)[0]
    return module.seen, {name: torch.tensor(value) for name, value in tested.items()}


def compare():
    expected = logged("ddp")
    names = set(expected[0][0])
    assert {"perplexity", "val_MulticlassAccuracy", "train_MulticlassF1Score_epoch", "loss_epoch"} <= names, names
    for stage in (1, 2, 3):
        torch.testing.assert_close(logged(f"zero{stage}"), expected, rtol=0, atol=0)


@pytest.mark.behaviour("The Trainer", "torchmetrics with a transformers model: accuracy, perplexity, a collection")
def test_metrics_equal_ddps(run_on):
    run_on(2, compare)
