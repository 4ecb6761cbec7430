"""Reading the memory of another process on this machine, and the permission to do so.

``process_vm_readv`` is Linux's cross-memory attach, which MPI libraries and UCX use between processes of a node. Linux
lets processes of one user read each other's memory. Where ``kernel.yama.ptrace_scope`` is 1 (Ubuntu's default), the
process that is read has to allow it; above 1, reading is forbidden.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

_PR_SET_PTRACER = 0x59616D61


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _reader() -> Any:
    """The system's ``process_vm_readv``; None if there is none."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        ranges, size = ctypes.POINTER(_Range), ctypes.c_ulong
        function.argtypes = [ctypes.c_int, ranges, size, ranges, size, size]
        function.restype = ctypes.c_ssize_t
    return function


_read = _reader()


def is_supported() -> bool:
    """Whether the system has ``process_vm_readv``."""
    return _read is not None


def read_memory(process: int, address: int, target: Tensor) -> None:
    """Fill a contiguous CPU tensor with bytes from another process's memory.

    Raises:
        OSError: if the process is gone, or the system forbids it.
    """
    done, nbytes = 0, target.nbytes
    while done < nbytes:
        here, there = _Range(target.data_ptr() + done, nbytes - done), _Range(address + done, nbytes - done)
        read = _read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if read <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += read


def let_read(ancestor: int) -> bool:
    """Let a process and its descendants read this process's memory, where only Yama forbids it.

    If each rank names its own parent, ranks can read each other's memory where one process has started all ranks, or
    rank 0 has started all others (``prctl(2)``, PR_SET_PTRACER).

    Args:
        ancestor: the process's ID; 0 revokes the permission.

    Returns:
        Whether Yama accepts such permissions.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return prctl(_PR_SET_PTRACER, ancestor, 0, 0, 0) == 0


def memory_domain() -> str:
    """A value that is equal for processes that may be able to read each other's memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])
