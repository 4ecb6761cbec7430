"""Hooks of MkDocs: pages are written for GitHub, too; here they are adapted to the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import errors
from mkdocs.structure.files import File

_NOT_TESTED = re.compile(r"^( *```\w+) notest$", re.MULTILINE)
_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]+)\)")


def on_files(files: Any, config: Any) -> None:
    package = Path(config.config_file_path).parent / "lightning_zero"
    files.append(File.generated(config, "reference/errors.md", content=errors.page(package)))


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace links that leave ``docs/`` by links to the repository; remove marks that only tests read."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        kind = "tree" if (Path(config.config_file_path).parent / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path})"

    return _NOT_TESTED.sub(r"\1", _LINK.sub(replace, markdown))
