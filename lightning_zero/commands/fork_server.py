"""Imported first in the server from which ``lightning-zero launch`` forks processes: the server ends with the launcher.

The server would notice the launcher's end by itself, but then takes seconds to shut down with all that it has imported,
while its processes go on.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of prctl


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    end_with_parent()
