"""When a rank is killed, all waiting ranks raise within seconds, with an error that names it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.engine.comm import failures, process_group
from lightning_zero.engine.comm.cross_memory import exchange
from lightning_zero.engine.comm.transport import Cast
from lightning_zero.engine.plan.mesh import ALL
from tests.support import rank
from tests.support.lost import die, run_ranks
from tests.support.patience import PATIENCE, little_patience
from tests.support.trainer import Learner, make_trainer
from tests.support.transports import cross_memory

KILLED = -9
SECONDS = 8
"""The time in which a survivor ends: on a busy machine torch and Lightning take some seconds to close."""


def survivors_name(act, victim, size=2, what=""):
    endings = run_ranks(act, size)
    for number, ending in enumerate(endings):
        if number == victim:
            assert ending.code == KILLED, ending
        else:
            assert ending.code == 1 and ending.seconds < SECONDS, ending
            assert what in ending.said and f"rank {victim}" in ending.said and "was killed" in ending.said, ending
            assert "GLHF" not in ending.said, ending


def while_a_rank_waits_in(where, victim, size):
    """Every operation of the engine, without a Trainer, in which a rank waits for the others."""

    def act():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = Engine(module, stage=3, units=lambda name, _: name == "0")
        dist.barrier()
        if rank() == victim:
            time.sleep(0.3)  # the other ranks are waiting by then
            die()
        waits[where](engine)

    waits = {
        "an implicit gather": lambda engine: engine.module[0].weight.norm(),
        "a forward": lambda engine: engine.module(torch.ones(2, 4)),
        "an exchange of objects": lambda engine: engine.communicator.control.gather_objects(1),
        "a sum over ranks": lambda engine: engine.communicator.all_reduce(torch.ones(1)),
        "the end": lambda engine: engine.close(),
        "a collective of the project's": lambda engine: all_reduce_of_the_project(),
    }
    survivors_name(act, victim, size)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "where",
    [
        "an implicit gather",
        "a forward",
        "an exchange of objects",
        "a sum over ranks",
        "the end",
        "a collective of the project's",
    ],
)
def test_a_wait_for_a_killed_rank_ends_with_an_error_that_names_it(run_on, where, victim):
    run_on(1, while_a_rank_waits_in, timeout=100, where=where, victim=victim, size=3)


def while_others_wait_for_each_other(failing):
    """A rank fails and exits at once. The next waits for it, and the one after that waits for the next."""

    def act():
        engine = Engine(nn.Linear(4, 4), stage=3)
        dist.barrier()
        behind = (rank() - failing) % 3
        if behind == 0:
            time.sleep(0.3)  # the other ranks are waiting by then
            failures.fail("the reason")
            raise ValueError
        with engine.communicator.everyone.waiting("a message", everyone=False):
            dist.recv(torch.empty(1), (rank() - 1) % 3)

    endings = run_ranks(act, 3)
    for number, ending in enumerate(endings):
        said = "ValueError: " if number == failing else "RuntimeError: a message did not complete: the reason"
        assert ending.code == 1 and ending.said == said and ending.seconds < SECONDS, ending


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("failing", [0, 1])
def test_the_reason_of_a_failure_reaches_ranks_that_wait_for_others_than_the_failed_rank(run_on, failing):
    run_on(1, while_others_wait_for_each_other, timeout=60, failing=failing)


@little_patience()
def with_default_dtypes_that_differ():
    """Rank 0 changes torch's default dtype, as Lightning does in each step of precision="bf16-true"."""
    engine = Engine(nn.Linear(4, 4), stage=3)
    torch.set_default_dtype(torch.bfloat16 if rank() == 0 else torch.float32)
    deadline = time.monotonic() + 5 * PATIENCE  # the timers exchange several messages meanwhile
    while time.monotonic() < deadline:
        time.sleep(PATIENCE / 10)
    torch.set_default_dtype(torch.float32)
    dist.barrier()
    engine.close()


@pytest.mark.exhaustive
def test_ranks_may_have_different_default_dtypes(run_on):
    run_on(2, with_default_dtypes_that_differ)


def all_reduce_of_the_project():
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        ZeroStrategy(parallel_devices=[torch.device("cpu")] * 3).on_exception(error)
        raise


@pytest.mark.parametrize(
    "text", ["[gloo/transport/tcp/pair.cc:538] Connection closed", "Application timeout caused pair closure"]
)
def test_a_gloo_error_says_which_rank_was_lost(monkeypatch, text):
    monkeypatch.setattr(failures, "reason_soon", lambda: "rank 1 was killed")
    error, of_the_project = RuntimeError(text), RuntimeError("an assertion of the project's")
    failures.explain(error)
    failures.explain(of_the_project)
    assert str(error) == "A collective did not complete: rank 1 was killed"
    assert str(of_the_project) == "an assertion of the project's"


def while_ranks_connect():
    def act():
        if rank() == 1:
            exchange._connect_to = lambda *_: time.sleep(0.3) or die()
        with cross_memory():
            Engine(nn.Linear(4, 4), stage=3)

    survivors_name(act, 1)


def test_a_rank_that_is_killed_while_the_transport_is_set_up_is_named(run_on):
    run_on(1, while_ranks_connect, timeout=60)


