"""Every link to another page, a heading or a file of the repository has an existing target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
# Links of the README, which are absolute so that they work on a package index, too.
_IN_REPOSITORY = re.compile(
    r"^https://(?:github|raw\.githubusercontent)\.com/lightning-zero/lightning_zero/(?:blob/|tree/)?main/"
)


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them: lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"^ *```.*?```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = _IN_REPOSITORY.sub(f"{REPOSITORY}/", link).partition("#")
        target = page.parent / path if path else page
        if not path.startswith("http") and not (target.exists() and (not anchor or anchor in anchors_of(target))):
            dead.append(link)
    assert not dead


def test_the_readme_also_links_to_the_repository_from_a_package_index() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (REPOSITORY / "README.md").read_text())
    assert all(link.startswith("https://") for link in links)
    assert sum(bool(_IN_REPOSITORY.match(link)) for link in links) > 10, "this test no longer finds them"
