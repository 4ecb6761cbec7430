"""Callbacks that cause a fault in a project's job."""

import os
import signal

from lightning.pytorch import Callback, LightningModule, Trainer


class Killed(Callback):
    """Kill a rank with SIGKILL at the start of a step of the job's first attempt."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if is_first and (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGKILL)
