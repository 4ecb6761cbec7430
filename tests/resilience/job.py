"""A job as torchrun or `lightning-zero launch` starts it, with faults: `python job.py '{"stage": 3, ...}'`.

Every process prints a line at the start of each batch, so that a test sees which steps were repeated.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero import ResilienceConfig, ZeroStrategy
from lightning_zero.checkpoint import slots

OPTIONS = {
    "stage": 3,
    "strategy": {},
    "resilience": {},
    "faults": [],  # of {"attempt", "step", "ranks", "where"}
    "epochs": 3,
    "pause": 0.0,  # seconds in each step, for faults from outside
    "precision": "32-true",
    "accumulate": 1,
    "batch": None,  # samples of a rank's batch; null: 16 of all ranks
    "is_plain": False,  # without dropout and batch statistics, so that the results do not depend on the ranks
}


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Net(LightningModule):
    """Has buffers, dropout, tied weights, a scheduler, and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(48, 48) for _ in range(6))
        self.norm, self.dropout = torch.nn.BatchNorm1d(48), torch.nn.Dropout(0.1)
        self.layers[5].weight = self.layers[0].weight

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
        if loss.requires_grad:
            loss.register_hook(lambda _: act("backward"))
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("loss", self(x).float().square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        act("update")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        act("end")


class Note(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        print(f"attempt {attempt()} rank {trainer.global_rank} begins step {trainer.global_step}", flush=True)
        time.sleep(options["pause"])
        act("start")


def act(where: str) -> None:
    """Do to this process what a fault says, if one is due here."""
    step = trainer.global_step - (where == "end")
    for fault in options["faults"]:
        if (fault["attempt"], fault["step"], fault["where"]) == (attempt(), step, where):
            if trainer.global_rank in fault["ranks"] and trainer.training:
                print(f"rank {trainer.global_rank} meets {fault['what']} at {time.time()}", flush=True)
                WHAT[fault["what"]]()


def loop() -> None:
    while True:
        time.sleep(0.01)


def fail() -> None:
    raise ValueError("a mistake of the project")


WHAT = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": loop,
    "fail": fail,
}


def in_copies() -> None:
    """Let faults happen in the middle of a copy, and between its values and its header."""
    copied, described = slots.SlotWriter._copied, slots.SlotWriter._described

    def copying(self, entries, positions):
        half = len(entries) // 2
        copied(self, entries[:half], positions)
        act("copy")
        return copied(self, entries, positions)

    def describing(self, *arguments):
        act("commit")
        return described(self, *arguments)

    slots.SlotWriter._copied, slots.SlotWriter._described = copying, describing


if __name__ == "__main__":
    options = OPTIONS | json.loads(sys.argv[1])
    in_copies()
    seed_everything(0)
    trainer = Trainer(
        strategy=ZeroStrategy(
            stage=options["stage"], resilience=ResilienceConfig(**options["resilience"]), **options["strategy"]
        ),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        precision=options["precision"],
        max_epochs=options["epochs"],
        accumulate_grad_batches=options["accumulate"],
        callbacks=[Note()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    net, data = Net(), TensorDataset(torch.randn(96, 48))
    batch = options["batch"] or 16 // trainer.world_size
    trainer.fit(net, DataLoader(data, batch, shuffle=True), DataLoader(data, batch))
    if trainer.global_rank == 0:
        torch.save(net.state_dict(), options["out"])
    print("ended after step", trainer.global_step, flush=True)
