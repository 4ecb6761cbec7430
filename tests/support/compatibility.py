"""The table of docs/compatibility.md, written from the tests: one row a behaviour, one column a stage.

A test says which behaviour it is about, in a user's words:

    @pytest.mark.behaviour("The Trainer", "Gradient clipping by norm equals DDP's")
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_the_trainers_own_clipping_acts_as_under_ddp(run_on, stage): ...

It speaks for its parameter `stage`, or for all stages where it has none. Several tests may share a behaviour: a cell
says "yes" if all of them passed at that stage, "no" if one did not, and nothing where there is none. Where the answer
is not a plain yes, `notes={3: "refused: names the unit"}` says what the tests of that stage have shown instead.

`pytest --compatibility=write` writes the table; `pytest -m behaviour --compatibility=write` does it in less time. A run
of the whole suite fails at its end if the table in the repository is another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SECTIONS = ["The numbers", "The module", "The Trainer", "Fabric"]
STAGES = [1, 2, 3]
FILE = Path("docs", "compatibility.md")

HEAD = """\
# Compatibility

What an existing project does, and whether it gives DDP's result: bit for bit in fp32 on two ranks, within 1e-6 where a
global norm is involved, gradients are added in another order, or the module is compiled and DDP's is not. This page is
written by the tests (`pytest --compatibility=write`), and the tests fail where it says something else than they do.
"""


@dataclass
class Row:
    """One behaviour: the outcomes of its tests by stage, and what a cell says instead of "yes"."""

    outcomes: dict[int, list[bool]] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)

    def cell(self, stage: int) -> str:
        if stage not in self.outcomes:
            return self.notes.get(stage, "")
        return self.notes.get(stage, "yes") if all(self.outcomes[stage]) else "no"


def render(rows: dict[tuple[str, str], Row]) -> str:
    """The page, with the rows of a section in the order in which they were found."""
    lines = [HEAD]
    for section in SECTIONS:
        found = {words: row for (of, words), row in rows.items() if of == section}
        if found:
            lines += [
                f"## {section}\n",
                f"| | {' | '.join(f'stage {stage}' for stage in STAGES)} |",
                "|---|---|---|---|",
            ]
            lines += [f"| {words} | {' | '.join(map(row.cell, STAGES))} |" for words, row in found.items()]
            lines += [""]
    return "\n".join(lines)


_SAYS = "behaviour"
"""What is handed from pytest-xdist's workers, which collect and run, to the process that gathers their reports."""


class Marked:
    """The marked tests, in the process that runs them: pytest itself, or each worker of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.number = 0

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        callspec = getattr(item, "callspec", None)  # pytest has it where a test has parameters
        only = callspec.params.get("stage") if callspec else None
        stages = STAGES if only is None else [only]
        said = [[stages, *_read(*marker.args, **marker.kwargs)] for marker in item.iter_markers("behaviour")]
        if said:
            item.user_properties.append((_SAYS, [self.number, said]))
            self.number += 1

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for marker in item.iter_markers("behaviour"):
            if marker.args[0] not in SECTIONS:
                pytest.fail(f"there is no section {marker.args[0]!r} of behaviours, only {SECTIONS}", pytrace=False)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[_SAYS] = self.number


class Compatibility:
    """Gathers the outcomes of the tests of a run, and compares or writes the page at its end."""

    def __init__(self, config: pytest.Config, marked: Marked) -> None:
        self.file = config.rootpath / FILE
        self.writes = config.getoption("--compatibility") == "write"
        has_paths = config.args_source is pytest.Config.ArgsSource.ARGS
        chooses = any(map(config.getoption, ("ignore", "ignore_glob", "deselect", "keyword")))
        self.may_be_whole = not (has_paths or chooses or config.getoption("markexpr") not in ("", "behaviour"))
        if self.writes and not self.may_be_whole:
            raise pytest.UsageError("--compatibility=write needs every marked test: leave out paths, -k and the like.")
        self.marked = marked
        self.number: int | None = None  # of marked tests, as workers say it
        self.passed: dict[int, bool] = {}
        self.said: dict[int, list[tuple[list[int], str, str, dict[int, str]]]] = {}
        self.verdict: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_SAYS)
        if found and (report.when == "call" or not report.passed):
            place, said = found
            self.said[place] = said
            self.passed[place] = self.passed.get(place, True) and report.passed

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.number = getattr(node, "workeroutput", {}).get(_SAYS, self.number)

    def rows(self) -> dict[tuple[str, str], Row]:
        rows: dict[tuple[str, str], Row] = {}
        for place in sorted(self.said):
            for stages, section, words, notes in self.said[place]:
                row = rows.setdefault((section, words), Row())
                row.notes.update(notes)
                for stage in stages:
                    row.outcomes.setdefault(stage, []).append(self.passed[place])
        return rows

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        number = self.number or self.marked.number
        is_over = number > 0 and len(self.passed) == number
        if not self.may_be_whole or not is_over or (session.testsfailed and not self.writes):
            return  # a test that failed is to be mended, not to be written down
        page = render(self.rows())
        if self.writes:
            self.file.parent.mkdir(exist_ok=True)
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
    config.addinivalue_line("markers", "behaviour(section, words, notes={}): a row of docs/compatibility.md")
    config.pluginmanager.register(marked := Marked(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Compatibility(config, marked))
