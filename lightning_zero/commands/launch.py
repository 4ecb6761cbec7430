"""Launch the ranks of one job on this machine; each rank runs ``lightning_zero.commands.rank``.

Every job has its own processes, also within a sweep, and passes its config to them in a file. Lightning's own launcher
would instead run the command line again, which for a sweep is the whole sweep, and would leave MASTER_PORT, WORLD_SIZE
and a process group behind in the process that starts the next job.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from lightning_zero.commands.check import ConfigError

GRACE = 5.0  # seconds for ranks to end by themselves before they are killed


class RankFailed(Exception):
    """A rank ended with an exit code other than 0, after printing the reason."""


def ranks_exist() -> bool:
    """Whether this process was started as one of several ranks, by torchrun, SLURM or another launcher."""
    from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    return "LOCAL_RANK" in os.environ or TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def this_rank() -> int:
    """The rank that torchrun, SLURM or another launcher gave this process; 0 without a launcher."""
    from lightning.pytorch.utilities import rank_zero_only

    return int(getattr(rank_zero_only, "rank", 0))


def launch(config: DictConfig) -> None:
    """Run one job on ``trainer.devices`` processes of this machine, and return when all have ended.

    When one fails, or on Ctrl-C or SIGTERM, the others are terminated within seconds.

    Raises:
        RankFailed: A rank ended with an exit code other than 0.
    """
    from lightning_zero.engine.comm.process_group import TCPStore

    if config.trainer.num_nodes != 1:
        raise ConfigError(f"trainer.num_nodes={config.trainer.num_nodes}: start one process a rank by torchrun or srun")
    world_size = _device_count(config)
    file = Path(config.folder) / "job.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, file)

    # As with torchrun, this process hosts the store: its port is open before the ranks learn its number, so no other
    # program can take the port in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    environment.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="lightning-zero",  # Lightning then does not launch processes of its own
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
    )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // world_size)))
    package_root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "lightning_zero.commands.rank", str(file.resolve())]

    processes: list[subprocess.Popen[bytes]] = []
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def start(rank: int) -> None:
        process = subprocess.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        processes.append(process)
        threading.Thread(target=lambda: ended.put((rank, process.wait())), daemon=True).start()

    def interrupt(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        for rank in range(world_size):
            start(rank)
        for _ in range(world_size):
            rank, code = ended.get()
            if code:
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                raise RankFailed(f"rank {rank} of {world_size} ended {how}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        signal.signal(signal.SIGTERM, before)


def _device_count(config: DictConfig) -> int:
    if config.trainer.devices != "auto":
        return config.trainer.devices
    if config.trainer.accelerator == "cpu":
        raise ConfigError("trainer.devices=auto: on a CPU, say how many processes")
    from torch.cuda import device_count

    if device_count() == 0:
        raise ConfigError(f"trainer.accelerator={config.trainer.accelerator}: this machine has none that torch can use")
    return device_count()


def _cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
