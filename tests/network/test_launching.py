"""`lightning-zero train` on two machines, launched as docs/how-to/several-machines.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.machines import REPOSITORY, TIMEOUT, on_two

TRAIN = [
    "train",
    "trainer.accelerator=cpu",
    "trainer.num_nodes=2",
    "trainer.devices=2",
    "model=gpt_tiny",
    "debug=short",
]
TRAIN += ["stage=3", "stage.shard_within=node"]

pytestmark = [pytest.mark.timeout(300), pytest.mark.exhaustive]


def torchrun(node: int, local: int) -> tuple[list[str], dict[str, str]]:
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "10.213.7.1:29400",
    ]
    # otherwise machines find these by their host names; both namespaces have that of this host
    options += ["--local-addr", f"10.213.7.{node + 1}", "--rdzv-conf", f"is_host={int(node == 0)}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "lightning_zero", *TRAIN, "trainer=cpu"], {}


def srun(node: int, local: int) -> tuple[list[str], dict[str, str]]:
    """What SLURM's srun sets for each task."""
    environment = {
        "SLURM_JOB_ID": "29500",
        "SLURM_JOB_NAME": "training",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "10.213.7.1,10.213.7.2",
        "SLURM_PROCID": str(2 * node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
    }
    return [sys.executable, "-m", "lightning_zero", *TRAIN, "trainer=slurm"], environment


@pytest.mark.parametrize(("launch", "tasks"), [(torchrun, 1), (srun, 2)], ids=["torchrun", "SLURM"])
def test_each_documented_launch_trains_on_two_machines(launch, tasks, tmp_path: Path):
    with on_two() as machines:
        processes = []
        for node in range(2):
            for local in range(tasks):
                command, environment = launch(node, local)
                inside = machines.inside(node)
                processes.append(
                    subprocess.Popen(
                        [*inside, *command, f"hydra.run.dir={tmp_path}"],
                        env=os.environ | environment | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(REPOSITORY)},
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        cwd=tmp_path,
                    )
                )
        try:
            said = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)[-5000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["processes"] == 4 and results["steps"] == 10
    assert results["validation"]["loss"] < 4.0
