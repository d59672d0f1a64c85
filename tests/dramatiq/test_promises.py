"""The guide lists what is promised: every line names a test that is there, every file of tests is named."""

from __future__ import annotations

import re
from pathlib import Path

from dramatiq import middleware

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guides" / "dramatiq.md"


def named() -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+\.py)::(test_\w+)`", GUIDE.read_text())


def test_every_promise_of_the_guide_names_a_test_that_is_there() -> None:
    missing = [f"{file}::{test}" for file, test in named() if f"def {test}(" not in (HERE / file).read_text()]

    assert len(named()) >= 30
    assert not missing


def test_every_file_of_tests_holds_a_promise_of_the_guide() -> None:
    files = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}

    assert files == {file for file, _ in named()}


def test_every_stock_middleware_has_its_line() -> None:
    stock = {each.__name__ for each in middleware.default_middleware}
    stock |= {"AsyncIO", "CurrentMessage", "GroupCallbacks", "Prometheus", "Results"}

    assert stock <= set(re.findall(r"^\| `(\w+)` \| `test_", GUIDE.read_text(), re.M))
