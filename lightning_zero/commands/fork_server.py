"""Ends the fork server of ``lightning-zero launch`` when the launcher ends. The server imports this module first.

Without this module, the server would also notice that the launcher has ended. But because of its many imports, the
server would take seconds to shut down, and the processes that it has forked would continue in the meantime.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # option of prctl


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    end_with_parent()
