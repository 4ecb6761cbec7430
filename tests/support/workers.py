"""Pools of worker processes: one function runs on every rank of a group; failures and hangs are returned as text."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

# Imported by every case anyway. The fork server imports them once; the imports start no threads of Python or torch.
PRELOAD = ["torch", "torch.distributed", "torch.nn.parallel", "numpy", "pytest", "torchmetrics", "lightning.pytorch"]
MOST_THREADS = 60  # of a process, or it is replaced: a Gloo group that is not freed has three, one of which polls
START_TIMEOUT = 120  # seconds: the first pool waits for the fork server's imports
GRACE = 3  # seconds for the other ranks to end by themselves after one has failed
LONGEST_TEXT = 12_000  # characters of one rank's output, or of one value, in a failure's text


class CaseFailed(AssertionError):
    """At least one rank raised, died or did not end in time; the message says what happened on each rank."""


@dataclass(frozen=True)
class WorkerKind:
    """Setup of a pool's workers.

    Arguments:
        backend: of their process group, as for `torch.distributed.init_process_group`.
        prepare: called in each worker before it joins the group; pickled.
    """

    backend: str = "gloo"
    prepare: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    """A function by name, so that the worker finds it under whatever name the test module was imported."""

    module: str
    name: str
    kwargs: dict[str, Any]
    seed: int
    path: list[str]
    merges_units: bool


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: str | None = None
    healthy: bool = True  # False: the case destroyed the process group; the pool cannot run another


# ---------------------------------------------------------------------------------------------------- in the worker

_rank, _world_size = 0, 1


def rank() -> int:
    """The rank of this worker; 0 outside of a pool."""
    return _rank


def world_size() -> int:
    """The number of workers that run this case; 1 outside of a pool."""
    return _world_size


def _work(rank: int, world_size: int, conn: Connection, folder: str, path: list[str], kind: WorkerKind) -> None:
    """Main function of a worker: join the group, then run cases until the other end of `conn` is closed."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size
    _redirect_output(Path(folder) / "output")
    stacks = open(Path(folder) / "stacks", "w")  # noqa: SIM115  (must stay open: the signal handler writes to it)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal = _without_ours(signal.signal)
    sys.path[:] = path

    import torch

    torch.set_num_threads(1)
    if kind.prepare is not None:
        kind.prepare()
    if world_size > 1:
        _join_group(rank, world_size, conn, kind.backend)
    gc.collect()
    gc.freeze()  # imported objects are permanent: the collection after each case then skips them
    conn.send_bytes(pickle.dumps(Outcome()))

    work = Path(folder) / "work"
    while True:
        try:
            message = conn.recv_bytes()
        except EOFError:
            os._exit(0)  # skips destructors: other ranks may have closed their ends of the group already
        with _clean_surroundings(work):
            outcome = _run(pickle.loads(message))
        try:
            answer = pickle.dumps(outcome)
        except Exception as error:
            answer = pickle.dumps(Outcome(error=f"the result cannot be pickled: {error!r}"))
        conn.send_bytes(answer)


