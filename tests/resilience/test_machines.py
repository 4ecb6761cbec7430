"""Two machines, each with an agent of torchrun and a memory of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress

import psutil
import pytest

from tests.resilience.jobs import command, ended, environment, fault, memory_of, run
from tests.resilience.test_faults import wait_for
from tests.support.ports import reserved_port

OPTIONS = {"pause": 0.1, "epochs": 4}
OWN_MEMORY = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
OWN_MEMORY += ['mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


class Machine:
    def __init__(self, folder, port, options):
        if subprocess.run([*OWN_MEMORY, "true"], capture_output=True).returncode:
            pytest.skip("this system does not let a process have a /dev/shm of its own")
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=the-job"]
        launcher += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=3"]
        with open(folder / "output", "a") as output:
            self.process = subprocess.Popen(
                [*OWN_MEMORY, *command(folder, options, 1, 10, launcher, sys.executable)],
                cwd=folder,
                env=environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_lost(self):
        family = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for each in family:
            with suppress(psutil.Error):
                each.kill()
        self.process.wait()


@contextmanager
def machines_in(folder, options):
    folder.mkdir()
    machines = []

    def machine():
        machines.append(Machine(folder, port, options))
        while len(machines) == 1 and machines[0].process.poll() is None:  # the first is to host the rendezvous
            with suppress(ConnectionRefusedError), closing(socket.create_connection(("localhost", port))):
                break
            time.sleep(0.02)
        return machines[-1]

    with reserved_port() as port:
        try:
            yield machine
        finally:
            for each in machines:
                with suppress(psutil.Error):
                    each.is_lost()


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("stage", "victims", "moment"), [(3, [1], "backward"), (1, [0], "commit"), (2, [0, 1], "written")]
)
def test_on_two_machines_the_files_of_a_state_are_exchanged(stage, victims, moment, uninterrupted, tmp_path):
    options, folder = {"stage": stage, "epochs": 2}, tmp_path / "killed"
    with machines_in(folder, options | {"faults": [fault(0, 5, victims, moment, until=6)]}) as machine:
        machines = [machine(), machine()]
        codes = [each.process.wait(200) for each in machines]
    found = ended(folder, max(codes))
    found.same_as(uninterrupted(options))
    # after step 5, the commit that is hit may still be that of the state before it: one step and that in flight repeat
    least = 3 if moment == "commit" else 4
    assert len(found.continued) == 1 and found.continued[0] >= least, found.output


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_place_of_a_lost_machine_is_taken_and_the_last_checkpoint_on_the_disk_serves(stage, tmp_path):
    options = OPTIONS | {"stage": stage, "saves": 4}
    whole = run(tmp_path / "whole", options)
    folder = tmp_path / "lost"
    with machines_in(folder, options) as machine:
        first, second = machine(), machine()
        wait_for(folder, "rank 0 begins step 6")
        second.is_lost()
        third = machine()  # in its place, with nothing in memory
        codes = [each.process.wait(200) for each in (first, third)]
    found = ended(folder, max(codes))
    found.same_as(whole)
    assert found.continued and found.continued[0] % 4 == 0, found.output
    assert "Resuming instead from" in found.output
    assert not (folder / f".lightning_zero-{memory_of(folder).name}").exists()
