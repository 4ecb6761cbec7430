"""Jobs that torchrun restarts after a process was killed end with the numbers of an undisturbed job."""

from __future__ import annotations

import os
import secrets
import subprocess
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_zero.engine.comm.process_group import store_of_attempt
from tests.examples.running import REPOSITORY
from tests.support import rank
from tests.support.selection import one_at_a_time
from tests.support.training import same_tensors
from tests.support.warm import warm_python

JOB = """
    import os, signal, sys, time
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader
    from lightning_zero import ZeroStrategy

    stage, killed, attempts = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Kill(Callback):
        def on_train_batch_start(self, trainer, *_):
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt < attempts and trainer.global_step == 2 + attempt:
                if trainer.global_rank == killed:
                    print("killed at", time.time(), flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)

    seed_everything(0)
    print("began at", time.time(), flush=True)
    saver = ModelCheckpoint(".", every_n_train_steps=1, save_last=True)
    strategy, callbacks = ZeroStrategy(stage=stage), [saver, Kill()]
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=6, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(torch.randn(64, 16), batch_size=4), ckpt_path="last")
    print("ended after step", trainer.global_step, flush=True)
"""


def run(folder: Path, stage: int, killed: int = 0, attempts: int = 0, restarts: int = 3) -> subprocess.CompletedProcess:
    folder.mkdir()
    (folder / "job.py").write_text(textwrap.dedent(JOB))
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "job.py", str(stage), str(killed), str(attempts)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def times(output: str, what: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith(what)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "killed"), one_at_a_time([3, 1, 2], [1, 0]))
def test_a_job_continues_after_a_rank_was_killed_in_each_of_two_attempts(stage, killed, tmp_path):
    expected = run(tmp_path / "whole", stage)
    assert expected.returncode == 0, expected.stderr
    found = run(tmp_path / "killed", stage, killed, attempts=2)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("ended after step 6") == 2
    weights = [torch.load(tmp_path / name / "last.ckpt")["state_dict"] for name in ("whole", "killed")]
    same_tensors(*weights, bound=0)
    # torchrun would wait half a minute for the end of the other rank
    ends, beginnings = times(found.stdout, "killed at"), sorted(times(found.stdout, "began at"))
    assert len(ends) == 2 and len(beginnings) == 6
    for end, beginning in zip(ends, beginnings[2::2]):
        assert beginning - end < 10


@pytest.mark.exhaustive
def test_a_job_without_restarts_left_ends_with_an_error(tmp_path):
    began = time.monotonic()
    found = run(tmp_path / "job", stage=3, killed=1, attempts=9, restarts=1)
    assert found.returncode != 0 and found.stdout.count("killed at") == 2
    assert time.monotonic() - began < 60


def attempt(seconds: float = 30.0) -> str:
    """Join the group of an attempt, and return a text that only its ranks share."""
    timeout = timedelta(seconds=seconds)
    store = store_of_attempt("127.0.0.1", int(os.environ["MASTER_PORT"]), rank(), 2, timeout)
    store.set(f"said by {rank()}", secrets.token_hex(8))
    store.wait([f"said by {1 - rank()}"], timeout)
    return store.get("said by 0").decode() + store.get("said by 1").decode()


def attempts_of_which_some_stop() -> list[str]:
    """An attempt's processes may be killed before they have joined it, and may start in any order."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    joined = [attempt(), attempt()]
    for stopped in (0, 1):
        if rank() != stopped:  # the other rank of this attempt does not start
            with pytest.raises(RuntimeError):
                attempt(seconds=0.5)
        dist.barrier()
        for late in (0, 1):
            if rank() == late:
                time.sleep(0.2)
            joined.append(attempt())
    return joined


def test_ranks_join_the_ranks_of_their_own_attempt_although_all_attempts_share_a_store(run_on):
    first, second = run_on(2, attempts_of_which_some_stop)
    assert first == second and len(set(first)) == 6
