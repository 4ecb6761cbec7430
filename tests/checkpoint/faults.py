"""Ranks that are killed or cannot write while they save: forked from a worker, which takes only milliseconds."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_zero.checkpoint.commit import Destination, Stream
from lightning_zero.checkpoint.objects import Ranks
from lightning_zero.checkpoint.reading import open_checkpoint
from lightning_zero.checkpoint.saver import SaveJob, SaveMode, Saver
from lightning_zero.checkpoint.saving import Content, content_of, write_file, write_folder
from lightning_zero.io.labels import new_label

KILLED, FAILED, HUNG = -signal.SIGKILL, 3, "hung"
SECONDS = 25
"""Time after which a rank that survived another counts as hung."""

Act = Callable[[int, Any], None]
"""Function that a rank runs; its arguments are the rank and a function that all-gathers a value."""


def tree(value: float, numel: int = 40) -> dict[str, Any]:
    """Weights and moments that are all equal to one value, which identifies the save."""
    weights = {"a": torch.full((numel,), value), "b": torch.full((2, 3), value)}
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    return {"state_dict": weights, "optimizer_0": {"state": {"a": {"m": weights["a"] + 0}}, "param_groups": groups}}


def part(rank: int, value: float, **options: Any) -> Content:
    """Entries that each of two ranks writes: rank 0 writes all common tensors, so rank 1 has tensors of its own."""
    if rank == 0:
        return content_of(tree(value, **options), {"epoch": value})
    own = content_of({"own": tree(value, **options)["state_dict"]}, {})
    return Content(own.entries, {}, b"", {})


def save(form: str, path: Any, value: float, rank: int = 0, gather: Any = None, **options: Any) -> None:
    """Save once, as one of two ranks or, without ``gather``, as the only rank."""
    if form == "full":
        return write_file({**tree(value, **options), "epoch": value}, Destination(path))
    gather = gather or (lambda own: [own])
    destination = Destination(path, gather(new_label())[0])
    return write_folder(part(rank, value, **options), destination, {}, Ranks(rank, gather))


def value_at(path: Any) -> float:
    """Return the value that identifies the save; the checkpoint must be complete and from a single save."""
    opened = open_checkpoint(path)
    opened.verify()
    found = {float(number) for tensor in opened.tensors.values() for number in (tensor + 0).flatten().tolist()}
    found.add(float(opened.checkpoint["epoch"]))
    assert len(found) == 1, f"{path} is made of several saves: {found}"
    return found.pop()


def run_ranks(
    act: Act,
    world_size: int = 2,
    kill: tuple[int, float] | None = None,
    after: Path | None = None,
    seconds: float = SECONDS,
) -> list[Any]:
    """Fork ranks that communicate through pipes and fail when the other rank has ended.

    Arguments:
        act: called on each rank.
        kill: the rank to kill by a signal, and after how many seconds.
        after: a file; the seconds until the kill count from the moment it exists.
        seconds: how long to wait for the ranks' ends.

    Returns:
        Their exit codes: 0, ``FAILED`` for an exception, ``KILLED`` or ``HUNG``.
    """
    ends = Pipe()

    def child(rank: int) -> None:
        if world_size == 1:
            return act(rank, lambda value: [value])
        ends[1 - rank].close()

        def gather(value: Any) -> list[Any]:
            ends[rank].send(value)
            values = [value, ends[rank].recv()]
            return values if rank == 0 else values[::-1]

        return act(rank, gather)

    children = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            code = FAILED
            try:
                faulthandler.register(signal.SIGUSR2, sys.stderr)
                child(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(process)
    for end in ends:
        end.close()
    if kill is not None:
        while after is not None and not after.exists():
            time.sleep(0.001)
        time.sleep(kill[1])
        os.kill(children[kill[0]], signal.SIGKILL)
    codes: list[Any] = [HUNG] * world_size
    deadline = time.monotonic() + seconds
    while HUNG in codes and time.monotonic() < deadline:
        for rank, process in enumerate(children):
            if codes[rank] == HUNG:
                ended, status = os.waitpid(process, os.WNOHANG)
                codes[rank] = os.waitstatus_to_exitcode(status) if ended else HUNG
        time.sleep(0.001)
    for process, code in zip(children, codes):
        if code == HUNG:
            os.kill(process, signal.SIGUSR2)  # show where it waits
            time.sleep(0.5)
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return codes


def die_at_call(number: int) -> None:
    """Kill this process at the disk call after ``number`` others: before the call, or halfway through a write."""
    left = number

    def counted(call: Callable[..., Any], halfway: Callable[..., Any] | None = None) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                if halfway is not None:
                    halfway(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    write, writes = Stream.write, itertools.count()
    killing = counted(write, lambda file, data: write(file, memoryview(data).cast("B")[: len(data) // 2]))

    def write_or_die(file: Stream, data: Any) -> int:
        # ``torch.save`` writes a small tensor in many parts, of which every tenth counts
        return write(file, data) if next(writes) % 10 else killing(file, data)

    Stream.write = write_or_die  # type: ignore[method-assign]
    for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))


def in_background(path: Path, form: str, ready: Path, port: int) -> Act:
    """Return a function that endlessly saves the values 1, 2, 3, ... in the background."""

    def act(rank: int, gather: Any) -> None:
        if form == "sharded":
            store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=SECONDS))
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        saver, value = Saver(in_background=True), 0
        while True:
            value += 1
            saver.finish()
            if form == "full":
                saver.save(SaveJob(SaveMode.GATHERED, path, {**tree(value), "epoch": value}))
            else:
                saver.save(SaveJob(SaveMode.SHARDED, path, {"epoch": value}, tree(value)), Ranks(rank, gather))
            ready.touch()

    return act


def on_a_small_disk(folder: Path, nbytes: int, act: Callable[[], None], seconds: float = SECONDS) -> int:
    """Run ``act`` in a process that sees a folder as a separate disk of ``nbytes``; return its exit code."""

    def alone(rank: int, gather: Any) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.getuid(), os.getgid()
        if libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={nbytes}".encode()):
            raise OSError(ctypes.get_errno(), "mount")
        act()

    return run_ranks(alone, 1, seconds=seconds)[0]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
