"""Hooks of mkdocs: pages that live at the repository's top, and fences that only the tests read.

CONTRIBUTING.md and CHANGELOG.md are shown as pages of the site, their links made relative to it; a link to a file
that is no page becomes its text. What a fence says to the tests (`run`, `output`, `exit=3`) is taken off.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FROM_TOP = {"project/contributing.md": "CONTRIBUTING.md", "project/changelog.md": "CHANGELOG.md"}

_FENCE = re.compile(r"^( *```[a-z]+)((?: (?:run|output|exit=\d+))+)", re.M)
_LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page's text as mkdocs is to read it."""
    name = page.file.src_uri
    if name in FROM_TOP:
        markdown = relinked((ROOT / FROM_TOP[name]).read_text(), name)
    return _FENCE.sub(r"\1", markdown)


def relinked(text: str, page: str) -> str:
    """Links from the repository's top, as links from a page of the site."""
    return _LINK.sub(lambda found: _link(found[1], found[2], page), text)


def _link(words: str, target: str, page: str) -> str:
    if "://" in target or target.startswith("#"):
        return f"[{words}]({target})"
    pages = {top: name for name, top in FROM_TOP.items()}
    path, hash_sign, anchor = target.partition("#")
    inside = pages.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not inside:
        return words
    return f"[{words}]({posixpath.relpath(inside, posixpath.dirname(page))}{hash_sign}{anchor})"
