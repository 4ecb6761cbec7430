"""docs/reference/errors.md lists every error and warning of the library."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.docs.messages import PACKAGE, messages, opening_of

PAGE = PACKAGE.parent / "docs" / "reference" / "errors.md"


def test_the_page_has_every_message_of_the_source() -> None:
    found = messages()
    assert len(found) > 30, "this test no longer finds the messages"
    page = " ".join(PAGE.read_text().replace("`", "").split())
    missing = [f"{message.where}: {message.opening}" for message in found if message.opening not in page]
    assert not missing, f"add to {PAGE.name} what begins with these words, why it comes and what to do:\n" + "\n".join(
        missing
    )


def test_a_messages_opening_is_its_first_five_literal_words() -> None:
    def opening(source: str) -> str | None:
        return opening_of(ast.parse(source, mode="eval").body)

    assert opening("f'{name}={value!r} must be an integer of at least {least}.'") == "must be an integer of"
    assert opening("'%s is not written: after an exception'") == "is not written: after an"
    assert opening("'no ' 'such checkpoint'") == "no such checkpoint"
    assert opening("f'{a} or {b}'") is None
    assert opening("reason") is None


def test_messages_of_raised_errors_and_warnings_are_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "room.py").write_text(
        "def f(x):\n"
        "    if x:\n"
        "        raise ValueError(f'{x} is one too many')\n"
        "    log.warning('two is not enough: %d', x)\n"
        "    raise\n"
    )
    assert messages(package) == [
        ("is one too many", "package/room.py:3"),
        ("two is not enough", "package/room.py:4"),
    ]
