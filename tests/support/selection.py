"""Selects the tests of `make test`: the specification. `make test-all` (`pytest --all`) runs every test.

The specification omits tests marked ``exhaustive``, except for as many cases as ``exhaustive(but=...)`` says, and most
cases of heavily parametrized tests. With three or more
lists of parameters, cases are selected that cover every pair of values (pairwise coverage: most faults depend on one or
two values); with two lists and more than ``FEW`` cases, cases that cover every value, with the stages in turn. At each
stage, at least one test of each behaviour in docs/reference/compatibility.md is kept, even if all are ``exhaustive``.

With ``--minutes N``, tests that the specification omits start only in the first N minutes of the run, so that a slow
machine also comes to an end; the summary counts those that were skipped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

from tests.support.compatibility import NO_TIME, cells_of

FEW = 3

_BEGIN = pytest.StashKey[float]()
_LEFT_OUT = pytest.StashKey[set[pytest.Item]]()

Values = tuple[tuple[int, str], ...]
"""Pairs of a parameter list's number and the name of one of its values; from one or several lists."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that the specification leaves out")
    parser.addoption("--minutes", type=float, help="with --all: skip tests left out that would start after this time")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive(but=0): run by `make test-all` only, but for so many cases")
    config.stash[_BEGIN], config.stash[_LEFT_OUT] = time.monotonic(), set()


@pytest.hookimpl(trylast=True)  # after plug-ins that deselect by -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_asked_for_by_name = any("::" in argument for argument in config.args) or bool(config.getoption("keyword"))
    if is_asked_for_by_name and not config.getoption("--all"):
        return
    left_out = _left_out_of(items)
    if config.getoption("--all"):
        config.stash[_LEFT_OUT] = left_out
        return
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and item in item.config.stash[_LEFT_OUT]:
        if time.monotonic() - item.config.stash[_BEGIN] >= 60 * minutes:
            pytest.skip(f"{NO_TIME} after {minutes:g} minutes (--minutes)")


def _left_out_of(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that the specification leaves out."""
    marked: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (marker := item.get_closest_marker("exhaustive")) is not None:
            marked.setdefault((item.nodeid.partition("[")[0], marker.kwargs.get("but", 0)), []).append(item)
    left_out = set().union(*(set(cases) - set(_spread(cases, but)) for (_, but), cases in marked.items()))
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and len(_lists(item)) > 1:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        lists = len(_lists(cases[0]))
        if lists > 2 or len(cases) > FEW:
            left_out |= set(cases) - set(covering(cases, min(lists - 1, 2)))
    proven = {cell for item in items if item not in left_out for cell in cells_of(item)}
    for item in items:
        if not proven.issuperset(cells := cells_of(item)):
            left_out.discard(item)
            proven.update(cells)
    return left_out


def _spread(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Some of the cases, at equal distances."""
    return [cases[place * len(cases) // number] for place in range(number)]


def exhaustive_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Arguments for ``parametrize``: all but those to keep in the specification are exhaustive. A tuple is several."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in kept else [pytest.mark.exhaustive],
        )
        for value in values
    ]


def one_at_a_time(*lists: Sequence[Any]) -> list[Any]:
    """Arguments for ``parametrize`` of several names: a case of all lists' first values, which the specification keeps,
    and cases that differ from it in one value, which are exhaustive. For slow tests, instead of all combinations."""
    first = [values[0] for values in lists]
    others = [
        pytest.param(*first[:place], value, *first[place + 1 :], marks=pytest.mark.exhaustive)
        for place, values in enumerate(lists)
        for value in values[1:]
    ]
    return [pytest.param(*first), *others]


def _lists(item: pytest.Item) -> list[str]:
    """The names of a case's values, one for each list of parameters."""
    callspec = getattr(item, "callspec", None)
    return list(callspec._idlist) if callspec else []


def covering(cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Select few cases such that every combination of ``strength`` values that occurs in some case is covered.

    Greedy: takes the case that adds most combinations and, among equals, the one whose values were taken least often.
    """
    values = {case: tuple(enumerate(_lists(case))) for case in cases}
    met = {case: set(combinations(values[case], strength)) for case in cases}
    missing: set[Values] = set().union(*met.values())
    taken: Counter[tuple[int, str]] = Counter()
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(met[case] & missing), -sum(taken[value] for value in values[case])))
        chosen.append(best)
        taken.update(values[best])
        missing -= met[best]
    return chosen
