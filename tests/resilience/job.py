"""A job as torchrun starts it, with faults: `python job.py '{"stage": 3, ...}'`.

Every process prints a line at the start of each batch, so that a test can see which steps were repeated.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from lightning_zero import ResilienceConfig, ZeroStrategy, shard_of
from lightning_zero.checkpoint import saving
from lightning_zero.checkpoint.commit import Destination
from lightning_zero.monitoring import FindNonFinite

OPTIONS = {
    "stage": 3,
    "strategy": {},
    "resilience": {},
    "faults": [],  # as made by jobs.fault
    "fits": 1,  # one after the other, each with a Trainer of its own
    "tunes": False,  # lr_find before the first fit
    "tunes_within": False,  # each fit begins with lr_find
    "logs": False,  # with a logger
    "finds": False,  # with FindNonFinite
    "saves": 0,  # ModelCheckpoint saves after every n steps
    "saves_weights": 0,  # another one saves only weights after every n steps
    "has_class": False,  # checkpoints contain an object of a class of the project
    "validates": None,  # every n batches; by default at the end of an epoch
    "tests": False,  # after the fit; an error there ends the process as Hydra ends it
    "saves_at_the_end": False,  # a checkpoint after the fit
    "epochs": 3,
    "pause": 0.0,  # seconds in each step, for faults from outside
    "precision": "32-true",
    "accumulate": 1,
    "schedule": None,  # micro-batches a step by the epoch from which on they apply
    "ckpt_path": None,
    "root": None,  # the Trainer's default_root_dir
    "freezes": False,  # the start of an epoch freezes a layer, or puts a module into evaluation mode
    "draws": False,  # a sampler draws from a generator of its own
    "averages": False,  # StochasticWeightAveraging from the second epoch on
    "unfreezes": False,  # a layer is trained from the second epoch on, in a group of its own
    "stops": False,  # EarlyStopping ends the fit
    "has_plugin": False,  # that writes and reads checkpoints
    "teaches": False,  # a frozen layer follows another layer
    "batch": None,  # samples of a rank's batch; null: 16 of all ranks
    "is_plain": False,  # without dropout and batch statistics, so that the results do not depend on the ranks
}


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@dataclass
class Settings:
    width: int = 48


class Net(LightningModule):
    """Has buffers, dropout, tied weights, a scheduler, and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(6))
        self.norm, self.dropout = torch.nn.BatchNorm1d(48), torch.nn.Dropout(0.1)
        self.layers[5].weight = self.layers[0].weight
        self.lr = 1e-2
        if options["has_class"]:
            self.hparams.settings = Settings()
            self._set_hparams(self.hparams)
        self.layers[3].requires_grad_(not options["teaches"])

    def on_train_epoch_start(self):
        if options["freezes"]:
            self.layers[1].requires_grad_(self.current_epoch % 2 == 0)
            self.dropout.train(self.current_epoch % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + x
            if number == 2:
                act("forward")
        return x if options["is_plain"] else self.norm(self.dropout(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        out = self(x)
        loss = out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()
        loss = loss * torch.nan if act("loss") == "nan" else loss
        if loss.requires_grad:
            loss.register_hook(lambda _: act("backward"))
        return loss

    def on_validation_epoch_start(self):
        if trainer.global_rank == 0 and not trainer.sanity_checking:
            print(f"attempt {attempt()} validates after step {trainer.global_step}", flush=True)
        act("validation")

    def test_step(self, batch, batch_idx):
        act("test")

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        out = self(x)
        self.log("loss", out.to(torch.promote_types(out.dtype, torch.float32)).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        act("update")

    def on_load_checkpoint(self, checkpoint):
        act("load")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if options["teaches"]:
            with torch.no_grad():
                self.layers[3].weight.lerp_(self.layers[4].weight, 0.5)
        act("end")


class Note(Callback):
    def on_train_start(self, trainer, module):
        act("fit")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        print(f"attempt {attempt()} rank {trainer.global_rank} begins step {trainer.global_step}", flush=True)
        time.sleep(options["pause"])
        act("start" if batch_idx % options["accumulate"] == 0 else "micro-batch")


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.layers[4])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[4], optimizer)


class OwnFiles(TorchCheckpointIO):
    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return torch.load(path, map_location)  # fails for a folder


class Schedule(GradientAccumulationScheduler):
    """A project's own subclass."""


NOT_IN_TRAINING = "validation", "test", "last checkpoint", "end of the script", "copy", "written", "commit"
"""Moments that need not be in a training batch; a background save may go on during validation."""
LATER = "forward", "loss", "backward", "update"
"""Moments at which a copy is usually complete: faults wait for it, so that the step to continue from is certain."""


def wait_for_the_copy() -> None:
    restarts = trainer.strategy._restarts
    for save in restarts._saver._jobs if restarts is not None else ():
        save.exception()


def act(where: str) -> str | None:
    """Apply a fault to this process, if one is due here."""
    step = trainer.global_step - (where == "end")
    for fault in options["faults"]:
        if (fault["attempt"], fault["fit"], fault["where"]) == (attempt(), fit, where):
            is_due = fault["step"] <= step <= fault["until"]
            if is_due and trainer.global_rank in fault["ranks"] and (trainer.training or where in NOT_IN_TRAINING):
                if where in LATER:
                    wait_for_the_copy()
                print(f"rank {trainer.global_rank} meets {fault['what']} at {time.time()}", flush=True)
                return WHAT[fault["what"]]()
    return None


def loop() -> None:
    while True:
        time.sleep(0.01)


def fail() -> None:
    raise ValueError("a mistake of the project")


def cut() -> None:
    """Cut all connections of this process over TCP."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)


def spoil() -> None:
    """Spoil one of this rank's master weights."""
    shard = next(shard for parameter in net.parameters() if len(shard := shard_of(parameter)))
    shard[0] = torch.nan


def find_no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WHAT = {
    "find no room": find_no_room,
    "save to a URL": lambda: trainer.save_checkpoint(f"file://{os.getcwd()}/at a URL.ckpt"),
    "spoil": spoil,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": loop,
    "fail": fail,
    "cut": cut,
    "nan": lambda: "nan",
    "exit with 3": lambda: sys.exit(3),
}


def in_saves() -> None:
    """Let faults happen in a save: before each value, when a rank has written its file, and when rank 0 commits."""
    piece, write, put_in_place = saving.Entry.piece, saving._write, Destination.put_in_place

    def copied_piece(*arguments):
        act("copy")
        return piece(*arguments)

    def writing(*arguments):
        written = write(*arguments)
        act("written")
        return written

    def committing(self):
        act("commit")
        return put_in_place(self)

    saving.Entry.piece, saving._write, Destination.put_in_place = copied_piece, writing, committing


def new_trainer() -> Trainer:
    callbacks: list[Callback] = [Note()]
    callbacks += [FindNonFinite()] if options["finds"] else []
    if options["saves"]:
        callbacks += [ModelCheckpoint("checkpoints", every_n_train_steps=options["saves"], save_top_k=-1)]
    if options["saves_weights"]:
        every = options["saves_weights"]
        callbacks += [ModelCheckpoint("weights", every_n_train_steps=every, save_weights_only=True, save_top_k=-1)]
    callbacks += [LearningRateFinder(num_training_steps=4)] if options["tunes_within"] else []
    if options["averages"]:
        callbacks += [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)]
    callbacks += [Unfreeze()] if options["unfreezes"] else []
    if options["stops"]:
        callbacks += [EarlyStopping("loss", patience=1, min_delta=100.0)]
    if options["schedule"]:
        callbacks += [Schedule({int(epoch): number for epoch, number in options["schedule"].items()})]
    return Trainer(
        strategy=ZeroStrategy(stage=options["stage"], resilience=resilience, **options["strategy"]),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        precision=options["precision"],
        max_epochs=options["epochs"],
        accumulate_grad_batches=options["accumulate"],
        callbacks=callbacks,
        logger=CSVLogger("logs") if options["logs"] else False,
        enable_checkpointing=bool(options["saves"]),
        plugins=[OwnFiles()] if options["has_plugin"] else None,
        val_check_interval=options["validates"],
        default_root_dir=options["root"],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def new_loaders() -> tuple[DataLoader, DataLoader]:
    """Loaders of random data, different at each call."""
    data = TensorDataset(torch.randn(96, 48))
    batch = options["batch"] or 16 // trainer.world_size
    sampler = None
    if options["draws"]:
        sampler = WeightedRandomSampler(torch.ones(96), 96, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, batch, shuffle=sampler is None, sampler=sampler), DataLoader(data, batch)


if __name__ == "__main__":
    options = OPTIONS | json.loads(sys.argv[1])
    print(f"attempt {attempt()} is process {os.getpid()}", flush=True)
    resilience = None if options["resilience"] is None else ResilienceConfig(**options["resilience"])
    in_saves()
    seed_everything(0)
    net, fit, trainer = Net(), -1, new_trainer()
    if options["tunes"]:
        Tuner(trainer).lr_find(net, *new_loaders(), num_training=8)
        print("found the learning rate", net.lr, flush=True)
    for fit in range(options["fits"]):
        trainer = new_trainer() if fit else trainer
        print(f"attempt {attempt()} begins fit {fit} on rank {trainer.global_rank}", flush=True)
        more = {"weights_only": False} if options["has_class"] else {}
        trainer.fit(net, *new_loaders(), ckpt_path=options["ckpt_path"], **more)
    logged = dict(trainer.callback_metrics)  # a test forgets them
    if options["tests"]:
        try:
            trainer.test(net, new_loaders()[1], verbose=False)
        except ValueError as error:
            print(error, flush=True)
            sys.exit(1)
    if options["saves_at_the_end"]:
        if trainer.global_rank == 0:
            act("last checkpoint")
        trainer.save_checkpoint("last.ckpt")
    if trainer.global_rank == 0:
        torch.save(net.state_dict() | logged, options["out"])
    act("end of the script")
    print("ended after step", trainer.global_step, flush=True)
    print("threads at the end:", *sorted(thread.name for thread in threading.enumerate()), flush=True)
