"""The tests that `make test` selects: few cases of matrices, and still one test of each behaviour at each stage."""

from __future__ import annotations

import pytest

TESTS = """
    import pytest

    @pytest.mark.exhaustive
    @pytest.mark.behaviour("The Trainer", "It trains")
    @pytest.mark.parametrize("offload", ["cpu", "nvme"])
    @pytest.mark.parametrize("stage", [1, 2])
    def test_train(stage, offload):
        pass

    @pytest.mark.behaviour("The Trainer", "It trains")
    @pytest.mark.parametrize("stage", [2])
    def test_two(stage):
        pass

    @pytest.mark.exhaustive
    def test_unmarked():
        pass

    @pytest.mark.parametrize("a", range(4))
    @pytest.mark.parametrize("b", range(4))
    def test_two_lists(a, b):
        pass

    @pytest.mark.parametrize("a", range(4))
    @pytest.mark.parametrize("b", range(4))
    @pytest.mark.parametrize("c", range(4))
    def test_three_lists(a, b, c):
        assert 0 <= a < 4
"""


TESTS_OF_A_TABLE = """
    import pytest
    from tests.support.selection import one_at_a_time

    @pytest.mark.behaviour("The Trainer", "It trains")
    @pytest.mark.parametrize(("stage", "kind"), one_at_a_time([1, 2], ["a", "b", "c"]))
    def test_train(stage, kind):
        pass
"""

TESTS_OF_A_SLOW_LIST = """
    import pytest

    @pytest.mark.exhaustive(but=2)
    @pytest.mark.parametrize("a", range(8))
    def test_slowly(a):
        pass
"""


@pytest.fixture
def project(pytester):
    pytester.makeini("[pytest]\naddopts = -p tests.support.compatibility -p tests.support.selection --strict-markers")
    pytester.makepyfile(TESTS)
    return pytester


def selected(project, *arguments):
    result = project.runpytest_inprocess("--collect-only", "-q", *arguments)
    return [line.partition("::")[2] for line in result.outlines if "::" in line]


def test_with_all_every_test_runs(project):
    assert len(selected(project, "--all")) == 4 + 1 + 1 + 16 + 64


def test_an_exhaustive_test_is_kept_where_no_other_test_proves_its_behaviour_at_a_stage(project):
    found = selected(project)
    assert [name for name in found if "lists" not in name] == ["test_train[1-cpu]", "test_two[2]"]


def test_of_an_exhaustive_test_so_many_cases_are_kept_as_its_mark_says(project):
    project.makepyfile(TESTS_OF_A_SLOW_LIST)
    assert selected(project) == ["test_slowly[0]", "test_slowly[4]"]
    assert len(selected(project, "--all")) == 8


def test_selected_cases_cover_every_value_of_two_lists_and_every_pair_of_three(project):
    cases = {name: [] for name in ("test_two_lists", "test_three_lists")}
    for name, values in (name.rstrip("]").split("[") for name in selected(project) if "lists" in name):
        cases[name].append(values.split("-"))
    assert len(cases["test_two_lists"]) == 4
    assert all(len({case[place] for case in cases["test_two_lists"]}) == 4 for place in range(2))
    for place, other in ((0, 1), (0, 2), (1, 2)):
        assert len({(case[place], case[other]) for case in cases["test_three_lists"]}) == 16
    assert 16 <= len(cases["test_three_lists"]) < 32


def test_cases_that_differ_in_one_value_from_the_first_are_exhaustive(project):
    project.makepyfile(TESTS_OF_A_TABLE)
    assert selected(project, "--all") == ["test_train[1-a]", "test_train[2-a]", "test_train[1-b]", "test_train[1-c]"]
    assert selected(project) == ["test_train[1-a]", "test_train[2-a]"]  # stage 2 because nothing else proves it there


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two workers"])
def test_out_of_time_the_tests_left_out_are_skipped_and_the_table_is_still_checked(project, workers):
    project.makepyfile(TESTS_OF_A_TABLE)
    assert project.runpytest_inprocess("--all", "--compatibility=write").ret == 0
    result = project.runpytest_inprocess("--all", "--minutes", "0", "-rs", *workers)
    assert result.ret == 0 and result.parseoutcomes() == {"passed": 2, "skipped": 2}
    result.stdout.fnmatch_lines(["SKIPPED * not started after 0 minutes (--minutes)"])
    project.makepyfile(TESTS_OF_A_TABLE.replace("It trains", "It learns"))
    result = project.runpytest_inprocess("--all", "--minutes", "0", *workers)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*compatibility.md is not what the tests say*"])
