"""Random training programs give the weights and gradients of plain modules whose gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.examples.running import make
from tests.search.execution import execute
from tests.search.fabric_execution import execute_in_fabric
from tests.search.programs import Program, programs
from tests.search.trainer_execution import execute_in_trainer

SHARES = {
    "engine on 1": 0.15,
    "engine on 2": 0.5,
    "engine on 3": 0.1,
    "engine on 4": 0.1,
    "Trainer on 2": 0.05,
    "Fabric on 2": 0.1,
}
"""Shares of the programs, by runner and number of ranks; 4 ranks form two groups or machines."""

RUNNERS = {"engine": execute, "Trainer": execute_in_trainer, "Fabric": execute_in_fabric}


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("where", SHARES)
@pytest.mark.timeout(0)  # --programs determines how long it takes; each program has its own timeout
def test_random_programs_give_averaged_gradients(run_on, where, request):
    search(run_on, RUNNERS[where.split()[0]], int(where[-1]), SHARES[where], request.config)


def search(
    run_on: Callable[..., list[str | None]],
    run: Callable[[Program], str | None],
    ranks: int,
    share: float,
    config: pytest.Config,
) -> None:
    """Run a share of all random programs."""
    of_all = config.getoption("--programs") or (300 if config.getoption("--all") else 60)

    @seed(config.getoption("--programs-seed"))
    @settings(
        max_examples=round(of_all * share),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(programs(ranks))
    def holds(program: Program) -> None:
        check(run_on, run, program)

    holds()


def check(run_on: Callable[..., list[str | None]], run: Callable[[Program], str | None], program: Program) -> None:
    found = run_on(program.setup.ranks, run, program=program)
    assert found == [None] * program.setup.ranks, "\n".join(filter(None, found))


@pytest.mark.exhaustive
def test_make_search_runs_programs_of_every_runner_and_number_of_ranks():
    collected = make("search", "--collect-only -q")
    assert all(f"[{where}]" in collected for where in SHARES)
