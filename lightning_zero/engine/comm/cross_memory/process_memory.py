"""Read the memory of another process on this machine, and permit other processes to read this one's memory.

``process_vm_readv`` is Linux's cross-memory attach, which MPI libraries and UCX use between processes of a node. By
default, Linux lets processes of one user read each other's memory. If ``kernel.yama.ptrace_scope`` is 1 (Ubuntu's
default), the process to be read must first permit this. With higher values, ordinary processes cannot permit this.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from torch import Tensor

_PR_SET_PTRACER = 0x59616D61


class _Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


def _reader() -> Any:
    """The system's ``process_vm_readv``; None if the system lacks it."""
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
        OSError: if the other process has ended, or the system forbids reading its memory.
    """
    done, nbytes = 0, target.nbytes
    while done < nbytes:
        here, there = _Range(target.data_ptr() + done, nbytes - done), _Range(address + done, nbytes - done)
        read = _read(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if read <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += read


def let_read(ancestor: int) -> None:
    """Permit a process and its descendants to read this process's memory, as Yama may require; 0 revokes that.

    If each rank passes its own parent, all ranks can read each other's memory, provided that one process has started
    all ranks, or that rank 0 has started all others (``prctl(2)``, PR_SET_PTRACER). No effect without Yama.
    """
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    prctl(_PR_SET_PTRACER, ancestor, 0, 0, 0)
