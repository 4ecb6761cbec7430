"""Runs a script of this repository, or a target of its Makefile, in a separate process, as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.warm import warm_python

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT: list[str] = []  # after the interpreter
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(
    launcher: list[str], script: str, *arguments: str, folder: Path, timeout: float = 90, python: str | None = None
) -> str:
    """Runs `script` in the working directory `folder`, by default with `warm_python()`, and returns standard output.

    Raises:
        AssertionError: the script failed or took longer than `timeout` seconds; the text contains its output.
    """
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [python or warm_python(), *launcher, str(REPOSITORY / script), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own process group, so that on a timeout its ranks can be ended with it
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, errors = process.communicate()
        raise AssertionError(f"{script} took longer than {timeout} s:\n{output}\n{errors}") from None
    assert process.returncode == 0, f"{script} ended with code {process.returncode}:\n{output}\n{errors}"
    return output


def lines_with(output: str, *beginnings: str) -> list[str]:
    """The lines that start with `beginnings`, one line each."""
    found = [line for line in output.splitlines() if line.startswith(beginnings)]
    assert len(found) == len(beginnings), output
    return found


def make(target: str, arguments: str, timeout: float = 120) -> str:
    """Runs `make target ARGS=arguments` with this interpreter, and returns standard output.

    Raises:
        AssertionError: it failed; the text contains its output.
    """
    # -o: as if everything were installed
    command = ["make", "--silent", "-o", "nowhere/.installed", "VENV=nowhere", f"RUN={sys.executable}", target]
    done = subprocess.run(
        [*command, f"ARGS={arguments}"], cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"make {target} ended with code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
