"""Tests marked `alone`, together with others on many workers."""

from __future__ import annotations

import pytest

TESTS = """
    import os, pathlib, time
    import pytest

    beside = pathlib.Path("running")
    beside.mkdir(exist_ok=True)

    def run(others):
        own = beside / str(os.getpid())
        own.touch()
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            found = len(list(beside.iterdir())) - 1
            assert found == 0 or others
            time.sleep(0.01)
        own.unlink()

    @pytest.mark.parametrize("number", range(12))
    def test_of_many(number):
        run(others=True)
"""

ALONE = (
    TESTS
    + """
    @pytest.mark.alone
    @pytest.mark.parametrize("number", range(2))
    @pytest.mark.timeout(3)  # what others take before it does not count
    def test_alone(number):
        run(others=False)
"""
)


@pytest.mark.exhaustive
def test_no_test_runs_while_a_test_marked_alone_runs(pytester):
    pytester.makeini("[pytest]\naddopts = -p tests.support.alone --strict-markers")
    files = {f"test_{name}": TESTS for name in "abc"}
    pytester.makepyfile(test_alone=ALONE, **files)
    result = pytester.runpytest_inprocess("-n", "4", "--dist", "load")
    assert result.parseoutcomes() == {"passed": 12 * 4 + 2}
