"""Selects the tests of `make test`: the specification. `make test-all` (`pytest --all`) runs every test.

The specification omits tests marked ``exhaustive``, and most cases of heavily parametrized tests. With three or more
lists of parameters, cases are selected that cover every pair of values (pairwise coverage: most faults depend on one or
two values); with two lists and more than ``FEW`` cases, cases that cover every value, with the stages in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import combinations
from typing import Any

import pytest

FEW = 3

Values = tuple[tuple[int, str], ...]
"""Pairs of a parameter list's number and the name of one of its values; from one or several lists."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that the specification leaves out")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "exhaustive: run by `make test-all` only")


@pytest.hookimpl(trylast=True)  # after plug-ins that deselect by -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_asked_for_by_name = any("::" in argument for argument in config.args) or bool(config.getoption("keyword"))
    if config.getoption("--all") or is_asked_for_by_name:
        return
    left_out = {item for item in items if item.get_closest_marker("exhaustive") is not None}
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and len(_lists(item)) > 1:
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        lists = len(_lists(cases[0]))
        if lists > 2 or len(cases) > FEW:
            left_out |= set(cases) - set(covering(cases, min(lists - 1, 2)))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def exhaustive_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Arguments for ``parametrize``: all but those to keep in the specification are exhaustive. A tuple is several."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in kept else [pytest.mark.exhaustive],
        )
        for value in values
    ]


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
