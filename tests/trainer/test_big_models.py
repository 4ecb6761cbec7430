"""Big models in a Trainer: ``configure_model`` on the meta device, weights from files, resuming, evaluation only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_zero
from lightning_zero.engine.init.deferred_param import is_deferred
from lightning_zero.engine.tensor.lazy_tensor import LazyTensor
from lightning_zero.zoo.gpt import GPT
from tests.support import world_size
from tests.support.models import CLASSES
from tests.support.trainer import Learner, fit, make_trainer
from tests.support.training import same_runs, same_tensors

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Text(nn.Module):
    """A GPT that returns the loss of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(16, 2, 2, 8, tied=True)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.norm(self.gpt(tokens)).flatten(0, 1)[:, :CLASSES], targets.flatten())


class BigLearner(Learner):
    """Creates its model in ``configure_model``: on the meta device, and with a file's weights, if requested."""

    def __init__(self, on_meta: bool, weights: str | None = None) -> None:
        super().__init__(model=nn.Identity, batches=2)
        self.on_meta, self.weights = on_meta, weights
        self.made = 0

    def configure_model(self) -> None:
        if self.made:
            return
        self.made += 1
        with torch.device("meta" if self.on_meta else "cpu"):
            self.model = Text()
        if self.weights is not None:
            lightning_zero.load_weights(self.model, self.weights)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.model(*batch), sync_dist=True)

    def val_dataloader(self):
        return self.train_dataloader()


class Ordinary(BigLearner):
    def __init__(self, weights: str | None = None) -> None:
        super().__init__(False, weights)


class OnMeta(BigLearner):
    def __init__(self, weights: str | None = None) -> None:
        super().__init__(True, weights)

    def configure_optimizers(self):
        assert all(is_deferred(parameter) for parameter in self.model.parameters())
        return super().configure_optimizers()


def train(stage: int) -> None:
    strategy = f"zero{stage}"
    reference = fit("ddp", Ordinary)
    run = fit(strategy, OnMeta)
    same_runs(run, reference)
    assert not any(parameter.is_meta for parameter in run.module.parameters())

    torch.save(run.module.model.state_dict(), "model.pt")
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        from_memory = fit(strategy, lambda: Ordinary("model.pt"), precision=precision)
        from_file = fit(strategy, lambda: OnMeta("model.pt"), precision=precision)
        same_runs(from_file, from_memory)
    same_runs(fit("ddp", lambda: BigLearner(True, "model.pt")), fit(strategy, lambda: OnMeta("model.pt")))


@pytest.mark.exhaustive(but=1)
@STAGES
@pytest.mark.behaviour("The Trainer", "`configure_model` on the meta device, and `load_weights` in it")
def test_a_model_made_on_the_meta_device_trains_as_one_made_on_the_cpu(run_on, stage):
    run_on(2, train, stage=stage)


def test_a_model_made_on_the_meta_device_trains_on_one_rank(run_on):
    run_on(1, train, stage=3)


def folder() -> str:
    found = [str(Path.cwd())]
    if world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


class Remembering(OnMeta):
    """Keeps an entry that it finds in a checkpoint, as projects do with a memory bank or a tokenizer."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["bank"] = torch.arange(3.0)

    def on_load_checkpoint(self, checkpoint):
        self.bank = checkpoint["bank"]


def resume(stage: int) -> None:
    strategy, path = f"zero{stage}", f"{folder()}/half.ckpt"
    torch.manual_seed(0)
    half, trainer = Remembering(), make_trainer(strategy, max_epochs=1)
    trainer.fit(half)
    trainer.save_checkpoint(path)
    whole = fit(strategy, Remembering, max_epochs=2)
    resumed = fit(strategy, Remembering, ckpt_path=path, max_epochs=2)
    same_tensors(resumed.weights, whole.weights, bound=0)
    assert torch.equal(resumed.module.bank, torch.arange(3.0))
    assert resumed.module.model.gpt.head.weight is resumed.module.model.gpt.embedding.weight

    losses = []
    for learner, ckpt_path in ((Remembering(), path), (half, None), (OnMeta(), None), (Ordinary(), None)):
        torch.manual_seed(0)
        trainer = make_trainer(strategy)
        trainer.validate(learner, ckpt_path=ckpt_path, verbose=False)
        losses.append(trainer.callback_metrics["loss"])
    assert torch.equal(losses[0], losses[1]), "a module on the meta device gets the checkpoint's values"
    assert torch.equal(losses[2], losses[3]), "or those of its construction"


@pytest.mark.exhaustive
@STAGES
@pytest.mark.behaviour("The Trainer", "Resuming and evaluating a model made on the meta device")
def test_a_model_made_on_the_meta_device_resumes_and_evaluates(run_on, stage):
    run_on(2, resume, stage=stage)


class Whole(Learner):
    def __init__(self) -> None:
        super().__init__(model=Text, batches=2)


def init_module() -> None:
    for stage in (1, 3):
        trainer = make_trainer(f"zero{stage}")
        with trainer.init_module(empty_init=True):
            module = Whole()
            other = Whole()
            assert all(isinstance(parameter, LazyTensor) for parameter in module.parameters())
            assert not any(buffer.is_meta for buffer in module.buffers())
        with trainer.init_module():
            values = Whole()
        other.load_state_dict(values.state_dict())
        torch.save(values.state_dict(), "whole.pt")
        lightning_zero.load_weights(module, "whole.pt")
        assert all(isinstance(parameter, LazyTensor) for parameter in module.parameters())
        trainer.fit(module)
        make_trainer("ddp").fit(values)
        same_tensors(module.state_dict(), values.state_dict(), bound=0)
        assert module.device == torch.device("cpu")
        trainer = make_trainer(f"zero{stage}")
        trainer.fit(other)
        same_tensors(other.state_dict(), values.state_dict(), bound=0)


@pytest.mark.behaviour("The Trainer", "`trainer.init_module(empty_init=True)`")
def test_init_module_with_empty_init_makes_parameters_without_memory(run_on):
    run_on(2, init_module)


class Failing(OnMeta):
    def configure_model(self) -> None:
        super().configure_model()
        raise LookupError("of the project's own")


def fail(stage: int) -> None:
    torch.save(Text().gpt.state_dict(), "part.pt")
    for make, error, words in (
        (lambda: OnMeta("absent.pt"), FileNotFoundError, "absent.pt does not exist"),
        (lambda: OnMeta("part.pt"), ValueError, r"part.pt does not fit\. Nothing was loaded\."),
        (Failing, LookupError, "of the project's own"),
    ):
        trainer = make_trainer(f"zero{stage}")
        with pytest.raises(error, match=words):
            trainer.fit(make())
    with pytest.raises(ValueError, match="on the meta device without values"):
        make_trainer(f"zero{stage}").fit(WithoutInitialiser())


class WithoutInitialiser(OnMeta):
    def configure_model(self) -> None:
        super().configure_model()
        self.scale = nn.Parameter(torch.empty((), device="meta"))


def test_an_error_before_a_module_has_values_reaches_the_user(run_on):
    run_on(2, fail, stage=3)