def _redirect_output(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Python's standard streams may have been replaced in the fork server, or be closed.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _without_ours(register: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `signal.signal` to ignore the signal that shows stacks.

    A Trainer restores each handler that `signal.getsignal` returned, but that function does not know faulthandler's.
    """
    return lambda number, handler: signal.getsignal(number) if number == signal.SIGUSR1 else register(number, handler)


def _join_group(rank: int, world_size: int, conn: Connection, backend: str) -> None:
    """Form a group on a port chosen by the system, and set the environment as torchrun does, for Lightning."""
    import torch.distributed as dist

    timeout = timedelta(seconds=START_TIMEOUT)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        conn.send_bytes(pickle.dumps(store.port))
        port = store.port
    else:
        port = pickle.loads(conn.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _run(case: Case) -> Outcome:
    import numpy
    import torch
    import torch.distributed as dist

    torch.manual_seed(case.seed)
    numpy.random.seed(case.seed)
    random.seed(case.seed)
    try:
        sys.path[:] = case.path
        units = importlib.import_module("lightning_zero.engine.plan.units")
        units.UNIT_NUMEL = 2**20 if case.merges_units else 0
        value = getattr(importlib.import_module(case.module), case.name)(**case.kwargs)
        if _world_size == 1:
            return Outcome(value, healthy=not dist.is_initialized())
        if not dist.is_initialized():
            return Outcome(value, healthy=False)
        failures = sys.modules.get("lightning_zero.engine.comm.failures")
        if failures is not None and failures.failure() is not None:  # an expected failure, which has ended the group
            failures.renew(timeout=timedelta(seconds=START_TIMEOUT))
        # Ranks that are out of step (one collective more on one rank) are detected in this case, not in the next.
        dist.barrier()
        _destroy_groups()
        return Outcome(value, healthy=_threads() < MOST_THREADS)
    except BaseException as error:
        return Outcome(error=_describe(error))


def _threads() -> int:
    """The number of this process's threads, also those of C++; 0 where the system does not say."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.exists() else 0


def _destroy_groups() -> None:
    """Destroy all groups but the default one, as of device meshes: each has a thread that wakes up every 10 ms."""
    import torch.distributed as dist

    from lightning_zero.engine import process_group

    if len(process_group.all_groups()) > 1:
        gc.collect()  # engines destroy their own groups
    others = [group for group in process_group.all_groups() if not process_group.is_default(group)]
    for group in others:
        dist.destroy_process_group(group)
    if others:
        process_group.forget_meshes()


def _describe(error: BaseException) -> str:
    """The traceback and, since pytest does not rewrite assertions here, the variables of the failing frame."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frames = [f for f, _ in traceback.walk_tb(error.__traceback__) if f.f_globals["__name__"].startswith("tests")]
        for name, value in frames[-1].f_locals.items() if frames else ():
            shown = repr(value)
            text += f"    {name} = {shown if len(shown) <= 400 else shown[:400] + ' ...'}\n"
    return text


@contextlib.contextmanager
def _clean_surroundings(work: Path) -> Iterator[None]:
    """Context: an empty working folder; afterwards environment and torch's global switches are restored."""
    import torch

    environment, folder = dict(os.environ), os.getcwd()
    work.mkdir()
    os.chdir(work)
    try:
        yield
    finally:
        os.chdir(folder)
        shutil.rmtree(work)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        gc.enable()
        gc.collect()
        gc.freeze()  # what is left, such as newly imported modules, stays for good


# ----------------------------------------------------------------------------------------------- in the test process


class WorkerPools:
    """One pool per world size, created on demand and replaced after a failed case."""

    def __init__(self, kind: WorkerKind | None = None) -> None:
        self._kind = kind or WorkerKind()
        self._pools: dict[int, _Pool] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        atexit.register(self.close)

    def run_on(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *,
        timeout: float = 60,
        seed: int = 0,
        merges_units: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(**kwargs)` on every rank of a group.

        Arguments:
            world_size: number of ranks. With 1 there is no process group.
            fn: a function at the top of a module.
            timeout: seconds after which the case has failed.
            seed: of torch, numpy and random on every rank alike.
            merges_units: whether blocks of small models are merged, as they are by default; a test's model is then one
                unit. False to divide it as a large model is divided.
            kwargs: passed to `fn` on every rank.

        Returns:
            What `fn` returned, by rank.

        Raises:
            CaseFailed: a rank raised, died, or did not end in time.
        """
        __tracebackhide__ = True  # pytest shows the test's line and the failure's text
        if fn.__qualname__ != fn.__name__:
            raise ValueError(
                f"{fn.__qualname__} is not at the top of its module, where a worker could find it; move it"
            )
        pool = self._pools.pop(world_size, None) or _Pool(self._context, world_size, self._kind)
        try:
            case = Case(fn.__module__, fn.__name__, kwargs, seed, list(sys.path), merges_units)
            values = pool.run(case, timeout)
        finally:
            if pool.closed:
                self._pools.pop(world_size, None)
            else:
                self._pools[world_size] = pool
        return values

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Pool:
    def __init__(self, context: Any, world_size: int, kind: WorkerKind) -> None:
        self.closed = False
        self.folder = Path(tempfile.mkdtemp(prefix="lightning-zero-tests-"))
        self.processes: list[BaseProcess] = []
        self.conns: list[Connection] = []
        # Read by the fork server when the first pool starts it.
        with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
            for rank in range(world_size):
                folder = self.folder / str(rank)
                folder.mkdir()
                ours, theirs = context.Pipe()
                args = (rank, world_size, theirs, str(folder), list(sys.path), kind)
                # Not daemonic: a case may use a DataLoader with workers, or launch processes of its own.
                process = context.Process(target=_work, args=args, name=f"rank {rank} of {world_size}", daemon=False)
                process.start()
                theirs.close()
                self.conns.append(ours)
                self.processes.append(process)
        try:
            if world_size > 1:
                if not self.conns[0].poll(START_TIMEOUT):
                    raise CaseFailed(self._report({0: "did not open a store"}))
                port = self.conns[0].recv_bytes()
                for conn in self.conns[1:]:
                    conn.send_bytes(port)
            self._collect("starting", START_TIMEOUT)
        except BaseException:
            self.close()
            raise

    def run(self, case: Case, timeout: float) -> list[Any]:
        __tracebackhide__ = True
        try:
            for rank in range(len(self.conns)):  # a failure shows only what this case printed
                os.truncate(self.folder / str(rank) / "output", 0)
            for conn in self.conns:
                conn.send_bytes(pickle.dumps(case))
            outcomes = self._collect(f"{case.module}.{case.name}({case.kwargs})", timeout)
        except BaseException:
            self.close()
            raise
        if not all(outcome.healthy for outcome in outcomes):
            self.close()
        return [outcome.value for outcome in outcomes]

    def _collect(self, what: str, timeout: float) -> list[Outcome]:
        """Wait for an answer from every rank; after the first failure, only a few seconds more for the others."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        waiting = dict(zip(self.conns, range(len(self.conns)), strict=True))
        outcomes: dict[int, Outcome] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), left):
                assert isinstance(conn, Connection)
                rank = waiting.pop(conn)
                try:
                    outcomes[rank] = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(GRACE)
                    outcomes[rank] = Outcome(error=f"the process ended with code {self.processes[rank].exitcode}")
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        errors = {rank: outcome.error for rank, outcome in outcomes.items() if outcome.error is not None}
        if waiting or errors:
            reason = f"no answer within {timeout} s" if not errors else "still busy when another rank failed"
            raise CaseFailed(what + self._report(errors | self._stacks(list(waiting.values()), reason)))
        return [outcomes[rank] for rank in range(len(self.conns))]

    def _stacks(self, ranks: list[int], reason: str) -> dict[int, str]:
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        texts = {}
        for rank in ranks:
            file, deadline = self.folder / str(rank) / "stacks", time.monotonic() + GRACE
            # A stack is written from the innermost call outwards; with the module's line the text is complete.
            while " in <module>" not in (text := file.read_text()) and time.monotonic() < deadline:
                time.sleep(0.02)
            texts[rank] = f"{reason}; its stack, innermost call first:\n{text}"
        return texts

    def _report(self, errors: dict[int, str]) -> str:
        text = ""
        for rank in sorted(errors):
            twin = min(other for other in errors if errors[other] == errors[rank])
            error = errors[rank][:LONGEST_TEXT] if twin == rank else f"as on rank {twin}"
            text += f"\n---- rank {rank} of {len(self.conns)}: {error}"
            for name in ("output", "stacks") if "the process ended" in errors[rank] else ("output",):
                file = self.folder / str(rank) / name
                shown = file.read_text(errors="replace").strip() if file.exists() else ""
                text += f"\n---- {name} of rank {rank}:\n{shown[-LONGEST_TEXT:]}" if shown else ""
        return text

    def close(self) -> None:
        """End the processes: by closing the connections of idle ones, otherwise by SIGKILL."""
        self.closed = True
        for conn in self.conns:
            conn.close()
        deadline = time.monotonic() + 0.5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