def stop(seconds, then):
    """Stop this process until a child, whose id is returned, sends it another signal after some seconds."""
    child = os.fork()
    if child == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), then)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    return child


def while_a_rank_is_stopped():
    """Rank 1 is stopped for longer than PATIENCE, while rank 0 waits for it."""

    @little_patience()
    def act():
        torch.manual_seed(0)
        module = nn.Linear(4, 4)
        engine = Engine(module, stage=3)
        if rank() == 1:
            os.waitpid(stop(4 * PATIENCE, signal.SIGCONT), 0)
        value = float(module.weight.norm())
        engine.close()
        return value

    endings = run_ranks(act)
    assert [ending.code for ending in endings] == [0, 0] and endings[0].said == endings[1].said, endings


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(run_on):
    run_on(1, while_a_rank_is_stopped, timeout=60)


def while_a_worker_of_it_lives():
    """A worker of the rank's DataLoader has copies of the rank's connections, and ends some seconds after the rank."""

    def act():
        module = nn.Linear(4, 4)
        engine = Engine(module, stage=3)
        workers = iter(DataLoader(torch.ones(2, 4), num_workers=1, multiprocessing_context="fork"))
        next(workers)
        if rank() == 1:
            die()
        engine.module.weight.norm()

    survivors_name(act, 1)


@pytest.mark.exhaustive
def test_a_killed_rank_is_noticed_though_a_worker_of_its_loader_lives(run_on):
    run_on(1, while_a_worker_of_it_lives, timeout=60)


def while_it_receives(kind):
    """Rank 1 is stopped, then killed, when rank 0 has sent the part of a message that the sockets can hold."""
    numel = 2**24

    def act():
        engine = Engine(nn.Linear(4, 4), stage=3)
        flat, bounds = torch.ones(2 * numel), [0, numel, 2 * numel]
        group = engine.communicator.along(ALL)
        dist.barrier()
        if rank() == 0:
            time.sleep(1)  # rank 1 is stopped by then
        if kind == "gather":
            wait = group.all_gather(flat, bounds, "this gather").wait
        elif kind == "reduction":
            wait = group.reduce_scatter(flat, bounds, Cast(flat.dtype), "this reduction").wait
        elif rank() == 0:
            wait = partial(failures.send, flat, None, 1)
        else:
            threading.Thread(target=process_group.receive, args=(flat, None, 0), daemon=True).start()
        if rank() == 1:
            time.sleep(0.5)  # its receive has begun
            stop(2, signal.SIGKILL)
        try:
            wait()
        finally:
            engine.close(communicate=False)
            del group, wait, engine
            gc.collect()
            dist.destroy_process_group()  # waits for the threads of Gloo

    survivors_name(act, 1, what=f"this {kind} did not complete" if kind != "send" else "")


@pytest.mark.parametrize("kind", ["gather", "reduction", "send"])
def test_a_wait_ends_although_a_part_of_a_large_message_was_sent_to_the_killed_rank(run_on, kind):
    run_on(1, while_it_receives, timeout=100, kind=kind)


class Dies(Learner):
    def __init__(self, where, victim):
        super().__init__(batches=4)
        self.where, self.victim = where, victim

    def _maybe(self, where):
        if self.where == where and self.global_rank == self.victim and self.trainer.global_step == 2:
            die()

    def setup(self, stage):
        if self.where == "setup" and self.global_rank == self.victim:
            die()

    def on_train_batch_start(self, *_):
        self._maybe("batch")

    def on_before_optimizer_step(self, *_):
        self._maybe("update")

    def on_save_checkpoint(self, checkpoint):
        self._maybe("save")


def in_fit(stage, where, victim, folder):
    def act():
        strategy = ZeroStrategy(stage)
        callbacks = [ModelCheckpoint(folder, every_n_train_steps=1)] if where == "save" else []
        trainer = make_trainer(strategy, callbacks=callbacks, enable_checkpointing=where == "save", max_epochs=1)
        trainer.fit(Dies(where, victim))

    survivors_name(act, victim)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("stage", "where"), [(3, "setup"), (1, "batch"), (2, "update"), (2, "save"), (3, "batch"), (3, "save")]
)
def test_a_rank_that_is_killed_during_fit_ends_the_others(run_on, tmp_path, stage, where, victim):
    run_on(1, in_fit, timeout=60, stage=stage, where=where, victim=victim, folder=str(tmp_path))


EXITS = """
import os, sys, threading
from datetime import timedelta
import torch.distributed as dist
from lightning_zero.engine import failures, process_group

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
failures.notices()
closes = threading.Event()

def close_slowly(_):
    closes.set()
    try:
        server.wait(["never"], timedelta(seconds=1))  # in C++, without the interpreter's lock
    except Exception:
        pass

process_group.close_connections = close_slowly
dist.destroy_process_group()
assert closes.wait(20), "the timer does not notice that the group was destroyed"
"""


@pytest.mark.exhaustive
def test_a_program_may_end_while_the_timer_still_closes_its_connections():
    """At the interpreter's end, a background thread that returns from C++ would abort the process."""
    done = subprocess.run([sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
