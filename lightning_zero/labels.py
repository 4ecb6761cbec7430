"""Labels in the names of what a process puts on a disk for a while, so that others see whether it still lives."""

from __future__ import annotations

import itertools
import os
import socket
import time

LABEL = r"(?P<label>.+-\d+-[0-9a-f]{16})"
"""What a label matches, for the patterns of names with one in them; a date that somebody has put there does not."""

_FORGOTTEN = 24 * 3600
"""Seconds without a write after which what another machine had begun to write counts as left by one that died."""

_FIRST = time.time_ns()  # so that labels differ where a number of a process comes again
_numbers = itertools.count(_FIRST)


def new_label() -> str:
    """A label of this process, and of one thing that it makes."""
    return f"{this_machine()}-{os.getpid()}-{next(_numbers):x}"


def is_of_the_dead(label: str) -> bool | None:
    """Whether the process that a label is of has ended; None where that cannot be seen from here."""
    process, _, number = label.rpartition("-")
    machine, _, pid = process.rpartition("-")
    if machine != this_machine():
        return None
    if int(pid) == os.getpid():  # in a container that is started again each process may get the number it had before
        return int(number, 16) < _FIRST
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def is_left_over(label: str, path: str) -> bool:
    """Whether whoever made a file or folder does not work on it any more.

    Args:
        label: in its name.
        path: where it is; looked at if the label is of another machine.
    """
    dead = is_of_the_dead(label)
    if dead is None:
        paths = [path]
        if os.path.isdir(path) and not os.path.islink(path):
            paths += [entry.path for entry in os.scandir(path)]
        return time.time() - max(os.stat(each).st_ctime for each in paths) > _FORGOTTEN
    return dead


def this_machine() -> str:
    """Where numbers of processes mean something: containers may share a name, or a folder, and not these."""
    try:
        return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
