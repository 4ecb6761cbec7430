"""Two machines, each with a launcher and a memory of its own: one machine is lost with all the state that it kept."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress

import psutil
import pytest

from tests.resilience.jobs import LAUNCH, command, ended, environment, run
from tests.support.ports import reserved_port
from tests.support.training import same_tensors

OPTIONS = {"pause": 0.1, "epochs": 4, "batch": 4, "is_plain": True, "precision": "64-true"}


class Machine:
    """A launcher with some processes; `name` is the name of the machine's memory."""

    def __init__(self, folder, name, nodes, port, options, ranks):
        launcher = [*LAUNCH, "--nnodes", nodes, "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "the-job"]
        self.memory = folder / name
        options = options | {"resilience": {"path": str(self.memory)}}
        with open(folder / "output", "a") as output:
            self.process = subprocess.Popen(
                command(folder, options, ranks, 10, launcher, sys.executable),
                cwd=folder,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def ends(self, folder, seconds=150):
        """Wait for an end without an error."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        if self.process.poll() is None:
            show_stacks(self.process)
        assert self.process.poll() == 0, (folder / "output").read_text()

    def is_lost(self):
        """Lose the machine's processes and its memory."""
        self.process.kill()  # and with it the processes that it has forked
        self.process.wait()
        shutil.rmtree(self.memory)


def show_stacks(process):
    """Let the ranks of a launcher write their stacks to the job's output."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            child.send_signal(signal.SIGABRT)  # faulthandler is enabled there
    time.sleep(2)


@contextmanager
def machines_in(folder, nodes, options, ranks=2):
    folder.mkdir()

    def machine(name):
        machines.append(Machine(folder, name, nodes, port, options, ranks))
        while len(machines) == 1 and machines[0].process.poll() is None:  # the first is to host the rendezvous
            with suppress(ConnectionRefusedError), closing(socket.create_connection(("localhost", port))):
                break
            time.sleep(0.02)
        return machines[-1]

    machines = []
    with reserved_port() as port:
        try:
            yield machine
        finally:
            for each in machines:
                each.process.kill()


def wait_for(folder, text, seconds=120):
    deadline = time.monotonic() + seconds
    while text not in (output := (folder / "output").read_text()):
        assert time.monotonic() < deadline, f"no {text!r} in:\n{output}"
        time.sleep(0.02)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_of_a_lost_machine_comes_from_its_mirror(stage, tmp_path):
    options = OPTIONS | {"stage": stage}
    whole = run(tmp_path / "whole", options, 4)
    folder = tmp_path / "lost"
    with machines_in(folder, "2", options) as machine:
        first, second = machine("first"), machine("second")
        wait_for(folder, "begins step 6")
        second.is_lost()
        machine("third")  # in its place, with nothing in memory
        first.ends(folder)
    found = ended(folder, 0)
    assert "Continuing after step" in found.output and "starts over" not in found.output
    found.same_as(whole)
    found.repeats_at_most(1)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_one_machine_continues_alone_and_a_second_joins_later(tmp_path):
    options = OPTIONS | {"stage": 3, "pause": 0.25, "epochs": 12}
    whole = run(tmp_path / "whole", options | {"pause": 0}, 4)
    folder = tmp_path / "lost"
    with machines_in(folder, "1:2", options) as machine:
        first, second = machine("first"), machine("second")
        wait_for(folder, "rank 3 begins step 4")
        second.is_lost()
        wait_for(folder, "was 4 before the restart and is 2 now")
        wait_for(folder, "attempt 1 rank 1 begins step 12")
        machine("third")
        wait_for(folder, "was 2 before the restart and is 4 now")
        first.ends(folder)
    found = ended(folder, 0)
    same_tensors(whole.weights, found.weights, bound=1e-12)
