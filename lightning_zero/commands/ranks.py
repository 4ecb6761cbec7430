"""Launch the ranks of one job on this machine, with torchrun's agent.

Every job, even within a sweep, has its own processes and passes its config to them. Lightning's own launcher would
instead run the command line again, which would repeat the entire sweep, and would leave MASTER_PORT, WORLD_SIZE and a
process group behind in the process that starts the next job.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from omegaconf import DictConfig
from torch.cuda import device_count
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_zero.commands.check import ConfigError, JobFailed
from lightning_zero.commands.showing import optional_stdout
from lightning_zero.engine import process_group
from lightning_zero.strategies.lightning_internals import set_num_threads_if_needed


def ranks_exist() -> bool:
    """Whether this process was started as one of several ranks, by torchrun, SLURM or another launcher."""
    return "LOCAL_RANK" in os.environ or TorchElasticEnvironment.detect() or SLURMEnvironment.detect()


def launch(job: Callable[[DictConfig], None], config: DictConfig) -> None:
    """Run ``job(config)`` in ``trainer.devices`` processes on this machine, and return when all have ended.

    SIGTERM and Ctrl-C are forwarded to the processes; if one fails, the others receive SIGTERM. They have as long as
    under torchrun to end after their step and to save: 30 seconds, or ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``.

    Raises:
        JobFailed: if a process fails.
        SystemExit: after a signal.
    """
    if config.trainer.num_nodes != 1:
        raise ConfigError(
            f"trainer.num_nodes={config.trainer.num_nodes} requires a launcher: start one process per rank "
            "with torchrun or srun"
        )
    world_size = config.trainer.devices
    if world_size == "auto":
        world_size = device_count() or 1  # on a CPU, as in Lightning
    with tempfile.TemporaryDirectory() as logs:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id="lightning-zero",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGTERM,SIGINT",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            elastic_launch(settings, _run_rank)(job, config)
        except SignalException as error:  # a sweep must not continue with its next job
            raise SystemExit(128 + error.sigval) from None  # as in shells
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            is_killed = failure.exitcode < 0
            how = f"was killed by {failure.signal_name()}" if is_killed else f"failed with exit code {failure.exitcode}"
            raise JobFailed(f"rank {rank} of {world_size} {how}") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _run_rank(job: Callable[[DictConfig], None], config: DictConfig) -> None:
    set_num_threads_if_needed(int(os.environ["WORLD_SIZE"]))
    sys.stdout = optional_stdout()  # not restored: the process flushes sys.stdout at exit
    try:
        job(config)
    except Exception as error:
        traceback.print_exc()  # printed here, because the launching process reports only one rank's error
        sys.last_value = error  # as the interpreter does, for functions that run at exit
        sys.exit(1)
    if process_group.is_initialized():
        process_group.destroy()
