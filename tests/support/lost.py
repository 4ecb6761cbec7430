"""Ranks that are killed in tests: forked from a pool's worker, so that the pool itself loses no process."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_zero.engine.comm import failures
from tests.support import workers

SECONDS = 20
"""Time limit after a rank has ended or received a signal; a rank still alive then counts as hanging."""


class Ending(NamedTuple):
    """How a rank ended.

    Attributes:
        code: its exit code: 0 if it returned, 1 if it raised, None if it hung.
        said: its return value, its exception's class and text, or its stack if it hung.
        seconds: from the end of the first rank that ended to the end of this rank.
    """

    code: int | None
    said: str
    seconds: float


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(act: Callable[[], Any], size: int = 2) -> list[Ending]:
    """Fork ranks with a Gloo process group, and return how each of them ended, in the order of ranks.

    Arguments:
        act: called on each rank; ``tests.support.rank`` and ``world_size`` return those of the group.
        size: number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, size, act, Path(folder))
            pids.append(pid)
        found: dict[int, tuple[int | None, float]] = {}
        first, begin = None, time.monotonic()
        while len(found) < size and time.monotonic() < (first or begin + SECONDS) + SECONDS:
            for rank, pid in enumerate(pids):
                if rank not in found:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        first = first or time.monotonic()
                        found[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - first
            time.sleep(0.005)
        for rank, pid in enumerate(pids):
            if rank not in found:
                os.kill(pid, signal.SIGUSR2)  # makes it write its stack
                time.sleep(0.2)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                found[rank] = None, SECONDS
        said = [Path(folder, str(rank)).read_text() if Path(folder, str(rank)).exists() else "" for rank in range(size)]
        return [Ending(found[rank][0], said[rank], found[rank][1]) for rank in range(size)]


def _be_rank(rank: int, size: int, act: Callable[[], Any], folder: Path) -> None:
    code = 1
    with open(folder / str(rank), "w") as report:
        faulthandler.register(signal.SIGUSR2, report)
        try:
            workers._rank, workers._world_size = rank, size
            timeout = timedelta(seconds=600)
            file = folder / "port"
            if rank == 0:
                store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
                file.with_suffix(".new").write_text(str(store.port))
                file.with_suffix(".new").rename(file)
            else:
                while not file.exists():
                    time.sleep(0.001)
                store = dist.TCPStore("127.0.0.1", int(file.read_text()), size, is_master=False, timeout=timeout)
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=file.read_text(),
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                GROUP_RANK="0",
                TORCHELASTIC_RUN_ID="tests",
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            report.write(repr(act()))
            code = 0
        except BaseException as error:
            report.write(f"{type(error).__name__}: {error}")
        finally:
            report.flush()
            for each in failures._notices:
                each._end()  # as at the end of a program
            os._exit(code)  # without the cleanup of the worker it was forked from
