"""Two simulated machines: network namespaces of Linux, joined by a virtual Ethernet cable."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
CABLE = "cable"  # the name of the network interface on either machine
TIMEOUT = 150.0  # seconds


def can_be_made() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"lightning_zero_{os.getpid()}_try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Machines:
    """Two namespaces, each with a loopback device of its own and one end of the cable.

    Arguments:
        rate: of the cable in both directions, as ``tc`` reads it, such as "1gbit"; None for no limit.
    """

    def __init__(self, rate: str | None = None) -> None:
        self._names = [f"lightning_zero_{os.getpid()}_{node}" for node in range(2)]
        self._rate = rate

    def __enter__(self) -> Machines:
        first, second = self._names
        for name in self._names:
            _ip("netns", "add", name)
        cable = ["link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second]
        _ip(*cable)
        for number, name in enumerate(self._names):
            _ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/30", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", name, "link", "set", device, "up")
            if self._rate is not None:
                limit = ["root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", CABLE, *limit)
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def run(self, function: Any, ranks_each: int = 2, **arguments: Any) -> list[Any]:
        """Call a module's function on every rank, with ``ranks_each`` ranks a machine, and return the results by rank.

        It is called after ``init_process_group("gloo")``. Arguments and results are JSON.
        """
        size = 2 * ranks_each
        call = [sys.executable, "-m", "tests.support.machines", f"{function.__module__}:{function.__name__}"]
        processes = []
        for rank in range(size):
            node, local = divmod(rank, ranks_each)
            environment = os.environ | {
                "MASTER_ADDR": "10.213.7.1",
                "MASTER_PORT": "29500",  # free in a new namespace
                "WORLD_SIZE": str(size),
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_each),
                "GROUP_RANK": str(node),
                "GLOO_SOCKET_IFNAME": CABLE,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
            }
            command = ["ip", "netns", "exec", self._names[node], *call, json.dumps(arguments)]
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
                )
            )
        try:
            found = [process.communicate(timeout=TIMEOUT) for process in processes]
        finally:
            for process in processes:
                process.kill()
        wrong = [f"rank {rank}: {said[-3000:]}" for rank, (_, said) in enumerate(found) if processes[rank].returncode]
        assert not wrong, "\n".join(wrong)
        return [json.loads(output.splitlines()[-1]) for output, _ in found]


def bytes_sent() -> dict[str, int]:
    """Bytes sent over the cable and over the loopback device, as counted by the kernel."""
    folder = Path("/sys/class/net")
    return {name: int((folder / name / "statistics" / "tx_bytes").read_text()) for name in (CABLE, "lo")}


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


needed = pytest.mark.skipif(not can_be_made(), reason="network namespaces need root and the program ip")


if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    dist.barrier()
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()
