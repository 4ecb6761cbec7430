"""A plan's peak equals the growth of resident memory of real CPU ranks whose allocator returns freed memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from benchmarks.common import RETURN_MEMORY_AT_ONCE
from tests.planning.projects import Net
from tests.support.ports import reserved_port
from tests.support.trainer import make_trainer

ROOT = Path(__file__).resolve().parents[2]
RANKS, WIDTH, DEPTH = 2, 384, 24  # 39 M parameters: a unit is 2 % of the held memory
KINDS = {"VmHWM", "VmRSS", "RssFile", "RssShmem"}


def memory() -> dict[str, int]:
    """Resident memory of this process in bytes: now, at its peak, and the parts that are of files or shared."""
    lines = map(str.split, Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: 1024 * int(line[1]) for line in lines if line[0][:-1] in KINDS}


class PeakOfSecondStep(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now

    def on_train_batch_end(self, *_: Any) -> None:
        self.found = memory()


def train(stage: int, width: int, depth: int) -> dict[str, int]:
    peak = PeakOfSecondStep()
    trainer = make_trainer(f"zero{stage}", callbacks=[peak], devices=RANKS, max_steps=2)
    torch.manual_seed(0)
    trainer.fit(Net(width, depth), DataLoader(torch.randn(2 * 4 * RANKS, 16, width), batch_size=4))
    return peak.found


def worker(stage: int) -> None:
    torch.set_num_threads(1)
    train(stage, 32, 2)  # a plan does not include what libraries allocate once
    gc.collect()
    before = memory()
    after = train(stage, WIDTH, DEPTH)
    assert after["RssShmem"] - before["RssShmem"] < 2**20, "ranks read each other's memory: nothing is counted twice"
    print(after["VmHWM"] - before["VmRSS"] - (after["RssFile"] - before["RssFile"]), flush=True)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count of resident pages")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.exhaustive
def test_the_planned_peak_is_within_five_percent_of_the_growth_of_resident_memory(stage: int) -> None:
    with reserved_port() as port:
        common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(RANKS), "NODE_RANK": "0"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **RETURN_MEMORY_AT_ONCE}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.planning.test_resident_memory", str(stage)],
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        grown = [json.loads(rank.communicate(timeout=170)[0].splitlines()[-1]) for rank in ranks]

    from lightning_zero.planning.fake_run import fake_run

    batch = torch.randn(4, 16, WIDTH)
    plan = fake_run(partial(Net, WIDTH, DEPTH), batch, ranks=RANKS, stage=stage, transport="shared memory")
    for growth in grown:
        assert growth == pytest.approx(plan.total_bytes, rel=0.05), plan.peak_bytes


if __name__ == "__main__":
    worker(int(sys.argv[1]))
