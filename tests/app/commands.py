"""Runs `lightning-zero` in a separate process, as a user does."""

import os
import signal
import subprocess
from pathlib import Path

from tests.support.warm import warm_python

REPOSITORY = Path(__file__).resolve().parents[2]

# A job that takes seconds: each part runs once, with a model of some thousand parameters.
TINY = (
    "debug=short",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "trainer.enable_progress_bar=false",
    "model.width=32",
    "model.depth=2",
    "model.warmup_steps=2",
    "data.max_bytes=500_000",
    "logger=csv",  # the default, TensorBoard, takes a second to import
)


def start(
    *arguments: str, folder: Path, launcher: tuple[str, ...] = (), path: tuple[Path, ...] = ()
) -> subprocess.Popen[str]:
    """Starts `lightning-zero ARGUMENTS` with `folder` as the working directory; `launcher` begins the command line.

    `path` comes first in PYTHONPATH.
    """
    return subprocess.Popen(
        [*(launcher or [warm_python()]), "-m", "lightning_zero", *arguments],
        cwd=folder,
        env={
            **{key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"},  # set by other tests
            "PYTHONPATH": os.pathsep.join(map(str, [*path, REPOSITORY])),
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own process group, so that on a timeout its ranks can be ended with it
        # As in a terminal: a shell that runs the tests in the background has made them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    """Waits for the end: exit code, standard output, standard error."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, errors = process.communicate()
        raise AssertionError(f"took longer than {timeout} s:\n{output}\n{errors}") from None
    return process.returncode, output, errors


def succeed(*arguments: str, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    """Runs `lightning-zero ARGUMENTS` to its end, asserts that it succeeded, and returns standard output."""
    code, output, errors = finish(start(*arguments, folder=folder, launcher=launcher))
    assert code == 0, f"ended with code {code}:\n{output}\n{errors}"
    return output
