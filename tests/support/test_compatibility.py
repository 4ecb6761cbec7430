"""The table of behaviours: the contents of cells, when the table is written, and when a run fails because of it."""

from __future__ import annotations

import pytest

from tests.support.compatibility import FILE, HEAD

pytestmark = pytest.mark.exhaustive

TESTS = """
    import pytest

    @pytest.mark.behaviour("The Trainer", "It trains")
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_train(stage):
        assert stage != {failing}

    @pytest.mark.behaviour("The Trainer", "It trains")
    @pytest.mark.behaviour("The numbers", "All at once", notes={{3: "refused: says how"}})
    def test_everywhere():
        pass

    @pytest.mark.behaviour("The numbers", "Only there")
    @pytest.mark.parametrize("stage", [2])
    def test_one(stage):
        pass

    def test_unmarked():
        pass
"""

TABLE = """
## Exceptions

| | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| All at once | yes | yes | refused: says how |
| Only there |  | yes |  |

## The Trainer

| | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| It trains | yes | yes | yes |
"""

WITH_A_FAILURE = """
## Exceptions

| | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| All at once | yes | yes | refused: says how |
| Only there |  | yes |  |
| It trains | yes | no | yes |
"""


@pytest.fixture(params=["", "-n 2 --dist loadfile"], ids=["in one process", "by two workers"])
def project(pytester, request):
    """A folder with these tests, which all pass, and without a table."""
    options = f"-p tests.support.compatibility --strict-markers {request.param}"
    pytester.makeini(f"[pytest]\ntestpaths = .\naddopts = {options}")
    pytester.makepyfile(TESTS.format(failing=0))
    return pytester


def page(project):
    return (project.path / FILE).read_text()


def test_the_table_has_a_row_per_behaviour_and_says_yes_where_all_its_tests_passed(project):
    assert project.runpytest_inprocess("--compatibility=write").ret == 0
    assert page(project) == HEAD + TABLE
    assert project.runpytest_inprocess().ret == 0


def test_a_cell_says_no_where_one_of_its_tests_failed_and_its_row_comes_first(project):
    project.makepyfile(TESTS.format(failing=2))
    assert project.runpytest_inprocess("--compatibility=write").ret == 1
    assert page(project) == HEAD + WITH_A_FAILURE


def test_a_run_of_the_whole_suite_fails_if_the_table_is_missing_or_differs(project):
    result = project.runpytest_inprocess()
    assert result.ret == 1 and result.parseoutcomes() == {"passed": 6}
    result.stdout.fnmatch_lines([f"*{FILE} is not what the tests say: run*--compatibility=write*"])
    project.runpytest_inprocess("--compatibility=write")
    project.makepyfile(TESTS.format(failing=0).replace("It trains", "It learns"))
    assert project.runpytest_inprocess().ret == 1
    assert "It trains" in page(project)


def test_the_table_can_be_written_from_all_marked_tests_but_not_from_some(project):
    assert project.runpytest_inprocess("-m", "behaviour", "--compatibility=write").ret == 0
    assert page(project) == HEAD + TABLE
    project.makepyfile(TESTS.format(failing=0).replace("It trains", "It learns"))
    assert project.runpytest_inprocess("-k", "test_unmarked").ret == 0
    result = project.runpytest_inprocess("-k", "test_unmarked", "--compatibility=write")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--compatibility=write needs every marked test*"])


def test_an_unknown_section_is_refused_and_the_sections_are_listed(project):
    project.makepyfile(TESTS.format(failing=0).replace("The Trainer", "The trainer"))
    result = project.runpytest_inprocess()
    assert result.parseoutcomes() == {"passed": 2, "errors": 4}
    result.stdout.fnmatch_lines(["*there is no section 'The trainer'*'The Trainer'*"])
