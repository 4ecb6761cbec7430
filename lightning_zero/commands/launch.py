"""`lightning-zero launch`: torchrun with fast restarts of processes, and a timeout for processes that hang.

Processes are forked from a server that has imported torch and Lightning, so a restart after a failure does
not spend seconds on imports. Torchelastic provides rendezvous, restarts and elasticity.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress

from lightning_zero.commands.fork_server import end_with_parent
from lightning_zero.commands.parsing import Parser
from lightning_zero.io import beats

_PRELOADED = [
    "lightning_zero.commands.fork_server",
    "numpy",
    "torch",
    "torch.distributed",
    "torchmetrics",
    "lightning.pytorch",
    "lightning_zero.strategies.trainer",
]
_PATIENCE = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
"""Rendezvous settings (times in seconds). With torchrun's defaults, a lost machine is noticed after 15 s, and a
replacement is awaited for another 30 s."""
_GRACE = 2.0  # seconds for a hanging process to write its stack


def parser() -> Parser:
    made = Parser(
        "lightning-zero launch",
        description=(
            "Start the processes of a script, and restart all of them when one fails or is killed. With "
            "ZeroStrategy(resilience='memory'), training continues in the step that was interrupted."
        ),
        epilog="Example: lightning-zero launch --nproc-per-node 2 train.py --lr 1e-3",
    )
    made.add_argument(
        "--nproc-per-node", default="gpu", metavar="N", help="number of processes on this machine; gpu: one per GPU"
    )
    made.add_argument("--max-restarts", type=int, default=3, metavar="N", help="maximum number of restarts")
    made.add_argument(
        "--hang-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="kill hanging processes when no process has begun a step for this long; 0: never",
    )
    made.add_argument(
        "--nnodes", default="1", metavar="N|MIN:MAX", help="number of machines: fixed, or between MIN and MAX"
    )
    made.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="address at which the machines rendezvous")
    made.add_argument("--rdzv-id", metavar="NAME", help="name of the job; the same name continues the job later")
    made.add_argument("--log-dir", metavar="FOLDER", help="folder for the processes' output (default: the terminal)")
    made.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    made.add_argument("script", help="Python script that each process runs; with -m, the name of a module")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return made


def main(arguments: list[str]) -> int:
    made = parser()
    given = made.parse_args(arguments)
    if given.nnodes != "1" and not (given.rdzv_endpoint and given.rdzv_id):
        made.error(f"--nnodes {given.nnodes} requires --rdzv-endpoint HOST:PORT and --rdzv-id NAME on all machines")
    if not given.module and not os.path.isfile(given.script):
        made.error(f"there is no file {given.script}")
    from lightning_zero.engine.comm.agent import number_of_gpus, run_processes  # here, because it imports torch

    ranks = number_of_gpus() if given.nproc_per_node == "gpu" else given.nproc_per_node
    if not (str(ranks).isdecimal() and int(ranks)):
        made.error(
            f"--nproc-per-node {given.nproc_per_node}: torch finds no GPU here; write a number"
            if given.nproc_per_node == "gpu"
            else f"--nproc-per-node {given.nproc_per_node} must be a number of at least 1, or gpu"
        )
    options = {
        "nproc-per-node": ranks,
        "nnodes": given.nnodes,
        "max-restarts": given.max_restarts,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": given.rdzv_endpoint or "localhost:0",
        "rdzv-id": given.rdzv_id or uuid.uuid4().hex,
        "rdzv-conf": _PATIENCE,
        "start-method": "forkserver",
        **({"log-dir": given.log_dir, "redirects": "3"} if given.log_dir else {}),
    }
    if given.nnodes != "1":  # without this variable, a machine that joins later waits forever (torch 2.13)
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    multiprocessing.set_forkserver_preload(_PRELOADED)
    folder = tempfile.mkdtemp(prefix="lightning_zero-beats-")
    os.environ[beats.FOLDER] = folder
    if given.hang_timeout:
        is_alone = given.nnodes == "1"
        threading.Thread(target=_end_hangs, args=(folder, given.hang_timeout, is_alone), daemon=True).start()
    try:
        failure = run_processes(options, run_script, given.script, given.module, *given.arguments)
    except ValueError as error:
        made.error(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failure is not None:
        print(failure, file=sys.stderr)
    return int(failure is not None)


def run_script(script: str, is_module: bool, *arguments: str) -> None:
    """Run a script in this forked process as ``python script`` would."""
    end_with_parent()  # the parent is the fork server, which ends with the launcher
    faulthandler.enable()
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:  # torchelastic expects the function to return, not to exit
        if end.code not in (None, 0):
            raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.last_value = error  # as the interpreter does, for functions that run at exit
        sys.excepthook(type(error), error, error.__traceback__)
        # Torch would write the error to a file that the launcher reads. If this process exits because another one has
        # died, the file may be incomplete when the launcher reads it, and the launcher would fail (torch 2.13).
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # multiprocessing's processes do not run atexit functions


def _end_hangs(folder: str, timeout: float, is_alone: bool) -> None:
    """When no process has begun a step for ``timeout`` seconds, kill the processes that are not waiting for others.

    If all processes on this machine are waiting, the hanging process is on another machine, whose launcher kills it. If
    there is no other machine, or no step has begun after twice the timeout, the processes are waiting for each other,
    and all processes on this machine are killed.
    """
    before: dict[int, int] = {}
    since = time.monotonic()
    while True:
        time.sleep(min(1.0, timeout / 4))
        with suppress(OSError):
            noted = {each.process: each for each in beats.read_all(folder)}
            steps = {process: each.steps for process, each in noted.items()}
            if steps != before or not steps or min(steps.values()) < 1:
                before, since = steps, time.monotonic()
            elif time.monotonic() - since > timeout:
                all_wait = all(each.is_waiting for each in noted.values())
                if is_alone or not all_wait or time.monotonic() - since > 2 * timeout:
                    _end_those_that_hang(list(noted.values()), timeout)
                    before = {}


def _end_those_that_hang(noted: list[beats.Beats], timeout: float) -> None:
    hanging = [each for each in noted if not each.is_waiting] or noted
    for each in hanging:
        waiting = [str(other.rank) for other in noted if other not in hanging]
        others = f", and rank(s) {', '.join(waiting)} are waiting for it" if waiting else ""
        print(
            f"lightning-zero launch: no process has begun a step for {timeout:g} s. Rank {each.rank} (process "
            f"{each.process}) is hanging{others}. Killing it; its stack follows, unless it is suspended (SIGSTOP).",
            file=sys.stderr,
            flush=True,
        )
        with suppress(ProcessLookupError):
            os.kill(each.process, signal.SIGABRT)  # makes faulthandler write the stacks
    time.sleep(_GRACE)
    for each in hanging:
        with suppress(ProcessLookupError):
            os.kill(each.process, signal.SIGKILL)
