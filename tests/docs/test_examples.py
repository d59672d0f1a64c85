"""The examples of README and documentation, run as they stand there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_broker.connection import Endpoint
from tests.docs.pages import ROOT, blocks, pages
from tests.docs.running import PageFolder, matches

PAGES_WITH_EXAMPLES = [page for page in pages() if any(block.runs for block in blocks(page))]


@pytest.fixture
def page_folder(tmp_path: Path, valkey: Endpoint) -> Iterator[PageFolder]:
    folder = PageFolder(tmp_path, valkey.url)
    yield folder
    folder.down()


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_is_what_happens(page: Path, page_folder: PageFolder) -> None:
    printed = ""
    for block in blocks(page):
        if block.runs:
            printed = page_folder.run(block)
        elif block.is_output:
            assert matches(printed, block.body), (
                f"{block} shows\n{block.body}\nbut this is printed:\n{printed}"
            )
        elif block.title:
            page_folder.write(block)


def test_the_readme_has_examples() -> None:
    assert ROOT / "README.md" in PAGES_WITH_EXAMPLES


@pytest.mark.parametrize(
    ("printed", "documented"),
    [
        ("a\nb\n", "a\n"),
        ("a\n", "a\nb\n"),
        ("job j_0123456789ab failed\n", "job j_0123456789ab succeeded\n"),
        ("a\nx\n", "a\n…\nb\n"),
    ],
)
def test_another_output_is_seen(printed: str, documented: str) -> None:
    assert not matches(printed, documented)


@pytest.mark.parametrize(
    ("printed", "documented"),
    [
        ("job j_0123456789ab ran 0.01 s\n", "job j_aaaaaaaaaaaa ran 12.50 s\n"),
        ("a   b\n\n", "a b\n"),
        ("a\nx\ny\nb\n", "a\n…\nb\n"),
        ("one two three\n", "one … three\n"),
        (f"on {os.uname().nodename}\n", "on vm\n"),
    ],
)
def test_what_differs_from_run_to_run_is_no_other_output(printed: str, documented: str) -> None:
    assert matches(printed, documented)
