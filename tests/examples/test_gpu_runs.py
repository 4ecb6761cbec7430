"""`benchmarks/gpu`: parts of a run end within its time, and what is known is printed and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

RUN = '''
import sys
from pathlib import Path
from parts import Part, run

HANGS = """
import time
try:
    print("begun")
    time.sleep(100)
except KeyboardInterrupt:
    print("what it has found")
    time.sleep(100)
"""

parts = [
    Part("works", ["-c", "import common, tests; print('a result')"], 0.5),
    Part("fails", ["-c", "raise SystemExit(3)"], 0.5),
    Part("hangs", ["-c", HANGS], 0.2),
    Part("waits", ["-c", "print('never')"], 100.0),
]
sys.exit(run(parts, minutes=0.5, folder=Path(sys.argv[1])))
'''


@pytest.mark.exhaustive
def test_parts_that_fail_or_hang_do_not_keep_others_from_running(tmp_path: Path) -> None:
    path = {"PYTHONPATH": str(REPOSITORY / "benchmarks" / "gpu")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)], env=path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    *_, works, fails, hangs, waits = done.stdout.splitlines()
    assert works.split()[:4] == ["works", "exit", "code", "0"]
    assert fails.split()[:4] == ["fails", "exit", "code", "3"]
    assert "stopped at its time limit" in hangs and "left out" in waits
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "works.log": "a result\n",
        "fails.log": "",
        "hangs.log": "begun\nwhat it has found\n",
    }
