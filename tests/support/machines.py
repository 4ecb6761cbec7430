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


class Machines:
    """Two namespaces, each with a loopback device of its own and one end of the cable; skips where none can be made."""

    def __init__(self) -> None:
        self._names = [f"lightning_zero_{os.getpid()}_{node}" for node in range(2)]

    def __enter__(self) -> Machines:
        first, second = self._names
        if os.geteuid() != 0 or shutil.which("ip") is None or _try_ip("netns", "add", first).returncode != 0:
            pytest.skip("network namespaces need root and the program ip")
        try:
            _ip("netns", "add", second)
            _ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
            for number, name in enumerate(self._names):
                _ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/30", "dev", CABLE)
                for device in ("lo", CABLE):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self._names:
            _try_ip("netns", "del", name)

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


def _try_ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    done = _try_ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


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
