"""Labels for names of temporary files, by which other processes can tell whether a file's creator is still alive."""

from __future__ import annotations

import itertools
import os
import socket
import time

LABEL = r"(?P<label>.+-[1-9]\d{0,8}-[0-9a-f]{16})"
"""Regular expression for a label within a file name. It matches neither dates nor impossible process ids."""

_FORGOTTEN = 24 * 3600  # seconds without a write after which a file from another machine counts as left over

_FIRST = time.time_ns()  # distinguishes this process from earlier ones with the same process id
_numbers = itertools.count(_FIRST)


def new_label() -> str:
    """Return a new unique label, with this process's id and machine."""
    return f"{this_machine()}-{os.getpid()}-{next(_numbers):x}"


def is_left_over(label: str, path: str) -> bool:
    """Whether the process that created a file or folder has ended, or (on another machine) seems to have ended.

    ``label`` is the part of its name that ``LABEL`` matches.
    """
    process, _, number = label.rpartition("-")
    machine, _, pid = process.rpartition("-")
    if machine != this_machine():
        paths = [path]
        if os.path.isdir(path) and not os.path.islink(path):
            paths += [entry.path for entry in os.scandir(path)]
        return time.time() - max(os.stat(each).st_ctime for each in paths) > _FORGOTTEN
    if int(pid) == os.getpid():  # perhaps an earlier process: a restarted container may reuse ids
        return int(number, 16) < _FIRST
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def this_machine() -> str:
    """Identify the machine and PID namespace: containers may share a host name or a folder, but not process ids."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
