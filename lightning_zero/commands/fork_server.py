"""Imported first by the fork server of ``lightning-zero launch``, so that the server ends with the launcher.

Without this module, the server would notice the launcher's end, but with its many imports would take
seconds to shut down, while its processes continue.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # option of prctl


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    end_with_parent()
