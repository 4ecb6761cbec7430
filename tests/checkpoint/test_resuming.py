"""A run stopped anywhere and resumed equals the uninterrupted run: random state and position in the data."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from lightning_zero import ZeroStrategy
from tests.support.trainer import ManualLearner, make_trainer
from tests.support.training import same_values
from tests.support.workers import rank, world_size

STRATEGIES = ["zero1", "zero2", "zero3 sharded"]
EPOCHS, BATCHES = 2, 4


class Numbers(Dataset[Tensor]):
    """Sample i consists of i and of noise that each reading draws anew, as augmentation does."""

    def __init__(self, samples: int, noise: bool = True) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        noise = [torch.rand(()).item(), random.random(), np.random.rand()] if self.noise else [0, 0, 0]
        return torch.tensor([float(index), *noise])


def shuffled(batches: int = BATCHES, noise: bool = True, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Numbers(2 * batches * world_size(), noise), batch_size=2, shuffle=True, **options)


def weighted(batches: int = BATCHES) -> DataLoader[Tensor]:
    data = Numbers(2 * batches * world_size(), noise=False)
    sampler = WeightedRandomSampler(torch.ones(len(data)), len(data), generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=2, sampler=sampler)


def several(mode: Any, **options: Any) -> CombinedLoader:
    return CombinedLoader({str(batches): shuffled(batches, **options) for batches in (BATCHES, 2, 3)}, mode)


class Drawing(LightningModule):
    """Draws from every generator in a step, and records the numbers drawn and the samples seen."""

    def __init__(self, loader: Callable[[], Any] = shuffled) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.loader = loader
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = sum(self.net(part).mean() for part in torch.utils._pytree.tree_leaves(batch) if part is not None)
        self.seen.append([self.current_epoch, batch_idx, batch, loss.item(), random.random(), np.random.rand()])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch).mean())

    def on_train_epoch_start(self) -> None:
        random.random(), torch.rand(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)]

    def train_dataloader(self) -> Any:
        return self.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(4 * world_size()), batch_size=2)


class SavesIn(Callback):
    """Saves each time one of these hooks is called, and notes how many batches were done by then."""

    def __init__(self, folder: Path, *hooks: str) -> None:
        self.folder, self.done = folder, {}
        for hook in hooks:
            setattr(self, hook, partial(self.save, hook))

    def save(self, hook: str, trainer: Any, module: Any, *_: Any) -> None:
        # After an epoch's last batch Lightning resumes without the validation and the hooks that were still to come.
        if trainer.sanity_checking or (hook == "on_train_batch_end" and trainer.is_last_batch):
            return
        within = hook in ("on_before_zero_grad", "on_before_optimizer_step")
        name = f"{len(self.done):03} {hook}.ckpt"
        trainer.save_checkpoint(self.folder / name)
        steps = trainer.accumulate_grad_batches
        epochs, batches = divmod(len(module.seen) - within, BATCHES)
        self.done[name] = epochs * BATCHES + (batches // steps * steps)


def strategy_of(name: str) -> Any:
    stage, _, form = name.partition(" ")
    return ZeroStrategy(int(stage[-1]), checkpoint=form) if form else stage


def fit(strategy: str, loader: Any, ckpt_path: Any = None, seed: int = 0, **options: Any) -> tuple[Any, Drawing]:
    for seeding in (random.seed, np.random.seed, torch.manual_seed):
        seeding(seed + 10 * rank())
    torch.manual_seed(0)
    module = Drawing(loader)
    torch.manual_seed(seed + 10 * rank())
    trainer = make_trainer(strategy_of(strategy), **{"max_epochs": EPOCHS, **options})
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def whole_and_resumed(strategy: str, folder: Path, hooks: list[str], loader: Any = shuffled, **options: Any) -> None:
    """Save in all these hooks of one run; resume from each file, after drawing other random numbers."""
    saving = SavesIn(folder, *hooks)
    _, whole = fit(strategy, loader, callbacks=[saving], **options)
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    if world_size() > 1:
        dist.barrier()
    assert len(whole.seen) == EPOCHS * BATCHES and len(saving.done) > 1
    for name, done in saving.done.items():
        trainer, module = fit(strategy, loader, ckpt_path=folder / name, seed=5, **options)
        same_values(module.seen, whole.seen[done:], name)
        same_values(dict(module.state_dict()), weights, name)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_numbers_and_batches_resume_exactly(run_on, tmp_path, strategy):
    hooks = ["on_train_batch_end", "on_train_epoch_end"]
    run_on(2, whole_and_resumed, strategy=strategy, folder=tmp_path, hooks=hooks)


class RecordsEpochs(Callback):
    def __init__(self) -> None:
        self.epochs: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(["start", trainer.current_epoch, trainer.global_step])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(["end", trainer.current_epoch, trainer.global_step])


def resumes_at_the_end_of_each_epoch(strategy: str, folder: Path) -> None:
    def run(epochs: int, ckpt_path: Any, recording: RecordsEpochs) -> list[Any]:
        saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=BATCHES, enable_version_counter=False)
        options = {"max_steps": epochs * BATCHES, "max_epochs": -1, "limit_val_batches": 0}
        callbacks = [saving, recording]
        _, module = fit(strategy, shuffled, ckpt_path, callbacks=callbacks, enable_checkpointing=True, **options)
        return [module.seen, dict(module.state_dict())]

    whole, parts, result, seen, path = RecordsEpochs(), RecordsEpochs(), [], [], None
    expected = run(3, None, whole)
    for epochs in (1, 2, 3):
        result = run(epochs, path, parts)
        seen += result[0]
        path = folder / f"step={epochs * BATCHES}.ckpt"
    same_values(parts.epochs, whole.epochs, "epochs")
    same_values([seen, result[1]], expected, "resumed")


@pytest.mark.parametrize("strategy", ["zero1", "zero3 sharded"])
def test_a_run_resumed_after_the_last_batch_of_each_epoch_equals_the_uninterrupted_run(run_on, tmp_path, strategy):
    run_on(2, resumes_at_the_end_of_each_epoch, strategy=strategy, folder=tmp_path)


HOOKS = ["on_before_optimizer_step", "on_validation_end", "on_train_batch_end"]


@pytest.mark.exhaustive
def test_resuming_repeats_an_unfinished_step_but_not_a_finished_validation(run_on, tmp_path):
    run_on(2, whole_and_resumed, strategy="zero3", folder=tmp_path, hooks=HOOKS)


@pytest.mark.exhaustive
def test_resuming_recomputes_accumulated_gradients(run_on, tmp_path):
    options = {"hooks": HOOKS, "accumulate_grad_batches": 2, "val_check_interval": 3}
    run_on(2, whole_and_resumed, strategy="zero1", folder=tmp_path, **options)


class SavesInStep(Drawing):
    """Optimizes manually, and saves after the optimizer's step, in an epoch's first and last but one batch."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.folder, self.validated = folder, 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.folder is not None and batch_idx in (0, BATCHES - 2):
            self.trainer.save_checkpoint(self.folder / f"{len(self.seen)}.ckpt")

    def on_validation_epoch_end(self) -> None:
        self.validated += 1


