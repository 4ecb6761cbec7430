"""Hooks of MkDocs: pages link to files of the repository as on GitHub, and the site links to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace relative links that leave ``docs/`` by links to the repository."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, found[1]))
        if path.startswith("docs/"):
            return found[0]
        kind = "tree" if (Path(config.config_file_path).parent / path).is_dir() else "blob"
        return f"]({config.repo_url}/{kind}/main/{path})"

    return _LINK.sub(replace, markdown)
