"""ZeroStrategy in a Trainer: names, arguments, launchers, evaluation without a fit, copies."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ZeroStrategy
from tests.support import rank
from tests.support.trainer import Learner, make_trainer
from tests.support.warm import warm_python

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


def test_every_stage_is_registered_with_the_launch_variants_that_ddp_has():
    for stage in (1, 2, 3):
        for place, moved in (("", None), ("_offload", "cpu"), ("_nvme", "nvme")):
            for suffix, start in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
                strategy = StrategyRegistry.get(f"zero{stage}{place}{suffix}")
                assert isinstance(strategy, ZeroStrategy) and strategy.stage == stage
                assert getattr(strategy.config.offload, "optimizer", None) == moved
                assert strategy.options.start_method == start
    assert isinstance(ZeroStrategy(), DDPStrategy), "what Lightning allows DDP it allows ZeRO"


def test_lightnings_environment_variable_names_the_strategy_unless_the_trainer_does(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "zero2")
    own = {"accelerator": "cpu", "devices": 1, "logger": False}
    assert Trainer(**own).strategy.stage == 2
    assert Trainer(strategy="zero3", **own).strategy.stage == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, r"stage=4 is not a ZeRO stage: write 1, 2 or 3"),
        ({"offload": "gpu"}, r"offload='gpu' must be None, 'cpu', 'nvme', an OffloadConfig or a mapping"),
        (
            {"offload": {"optimiser": "cpu"}},
            r"offload: 'optimiser' is not an option. The options are optimizer,",
        ),
        ({"offload": {"optimizer": "disk"}}, r"offload: optimizer='disk' must be 'cpu', 'nvme' or None"),
        ({"offload": {"fraction": 2}}, r"offload: fraction=2 must be a number from 0 to 1"),
        ({"offload": {"parameters": "cpu"}, "stage": 2}, r"offload: parameters='cpu' requires stage 3: at stage 2"),
        (
            {"offload": {"parameters": "cpu", "optimizer": None}},
            r"parameters='cpu' requires optimizer='cpu'",
        ),
        ({"reduce_dtype": "fp8"}, r"reduce_dtype='fp8' must be 'fp32', 'bf16', 'fp16' or None"),
        ({"reduce_dtype": torch.bfloat16}, r"reduce_dtype=torch.bfloat16 must be 'fp32', 'bf16', 'fp16'"),
        ({"after_fit": "cut"}, r"after_fit='cut' must be 'auto', 'full' or 'sharded'"),
        ({"start_method": "thread"}, r"start_method='thread' must be 'popen'"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        ZeroStrategy(**arguments)


def refuse_engine_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer(ZeroStrategy(**options)).fit(Learner())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, r"prefetch=-1 must be an integer of at least 0"),
        ({"reduction_buffers": 0}, r"reduction_buffers=0 must be an integer of at least 1"),
        ({"bucket_numel": 1.5}, r"bucket_numel=1.5 must be an integer"),
        ({"units": "blocks"}, r"units='blocks' must be 'auto', a module class"),
        ({"units": nn.LSTM}, r"no submodule with parameters matches LSTM"),
    ],
)
def test_a_wrong_engine_option_is_refused_before_anything_is_sharded(run_on, options, message):
    run_on(2, refuse_engine_options, options=options, message=message)


# ---------------------------------------------------------------------------------- what existing projects do


class Everything(LightningModule):
    """Logs, evaluates and predicts as projects do."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.lr = 1e-2
        self.norms = []

    def forward(self, x):
        return self.head(self.backbone(x)) * self.scale

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1]) + 1e-3 * self.head.weight.square().sum()
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(-1)

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(grad_norm(self, 2)["grad_2.0_norm_total"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.head.weight.clamp_(-0.4, 0.4)  # weight clipping, as in a Wasserstein critic

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader(samples=24, batch_size=4):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def run_everything(strategy, callbacks=(), **options):
    torch.manual_seed(0)
    model = Everything()
    trainer = make_trainer(strategy, callbacks=list(callbacks), **({"max_epochs": 3} | options))
    trainer.fit(model, loader(), loader(16))
    return trainer, model


def same_model(model, reference):
    assert list(model.state_dict()) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, **CLOSE, msg=lambda m: f"{name}: {m}")


def train_evaluate_and_predict(stage):
    reference_trainer, reference = run_everything("ddp")
    trainer, model = run_everything(f"zero{stage}")
    assert all(type(p) is nn.Parameter for p in model.parameters()), "ordinary again after fit"
    same_model(model, reference)
    torch.testing.assert_close(trainer.callback_metrics, reference_trainer.callback_metrics, **CLOSE)
    torch.testing.assert_close(model.norms, reference.norms, rtol=1e-5, atol=1e-7)
    for evaluate in ("validate", "test"):
        expected = getattr(reference_trainer, evaluate)(reference, loader(16), verbose=False)
        got = getattr(trainer, evaluate)(model, loader(16), verbose=False)
        assert got[0] == pytest.approx(expected[0], rel=1e-5)
    predictions = trainer.predict(model, loader(16))
    for ours, theirs in zip(predictions, reference_trainer.predict(reference, loader(16)), strict=True):
        assert torch.equal(ours, theirs)
    trainer.fit(model, loader())  # once more: max_epochs is reached, nothing is left over that disturbs it
    same_model(model, reference)


@pytest.mark.behaviour("The Trainer", "`validate`, `test` and `predict` before, after and between fits, in any order")
@STAGES
@pytest.mark.parametrize("size", [1, 2])
def test_fit_validate_test_predict_and_fit_again_give_ddps_numbers(run_on, stage, size):
    run_on(size, train_evaluate_and_predict, stage=stage)


class Penalised(LightningModule):
    """Penalises the weight of a layer that no forward uses, by a factor that differs between ranks."""

    def __init__(self):
        super().__init__()
        self.used, self.penalised = nn.Linear(6, 3), nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return self.used(x).square().mean() + self.penalised.weight.square().sum() * x.mean()

    def validation_step(self, batch, batch_idx):
        self.used(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_twice(stage, before):
    models = []
    for strategy in ("ddp_find_unused_parameters_true", f"zero{stage}"):
        torch.manual_seed(0)
        model = Penalised()
        getattr(make_trainer(strategy, max_epochs=1), before)(model, loader())
        make_trainer(strategy, max_epochs=1).fit(model, loader())
        models.append(model)
    same_model(*reversed(models))


@STAGES
@pytest.mark.parametrize("before", ["fit", "validate"])
def test_a_second_run_gives_ddps_numbers_for_parameters_used_outside_of_their_layers_forward(run_on, stage, before):
    run_on(2, run_twice, stage=stage, before=before)


def evaluate_alone(stage, backend):
    torch.manual_seed(rank())  # each rank creates different weights: rank 0's are used
    model = Everything()
    reference = copy.deepcopy(model)
    trainer = make_trainer(ZeroStrategy(stage=stage, process_group_backend=backend))
    got = trainer.validate(model, loader(16), verbose=False)
    expected = make_trainer("ddp").validate(reference, loader(16), verbose=False)
    assert got[0] == pytest.approx(expected[0], rel=1e-6)
    predictions = trainer.predict(model, loader(16))
    assert all(torch.equal(a, b) for a, b in zip(predictions, make_trainer("ddp").predict(reference, loader(16))))


@pytest.mark.behaviour("The Trainer", "Evaluation without training, under `inference_mode` too")
@STAGES
@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_evaluation_without_training_gives_ddps_numbers_under_inference_mode_too(run_on, stage, backend):
    run_on(2, evaluate_alone, stage=stage, backend=backend)


class ValidatesACopy(Callback):
    """Validates a copy of the module in mid-run, with a Trainer of its own."""

    def __init__(self, strategy):
        self.strategy, self.found = strategy, []

    def on_train_epoch_end(self, trainer, pl_module):
        other = make_trainer(self.strategy)
        self.found += other.validate(copy.deepcopy(pl_module), loader(16), verbose=False)


def validate_copies(stage):
    found = {}
    for strategy in ("ddp", f"zero{stage}"):
        probe = ValidatesACopy(strategy)
        run_everything(strategy, callbacks=[probe])
        found[strategy] = [each["val"] for each in probe.found]
    assert found[f"zero{stage}"] == pytest.approx(found["ddp"], rel=1e-5) and len(found["ddp"]) == 3


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "A copy of the module validated by another Trainer in mid-run")
@STAGES
def test_a_copy_of_the_module_is_validated_by_another_trainer_in_mid_run(run_on, stage):
    run_on(2, validate_copies, stage=stage)


def copy_and_pickle():
    trainer, model = run_everything("zero3", max_epochs=1)
    for strategy in (copy.deepcopy(trainer.strategy), pickle.loads(pickle.dumps(ZeroStrategy(stage=2)))):
        assert strategy.engine is None

    class CopyInFit(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.copied = copy.deepcopy(pl_module.backbone)

    callback = CopyInFit()
    run_everything("zero3", [callback], max_epochs=1)
    assert len(list(callback.copied.parameters())) == 6


def test_strategies_and_modules_can_be_copied(run_on):
    run_on(2, copy_and_pickle)


# -------------------------------------------------------------------------------------------- whole processes


SCRIPT = """
    import sys
    import lightning_zero
    from tests.strategy.test_strategy import Everything, loader, torch
    from lightning_zero import ZeroStrategy
    from lightning.pytorch import Trainer, seed_everything

    class Failing(Everything):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and self.global_rank in FAILING:
                raise KeyError("user error")
            return super().training_step(batch, batch_idx)

    FAILING = {failing}
    if __name__ == "__main__":
        torch.set_num_threads(1)
        seed_everything(0)
        model = Failing()
        before = model.head.weight.detach().clone()
        trainer = Trainer(
            strategy={strategy}, devices=2, accelerator="cpu", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(model, loader())
        assert type(model.head.weight) is torch.nn.Parameter
        print("TRAINED", not torch.equal(before, model.head.weight))
"""


def run_script(tmp_path, strategy, failing=()):
    """Run the script with a strategy, given as an expression."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(strategy=strategy, failing=set(failing)))
    begin = time.monotonic()
    done = subprocess.run([warm_python(), script], capture_output=True, text=True, timeout=150, env=_environment())
    return done, time.monotonic() - begin


def _environment():
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The Trainer", "Launched as a script, by spawn or by fork: the main process has the weights")
@pytest.mark.parametrize(("stage", "launch"), [(1, "_fork"), (2, "_fork"), (3, ""), (3, "_spawn")])
def test_each_launcher_trains_and_the_main_process_has_the_weights(tmp_path, stage, launch):
    done, _ = run_script(tmp_path, repr(f"zero{stage}{launch}"))
    assert done.returncode == 0, done.stderr
    assert "TRAINED True" in done.stdout


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_the_main_process_has_the_weights_of_a_module_that_stays_sharded(tmp_path, start_method):
    done, _ = run_script(tmp_path, f"ZeroStrategy(stage=3, after_fit='sharded', start_method='{start_method}')")
    assert done.returncode == 0, done.stderr
    assert "TRAINED True" in done.stdout


def test_an_error_on_one_rank_reaches_the_user_and_ends_every_rank_in_seconds(tmp_path):
    done, seconds = run_script(tmp_path, "'zero3'", failing=[1])
    assert done.returncode != 0
    assert "KeyError: 'user error'" in done.stderr
    assert seconds < 90
