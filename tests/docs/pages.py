"""The documentation as files: every page, its fenced blocks, its links.

A fence's first line says what a block is: ```` ```bash run ```` and ```` ```python run ```` are executed, `exit=3`
among its words tells the exit code that is expected, `title="a/b.py"` is written to that file first, and
```` ```text output ```` is what the block before it prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)$", re.M | re.S
)
_TITLE = re.compile(r'title="([^"]+)"')
_EXIT = re.compile(r"exit=(\d+)")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    info: str
    body: str

    @property
    def words(self) -> list[str]:
        return _TITLE.sub("", self.info).split()

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def runs(self) -> bool:
        return "run" in self.words

    @property
    def is_output(self) -> bool:
        return self.words == ["text", "output"]

    @property
    def title(self) -> str:
        found = _TITLE.search(self.info)
        return found[1] if found else ""

    @property
    def exit_code(self) -> int:
        found = _EXIT.search(self.info)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """All pages, those of the repository's top first."""
    return [ROOT / name for name in TOP_PAGES] + sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["info"].strip(), _dedented(found))
        for found in _FENCE.finditer(text)
    ]


def _dedented(found: re.Match[str]) -> str:
    width = len(found["indent"])
    return "".join(line[width:] for line in found["body"].splitlines(keepends=True))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """What the page's links and images point to."""
    for found in _LINK.finditer(prose(page)):
        yield found[1] or found[2]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as its readers' sites make them."""
    headings = re.findall(r"^#{1,6} (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