def resumes_within_a_manual_step(strategy: str, folder: Path) -> None:
    def trained(saves: bool, ckpt_path: Any = None) -> SavesInStep:
        random.seed(rank()), np.random.seed(rank()), torch.manual_seed(0)
        module = SavesInStep(folder if saves else None)
        trainer = make_trainer(strategy_of(strategy), max_epochs=EPOCHS, num_sanity_val_steps=0)
        trainer.fit(module, ckpt_path=ckpt_path)
        return module

    whole = trained(saves=True)
    weights = {name: value.clone() for name, value in whole.state_dict().items()}
    for done in (1, BATCHES - 1, BATCHES + 1, 2 * BATCHES - 1):
        module = trained(saves=False, ckpt_path=folder / f"{done}.ckpt")
        same_values(module.seen, whole.seen[done:], str(done))
        same_values(dict(module.state_dict()), weights, str(done))
        assert module.validated == EPOCHS - done // BATCHES, done


def test_a_step_of_manual_optimization_is_not_repeated_and_the_epochs_validation_follows(run_on, tmp_path):
    run_on(2, resumes_within_a_manual_step, strategy="zero3", folder=tmp_path)


WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
LOADERS = {
    # Workers have their own random generators, whose state is unknown without reading the samples again.
    "with workers": partial(shuffled, noise=False, **WORKERS),
    "with workers that stay": partial(shuffled, noise=False, persistent_workers=True, **WORKERS),
    "whose sampler has a generator": weighted,
    # The samples of one loader would draw random numbers between the shuffles of two others.
    "several, the shorter ones begin again": partial(several, "max_size_cycle", noise=False),
    "several, the shorter ones end": partial(several, "max_size", noise=False),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.exhaustive
def test_batches_resume_exactly_from_any_loader_with_samplers(run_on, tmp_path, loader, world_size):
    options = {"hooks": ["on_train_batch_end", "on_train_epoch_end"], "loader": LOADERS[loader]}
    run_on(world_size, whole_and_resumed, strategy="zero2", folder=tmp_path, **options)


class Counted(Numbers):
    """Notes which samples are read."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        return super().__getitem__(index)


class Queue(IterableDataset[Tensor]):
    """An iterable whose items are consumed."""

    def __init__(self, samples: int = 1000) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while len(self.read) < self.samples:
            self.read.append(len(self.read))
            yield torch.tensor([float(self.read[-1]), 0, 0, 0])


def resume_after_two_batches(strategy: str, folder: Path, dataset: Any, batches: Any) -> Any:
    """Return the samples seen and read after resuming, and Lightning's warnings."""
    path, saving = folder / f"{strategy}.ckpt", Callback()
    saving.on_train_batch_end = lambda trainer, *_: trainer.global_step == 2 and trainer.save_checkpoint(path)
    options = {"max_epochs": 1, "limit_train_batches": batches}
    fit(strategy, lambda: DataLoader(dataset(), batch_size=2), callbacks=[saving], **options)
    data = dataset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, module = fit(strategy, lambda: DataLoader(data, batch_size=2), ckpt_path=path, **options)
    warned = [str(warning.message) for warning in caught if "not resumable" in str(warning.message)]
    return [batch[:, 0].tolist() for _, _, batch, *_ in module.seen], data.read, warned


def reads_nothing_twice(folder: Path) -> None:
    samples = 2 * BATCHES * world_size()
    for stage in (1, 3):
        seen, read, warned = resume_after_two_batches(f"zero{stage}", folder, partial(Counted, samples), BATCHES)
        assert len(seen) == BATCHES - 2 and read == [int(index) for batch in seen for index in batch]
        assert not warned


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_of_finished_batches_are_not_read_again(run_on, tmp_path, world_size):
    run_on(world_size, reads_nothing_twice, folder=tmp_path)


def takes_as_much_as_ddp(folder: Path) -> None:
    for samples, batches in ((1000, BATCHES), (2 * BATCHES, 1.0)):  # endless, and of unknown length
        ddp = resume_after_two_batches("ddp", folder, partial(Queue, samples), batches)
        assert ddp[0]
        for stage in (1, 3):
            assert resume_after_two_batches(f"zero{stage}", folder, partial(Queue, samples), batches) == ddp


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_loaders_without_a_sampler_are_left_to_lightning(run_on, tmp_path, world_size):
    run_on(world_size, takes_as_much_as_ddp, folder=tmp_path)


class Rest:
    """Yields what is left of an epoch, and in later epochs all."""

    def __init__(self, items: list[Any], begin: int) -> None:
        self.items, self.begin = items, begin

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        yield from self.items[begin:]


class Consumed(LightningDataModule):
    """Restores its own position, as Megatron's and NeMo's do, in a sampler or in a batch sampler."""

    def __init__(self, in_batches: bool) -> None:
        super().__init__()
        self.in_batches, self.consumed = in_batches, 0

    def train_dataloader(self) -> Any:
        data, samples = Numbers(2 * BATCHES * world_size(), noise=False), 2 * BATCHES
        places = list(range(rank() * samples, (rank() + 1) * samples))
        if not self.in_batches:
            return DataLoader(data, batch_size=2, sampler=Rest(places, self.consumed))
        pairs = [places[at : at + 2] for at in range(0, samples, 2)]
        return DataLoader(data, batch_sampler=Rest(pairs, self.consumed // 2))

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.trainer.global_step % BATCHES * 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


def resumes_at_the_projects_position(folder: Path, in_batches: bool) -> None:
    seen = {}
    for strategy in ("ddp", "zero1", "zero3"):
        path, saving = folder / f"{strategy}.ckpt", Callback()
        saving.on_train_batch_end = lambda trainer, *_, at=path: (
            trainer.global_step == 1 and trainer.save_checkpoint(at)
        )
        for ckpt_path in (None, path):
            torch.manual_seed(0)
            module = Drawing()
            module.train_dataloader = None  # type: ignore[method-assign]
            options = {"max_epochs": 2, "use_distributed_sampler": False, "limit_val_batches": 0}
            trainer = make_trainer(strategy, callbacks=[saving] if ckpt_path is None else [], **options)
            trainer.fit(module, datamodule=Consumed(in_batches), ckpt_path=ckpt_path)
            seen[strategy, ckpt_path is not None] = [each[:3] for each in module.seen]
    for strategy in ("zero1", "zero3"):
        same_values(seen[strategy, False], seen["ddp", False], strategy)
        same_values(seen[strategy, True], seen["ddp", True], f"{strategy}, resumed")
    batches = [batch for _, _, batch in seen["zero3", True]]
    same_values(batches, [batch for _, _, batch in seen["zero3", False]][1:], "nothing skipped or repeated")


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_project_may_restore_its_own_position_in_the_data(run_on, tmp_path, in_batches):
    run_on(2, resumes_at_the_projects_position, folder=tmp_path, in_batches=in_batches)


class WithOneOutside(ManualLearner):
    """Has a second optimizer, for a parameter outside the module, which the project saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), torch.optim.Adam(self.outside, lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inner, outer = self.optimizers()
        for optimizer, loss in ((inner, self.model(*batch)), (outer, self.outside[0].square().sum())):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["outside"] = self.outside[0].detach().clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.outside[0].data.copy_(checkpoint["outside"])


def resumes_beside_the_module(strategy: str, folder: Path) -> None:
    def end(epochs: int, ckpt_path: Any = None) -> Any:
        torch.manual_seed(0)
        module, trainer = WithOneOutside(), make_trainer(strategy_of(strategy), max_epochs=epochs)
        trainer.fit(module, ckpt_path=ckpt_path)
        trainer.save_checkpoint(folder / f"{epochs}.ckpt")
        trainer.strategy.barrier()
        states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        return [module.state_dict(), module.outside[0].detach(), *states]

    whole = end(2)
    end(1)
    same_values(end(2, folder / "1.ckpt"), whole, "resumed")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_a_parameter_outside_the_module_resumes(run_on, tmp_path, strategy):
    run_on(2, resumes_beside_the_module, strategy=strategy, folder=tmp_path)


def resumes_with_new_optimizers(folder: Path) -> None:
    path, weights = folder / "some.ckpt", {}
    trainer, _ = fit("ddp", shuffled, max_epochs=1)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "optimizer_states": []}, path)
    for strategy in ("ddp", "zero1", "zero3"):
        _, module = fit(strategy, partial(shuffled, noise=False), ckpt_path=path, seed=5)
        weights[strategy] = dict(module.state_dict())
    same_values(weights["zero1"], weights["ddp"], "stage 1")
    same_values(weights["zero3"], weights["ddp"], "stage 3")


def test_a_checkpoint_without_optimizer_states_resumes_with_new_ones_as_under_ddp(run_on, tmp_path):
    run_on(1, resumes_with_new_optimizers, folder=tmp_path)
