"""Cluster environments and signals, as far as one machine can test them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.trainer import make_trainer
from tests.support.training import same_values
from tests.support.workers import rank
from tests.trainer.cases import Net, behaviours, data, fit, observed, same_as_under_ddp, shared_folder, trained


def train_on_two_nodes(strategy: str) -> Any:
    """`num_nodes=2`: each node's rank has its own part of the data and its own global rank"""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank()), LOCAL_WORLD_SIZE="1")
    trainer, module = fit(strategy, devices=1, num_nodes=2)
    ranks = [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.num_nodes, trainer.world_size]
    assert ranks == [rank(), 0, rank(), 2, 2]
    return observed(trainer, module), ranks, trainer.strategy.distributed_sampler_kwargs


def under_slurm() -> None:
    """Set the environment variables that srun gives each task, in place of torchrun's."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID="1",
        SLURM_JOB_NAME="train",
        SLURM_JOB_NODELIST="127.0.0.1",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=str(rank()),
        SLURM_LOCALID=str(rank()),
        SLURM_NODEID="0",
    )


def train_under_slurm(strategy: str) -> Any:
    """SLURM's environment: ranks are read from it, and nothing is launched"""
    under_slurm()
    trainer, module = fit(strategy)
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert not trainer.strategy.launcher or trainer.strategy.cluster_environment.creates_processes_externally
    return observed(trainer, module), trainer.global_rank


def send_at_batch(number: int, sent: signal.Signals) -> Any:
    def send(trainer: Any, *_: Any) -> None:
        if trainer.global_step == number:
            os.kill(os.getpid(), sent)

    return LambdaCallback(on_train_batch_end=send)


def requeue(strategy: str) -> Any:
    """SLURM's requeue signal: its handler writes a checkpoint, training continues, `ckpt_path="hpc"` resumes"""
    under_slurm()
    folder = shared_folder()
    folder.mkdir(exist_ok=True)
    (Path.cwd() / "scontrol").write_text("#!/bin/sh\n")
    (Path.cwd() / "scontrol").chmod(0o755)
    os.environ["PATH"] = f"{Path.cwd()}:{os.environ['PATH']}"
    plugins = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)]
    callback = send_at_batch(4, signal.SIGUSR2)
    whole = trained(strategy, callbacks=[callback], plugins=plugins, default_root_dir=folder)
    checkpoint = torch.load(folder / "hpc_ckpt_1.ckpt", weights_only=True)
    resumed = trained(strategy, ckpt_path="hpc", plugins=plugins, default_root_dir=folder)
    if strategy != "ddp":  # DDP restarts the epoch's data, and so ends with other weights
        same_values(resumed["weights"], whole["weights"], "the resumed run")
    return whole, checkpoint["state_dict"], checkpoint["optimizer_states"], checkpoint["global_step"], resumed["step"]


def terminate(strategy: str) -> Any:
    """SIGTERM ends training after the batch, with a checkpoint; the process can train again"""
    folder = shared_folder()
    saving = ModelCheckpoint(folder, "terminated", save_on_exception=True)
    module = Net()
    with pytest.raises(SIGTERMException):
        fit(strategy, module, callbacks=[send_at_batch(4, signal.SIGTERM), saving], enable_checkpointing=True)
    files = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.ckpt"))}
    assert files
    states = {name: [file["state_dict"], file["optimizer_states"], file["global_step"]] for name, file in files.items()}
    return states, trained(strategy)


def construct_under_a_trainer(strategy: str) -> Any:
    """A module constructed in `trainer.init_module()`, with `empty_init=True` too"""
    trainer = make_trainer(strategy)
    with trainer.init_module():
        module = Net()
    trainer.fit(module, data())
    results = [observed(trainer, module)]
    trainer = make_trainer(strategy)
    with trainer.init_module(empty_init=True):
        empty = Net()
    empty.load_state_dict(module.state_dict())
    trainer.fit(empty, data())
    return [*results, observed(trainer, empty)]


@pytest.mark.exhaustive(but=1)
@behaviours("The Trainer", train_on_two_nodes, train_under_slurm, requeue, terminate, construct_under_a_trainer)
def test_a_launch_or_a_signal_is_handled_as_under_ddp(run_on, case):
    run_on(2, same_as_under_ddp, case=case)
