"""Launch the ranks of one job on this machine.

Every job, even within a sweep, has its own processes and passes its config to them. Lightning's own launcher would
instead run the command line again, which would repeat the entire sweep, and would leave MASTER_PORT, WORLD_SIZE and a
process group behind in the process that starts the next job.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from omegaconf import DictConfig
from torch.cuda import device_count
from torch.multiprocessing import ProcessExitedException, start_processes

from lightning_zero.commands.check import ConfigError, JobFailed
from lightning_zero.commands.showing import optional_stdout
from lightning_zero.engine import process_group
from lightning_zero.strategies.lightning_internals import set_num_threads_if_needed

Job = Callable[[DictConfig], None]
GRACE = 5.0  # seconds to wait for ranks after a failure before SIGTERM is sent, and again before SIGKILL is sent
_TERMINATED = 128 + signal.SIGTERM  # exit code, as in shells


def ranks_exist() -> bool:
    """Whether this process was started as one of several ranks, by torchrun, SLURM or another launcher."""
    return "LOCAL_RANK" in os.environ or TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def launch(job: Job, config: DictConfig) -> None:
    """Run ``job(config)`` in ``trainer.devices`` processes on this machine, and return when all have ended.

    If a process fails, or on Ctrl-C, all remaining processes are terminated within seconds. SIGTERM is forwarded to the
    processes, which have as long as they need to end after their step and to save; a second SIGTERM kills them.

    Raises:
        JobFailed: if a process fails.
        SystemExit: after SIGTERM, with exit code 0 if all processes ended with 0.
    """
    if config.trainer.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes={config.trainer.num_nodes} requires a launcher: start one process per rank "
            "with torchrun or srun"
        )
    world_size = _world_size(config)
    # As with torchrun, this process hosts the store. The port is opened before its number is passed to the
    # ranks, so no other program can take the port.
    store = process_group.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    ranks = start_processes(_run_rank, (job, config, world_size, store.port), world_size, join=False)
    is_asked_to_end = False

    def forward(*_: object) -> None:
        nonlocal is_asked_to_end
        for process in ranks.processes:
            if is_asked_to_end:
                process.kill()
            else:
                process.terminate()
        is_asked_to_end = True

    before = signal.signal(signal.SIGTERM, forward)
    failure = None
    try:
        while not ranks.join(grace_period=GRACE):
            pass
    except ProcessExitedException as error:
        failure = error
    finally:
        for process in ranks.processes:
            process.terminate()
        deadline = time.monotonic() + GRACE
        for process in ranks.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
        signal.signal(signal.SIGTERM, before)
    if is_asked_to_end:  # even after another failure, a sweep must not continue with its next job
        raise SystemExit(0 if failure is None else _TERMINATED)
    if failure is not None:
        how = f"failed with exit code {failure.exit_code}"
        if failure.signal_name:
            how = f"was killed by {failure.signal_name}"
        raise JobFailed(f"rank {failure.error_index} of {world_size} {how}")


def _run_rank(rank: int, job: Job, config: DictConfig, world_size: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="lightning-zero",  # so that Lightning launches no processes itself
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
    )
    set_num_threads_if_needed(world_size)
    sys.stdout = optional_stdout()  # not restored: the process flushes sys.stdout at exit
    try:
        job(config)
    except Exception as error:
        traceback.print_exc()  # printed here, because the launching process reports only one rank's error
        sys.last_value = error  # as the interpreter does, for functions that run at exit
        sys.exit(1)
    if process_group.is_initialized():
        process_group.destroy()


def _world_size(config: DictConfig) -> int:
    if config.trainer.devices != "auto":
        return config.trainer.devices
    if config.trainer.accelerator == "cpu":
        raise ConfigError("trainer.devices=auto cannot be used on a CPU: set it to the number of processes")
    if device_count() == 0:
        raise ConfigError(f"trainer.accelerator={config.trainer.accelerator}: torch finds no such device here")
    return device_count()
