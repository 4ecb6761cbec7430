"""The same strategies under `pytorch_lightning`, whose classes differ from those of `lightning.pytorch`."""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import LambdaCallback, ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.precision import FSDPPrecision
from pytorch_lightning.strategies import StrategyRegistry
from pytorch_lightning.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from lightning_zero.pytorch_lightning import MagnitudePruning, ZeroMonitor, ZeroStrategy
from tests.support.trainer import make_trainer
from tests.support.training import CLOSE
from tests.support.warm import warm_python
from tests.support.workers import rank
from tests.trainer.cases import Body, behaviours, data, observed, same_as_under_ddp, shared_folder


class Net(Body, pytorch_lightning.LightningModule):
    pass


def fit(strategy: Any, module: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    module = Net() if module is None else module
    trainer = make_trainer(strategy, pytorch_lightning.Trainer, **options)
    trainer.fit(module, data(), data(16), ckpt_path=ckpt_path)
    return trainer, module


def plain(strategy: str) -> Any:
    """`pytorch_lightning` in place of `lightning.pytorch`: fit with validation, `bf16-mixed`, files and resuming"""
    path = shared_folder() / "fit.ckpt"
    saving = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(path))
    trainer, module = fit(strategy, callbacks=[saving], max_epochs=1)
    assert strategy == "ddp" or type(trainer.strategy) is ZeroStrategy
    first, file = observed(trainer, module), torch.load(path, weights_only=True)
    resumed = observed(*fit(strategy, ckpt_path=path))
    trainer.test(module, data(), verbose=False)
    predicted = trainer.predict(module, data(16))
    torch.manual_seed(0)  # a resumed run continues with its checkpoint's random numbers, unlike under DDP
    mixed = observed(*fit(strategy, precision="bf16-mixed", max_epochs=1))
    return first, file["state_dict"], file["optimizer_states"], resumed, predicted, mixed


def clipped(strategy: str) -> Any:
    """`pytorch_lightning`: accumulation, clipping, `16-mixed`"""
    clipped = observed(*fit(strategy, accumulate_grad_batches=3, gradient_clip_val=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    return clipped, observed(*fit(strategy, plugins=plugin, gradient_clip_val=0.1, max_epochs=1)), scaler.get_scale()


class Shaped(Net):
    """Manual optimization with two optimizers, one of which needs whole matrices."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if p.ndim != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        self.manual_backward(self.loss(batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def whole(strategy: str) -> Any:
    """`pytorch_lightning`: Muon for matrices with AdamW for the rest, and `MagnitudePruning`"""
    return observed(*fit(strategy, Shaped(), callbacks=[MagnitudePruning(0.3)]))


@pytest.mark.exhaustive(but=1)
@behaviours("The Trainer", plain, whole)
def test_pytorch_lightnings_trainer_gives_the_same_numbers_as_its_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@behaviours("The Trainer", clipped)
def test_pytorch_lightnings_trainer_clips_and_scales_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE)


class Uneven(Net):
    """Rank r evaluates r + 1 batches, in an ordinary loop or by `dataloader_iter`."""

    def val_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(rank())
        x, y = torch.randn(4 * (rank() + 1), 6, generator=generator), torch.zeros(4 * (rank() + 1), dtype=torch.long)
        return DataLoader(TensorDataset(x, y), batch_size=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())


class UnevenIterator(Uneven):
    def validation_step(self, dataloader_iter: Any) -> None:
        batch, _, _ = next(dataloader_iter)
        self.seen.append(self.loss(batch).item())


def uneven(strategy: str) -> Any:
    """`pytorch_lightning`: validation loops of uneven length, and `dataloader_iter`"""
    seen = []
    for cls in (Uneven, UnevenIterator):
        module = cls()
        trainer = make_trainer(strategy, pytorch_lightning.Trainer, use_distributed_sampler=False)
        trainer.validate(module, verbose=False)
        seen.append(module.seen)
        assert len(module.seen) == rank() + 1
    return seen


@behaviours("The Trainer", uneven)
def test_pytorch_lightnings_ranks_may_validate_different_numbers_of_batches(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE)


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and rank() == 1:
            raise KeyError("user error")
        return super().training_step(batch, batch_idx)


def failures() -> None:
    """A failure on one rank ends both in seconds; SIGTERM is no failure; the processes can train again."""
    folder = shared_folder()
    begin = time.monotonic()
    error, text = (KeyError, "user error") if rank() == 1 else (RuntimeError, "rank 1 failed with KeyError")
    with pytest.raises(error, match=text):
        fit("zero3", Fails())
    assert time.monotonic() - begin < 20
    monitor = ZeroMonitor(1)
    trainer, module = fit("zero3", callbacks=[monitor])
    assert len(monitor.loss_curve) == trainer.global_step == 6 and monitor.peak_bytes["parameters"] > 0
    with pytest.raises(SIGTERMException):
        saving = ModelCheckpoint(folder, "terminated", save_on_exception=True)
        fit("zero2", callbacks=[Terminates(), saving], enable_checkpointing=True)
    assert list(folder.glob("*.ckpt"))


class Terminates(pytorch_lightning.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), 15)


def test_pytorch_lightnings_failures_end_every_rank_and_sigterm_is_no_failure(run_on):
    run_on(2, failures)


def test_strategy_names_are_registered_and_objects_of_another_namespace_are_refused():
    for stage in (1, 2, 3):
        for suffix, start_method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
            strategy = StrategyRegistry.get(f"zero{stage}{suffix}")
            assert type(strategy) is ZeroStrategy and strategy.stage == stage
            assert strategy.options.start_method == start_method
            assert pickle.loads(pickle.dumps(strategy)).stage == stage  # as a spawned process gets it
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False}
    with pytest.raises(ValueError, match=r"<ZeroStrategy\(stage=3\) for lightning.pytorch.Trainer>.*pytorch_lightning"):
        pytorch_lightning.Trainer(strategy=lightning_zero.ZeroStrategy(), **options)
    with pytest.raises(ValueError, match="FSDPPrecision cannot be used"):
        pytorch_lightning.Trainer(strategy="zero3", plugins=FSDPPrecision("bf16-true"), **options)


ORDERS = """
import os, sys
import lightning.pytorch

def run(order):
    if os.fork() == 0:
        order()
        import pytorch_lightning, lightning_fabric, lightning.fabric
        trainers = [pytorch_lightning.Trainer, lightning.pytorch.Trainer]
        for cls in (*trainers, lightning_fabric.Fabric, lightning.fabric.Fabric):
            user = cls(strategy="zero2", accelerator="cpu", devices=1)
            print(type(user.strategy).__module__, user.strategy.stage, flush=True)
        os._exit(0)
    os.wait()

def ours_first():
    import lightning_zero
    assert "pytorch_lightning" not in sys.modules and "lightning_fabric" not in sys.modules
    import lightning_zero.pytorch_lightning, lightning_zero.lightning_fabric

def ours_last():
    import pytorch_lightning
    import lightning_zero

run(ours_first)
run(ours_last)
"""


def test_strategies_are_registered_with_packages_imported_before_and_by_importing_the_module_of_a_package_after():
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([warm_python(), "-c", ORDERS], capture_output=True, text=True, timeout=90, env=environment)
    names = ["pytorch_lightning", "strategies.trainer", "lightning_fabric", "strategies.fabric"]
    assert done.stdout.splitlines() == [f"lightning_zero.{name} 2" for name in names] * 2, done.stderr
