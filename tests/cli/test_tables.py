"""Tables on a terminal: on a narrow one a job keeps one line, and only names and prose give way."""

from __future__ import annotations

import io
import re

import pytest

from gpulayer.cli.output import print_table

COLUMNS = ("job", "state", "name", "worker", "run time", "age")
NAME = "train_the_largest_model_of_all.<locals>.one_step"
ROW = ("j_0123456789ab", "failed (user_error)", NAME, "alpha", "112.39 s", "3 min")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    """The lines of the table on a terminal so wide."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(COLUMNS, [ROW])
    return re.sub("\x1b\\[[0-9;]*m", "", terminal.getvalue()).splitlines()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_facts_of_a_job_stay_whole_on_a_terminal_of_any_width(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    lines = drawn(monkeypatch, width)
    (line,) = [line for line in lines if ROW[0] in line]
    assert all(field in line for field in ROW if field != NAME)
    assert (NAME in line) == (width == 160)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [1, 20, 60])
def test_where_a_table_does_not_fit_no_fact_is_cut(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    (line,) = [line for line in drawn(monkeypatch, width) if ROW[0] in line]

    assert all(field in line for field in ROW if field != NAME)
