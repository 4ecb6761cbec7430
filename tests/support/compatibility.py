"""Generates the table of docs/reference/compatibility.md from the tests: one row per behaviour, one column per stage.

A test names the behaviour it covers, in a user's words:

    @pytest.mark.behaviour("The Trainer", "Gradient clipping by norm equals DDP's")
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_trainers_own_clipping_acts_as_under_ddp(run_on, stage): ...

The test counts for its parameter `stage`, or for all stages if it has none. Several tests may share a behaviour: a cell
is "yes" if all of them passed at that stage, "no" if one failed, and empty without a test. If the result is not a plain
yes, `notes={3: "refused: names the unit"}` is shown instead of "yes". Rows with anything but "yes" come first.

`pytest --compatibility=write` writes the table; `pytest -m behaviour --compatibility=write` takes less time. A run of
the whole suite fails at its end if the table in the repository differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECTIONS = ["The numbers", "The module", "The Trainer", "Fabric"]
STAGES = [1, 2, 3]
FILE = Path("docs", "reference", "compatibility.md")

HEAD = """\
# Compatibility

This page lists what existing projects do and whether it gives DDP's result, the exceptions first. "Yes" means: bit for
bit in fp32 on two ranks; within 1e-6 where a global norm is involved, gradients are added in another order, or the
module is compiled and DDP's is not. The tests write this page (`pytest --compatibility=write`), and fail where it
differs.
"""

EXCEPTIONS = "Exceptions"
"""The section of the rows that are not "yes" at every stage; these rows are left out of their own sections."""


@dataclass
class Row:
    """One behaviour: its tests' outcomes by stage, and notes that replace "yes" in a cell.

    `first` is the number of its first test, which need not be among those that have run.
    """

    first: int
    outcomes: dict[int, list[bool]] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)

    def cell(self, stage: int) -> str:
        if stage not in self.outcomes:
            return self.notes.get(stage, "")
        return self.notes.get(stage, "yes") if all(self.outcomes[stage]) else "no"


def render(rows: dict[tuple[str, str], Row]) -> str:
    """Render the page, with the rows of a section in the order of collection."""
    tables: dict[str, list[str]] = {section: [] for section in (EXCEPTIONS, *SECTIONS)}
    ordered = sorted(rows.items(), key=lambda item: (SECTIONS.index(item[0][0]), item[1].first))
    for (section, words), row in ordered:
        cells = [row.cell(stage) for stage in STAGES]
        table = section if cells == ["yes"] * len(STAGES) else EXCEPTIONS
        tables[table].append(f"| {words} | {' | '.join(cells)} |")
    lines = [HEAD]
    for section, table_rows in tables.items():
        if table_rows:
            head = f"| | {' | '.join(f'stage {stage}' for stage in STAGES)} |"
            lines += [f"## {section}\n", head, "|---|---|---|---|", *table_rows, ""]
    return "\n".join(lines)


def cells_of(item: pytest.Item) -> set[tuple[str, str, int]]:
    """The cells of the table that a test proves: (section, words, stage)."""
    said = [_read(*marker.args, **marker.kwargs) for marker in item.iter_markers("behaviour")]
    return {(section, words, stage) for section, words, _ in said for stage in _stages_of(item)}


def _stages_of(item: pytest.Item) -> list[int]:
    callspec = getattr(item, "callspec", None)  # only parametrized tests have it
    only = callspec.params.get("stage") if callspec else None
    return STAGES if only is None else [only]


NO_TIME = "not started"
"""Begins the reason for skipping a test for which there was no time (see ``selection``); it proves nothing."""

_SAYS = "behaviour"
"""Key of the data that pytest-xdist's workers, which collect and run, send to the process that gathers reports."""


class Marked:
    """Collects marked tests in the process that runs them: pytest itself, or a worker of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.number = self.left_out = 0
        self.first: dict[tuple[str, str], int] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        stages = _stages_of(item)
        said = [[stages, *_read(*marker.args, **marker.kwargs)] for marker in item.iter_markers("behaviour")]
        if said:
            for each in said:
                each.append(self.first.setdefault((each[1], each[2]), self.number))
            item.user_properties.append((_SAYS, [self.number, said]))
            self.number += 1

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Record tests that the specification omits (see ``selection``); other tests cover their behaviour."""
        self.left_out += sum(any(name == _SAYS for name, _ in item.user_properties) for item in items)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for marker in item.iter_markers("behaviour"):
            if marker.args[0] not in SECTIONS:
                pytest.fail(f"there is no section {marker.args[0]!r} of behaviours, only {SECTIONS}", pytrace=False)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_SAYS] = self.number - self.left_out


class Compatibility:
    """Gathers the outcomes of all tests, and compares or writes the page at the end of the run."""

    def __init__(self, config: pytest.Config, marked: Marked) -> None:
        self.file = config.rootpath / FILE
        self.writes = config.getoption("--compatibility") == "write"
        has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
        chooses = any(map(config.getoption, ("ignore", "ignore_glob", "deselect", "keyword")))
        self.may_be_whole = not (has_paths or chooses or config.getoption("markexpr") not in ("", "behaviour"))
        if self.writes and not self.may_be_whole:
            raise pytest.UsageError("--compatibility=write needs every marked test: leave out paths, -k and the like.")
        self.marked = marked
        self.number: int | None = None  # number of marked tests, as reported by the workers
        self.not_started = 0
        self.passed: dict[int, bool] = {}
        self.said: dict[int, list[tuple[list[int], str, str, dict[int, str], int]]] = {}
        self.verdict: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_SAYS)
        if found and report.skipped and NO_TIME in str(report.longrepr):
            self.not_started += 1
        elif found and (report.when == "call" or not report.passed):
            place, said = found
            self.said[place] = said
            self.passed[place] = self.passed.get(place, True) and report.passed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.number = getattr(node, "workeroutput", {}).get(_SAYS, self.number)

    def rows(self) -> dict[tuple[str, str], Row]:
        rows: dict[tuple[str, str], Row] = {}
        for place in sorted(self.said):
            for stages, section, words, notes, first in self.said[place]:
                row = rows.setdefault((section, words), Row(first))
                row.notes.update(notes)
                for stage in stages:
                    row.outcomes.setdefault(stage, []).append(self.passed[place])
        return rows

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        number = self.number or self.marked.number - self.marked.left_out
        is_over = number > 0 and len(self.passed) + self.not_started == number
        if not self.may_be_whole or not is_over or (session.testsfailed and not self.writes):
            return  # a failing test must be fixed, not documented
        page = render(self.rows())
        if self.writes:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(page)
            self.verdict = f"{FILE} was written."
        elif not self.file.exists() or self.file.read_text() != page:
            self.verdict = f"{FILE} is not what the tests say: run `pytest -m behaviour --compatibility=write`."
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.verdict is not None:
            terminalreporter.section("compatibility")
            terminalreporter.line(self.verdict)


def _read(section: str, words: str, notes: dict[int, str] | None = None) -> tuple[str, str, dict[int, str]]:
    return section, words, notes or {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compatibility", choices=["write"], help=f"write {FILE} from the outcomes of this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "behaviour(section, words, notes={}): a row of docs/reference/compatibility.md")
    config.pluginmanager.register(marked := Marked(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Compatibility(config, marked))
