"""Two simulated machines on one: Linux network namespaces joined by a virtual Ethernet cable."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

CABLE = "cable"  # the name of the network interface on either machine
COUNT = 2

_ports = itertools.count(29500)  # free in a new namespace


class Machines:
    """Two namespaces, each with its own loopback device and one end of the cable.

    Args:
        rate: bandwidth of the cable in both directions, as ``tc`` reads it, such as "1gbit"; None for no limit.
    """

    def __init__(self, rate: str | None = None) -> None:
        self._names = [f"lightning_zero_{os.getpid()}_{node}" for node in range(COUNT)]
        self._rate = rate

    def __enter__(self) -> "Machines":
        """Make the namespaces; raises RuntimeError if this process is not allowed to."""
        first, second = self._names
        if os.geteuid() != 0 or shutil.which("ip") is None or _try_ip("netns", "add", first).returncode != 0:
            raise RuntimeError("network namespaces need root and the program ip")
        try:
            _ip("netns", "add", second)
            _ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
            for number, name in enumerate(self._names):
                _ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/30", "dev", CABLE)
                for device in ("lo", CABLE):
                    _ip("-n", name, "link", "set", device, "up")
                if self._rate is not None:
                    limit = ["root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms"]
                    _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", CABLE, *limit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        for name in self._names:
            _try_ip("netns", "del", name)

    def places(self, ranks: int) -> list[tuple[list[str], dict[str, str]]]:
        """For each rank in a job, the prefix of the command and the environment."""
        each, port = ranks // COUNT, str(next(_ports))
        found = []
        for rank in range(ranks):
            node, local = divmod(rank, each)
            environment = {
                "MASTER_ADDR": "10.213.7.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(ranks),
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(each),
                "GROUP_RANK": str(node),
                "GLOO_SOCKET_IFNAME": CABLE,
                "OMP_NUM_THREADS": "1",
            }
            found.append((self.inside(node), environment))
        return found

    def inside(self, node: int) -> list[str]:
        """The prefix of a command that runs on the given machine."""
        return ["ip", "netns", "exec", self._names[node]]


def bytes_sent() -> dict[str, int]:
    """Bytes sent over the cable and over the loopback device of this process's machine, as counted by the kernel."""
    folder = Path("/sys/class/net")
    return {name: int((folder / name / "statistics" / "tx_bytes").read_text()) for name in (CABLE, "lo")}


def bytes_sent_by_all() -> dict[str, int]:
    """``bytes_sent``, read while none of the machine's ranks sends. Collective."""
    import torch.distributed as dist  # here, as the parents of benchmarks import no torch

    dist.barrier()
    sent = bytes_sent()
    dist.barrier()  # the machine's other ranks may not go on to send before this one has read
    return sent


def is_on_one_of_two() -> bool:
    """Whether this process runs on one of the two machines."""
    return Path("/sys/class/net", CABLE).exists()


def _try_ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
