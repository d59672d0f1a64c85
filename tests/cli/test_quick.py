"""A command loads what it needs and no more, and its values are what Typer would have made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from gpulayer.cli.failing import is_usage_error, usage_line
from gpulayer.cli.quick import Command

# What takes long to load, and is not needed to put a command into the queue.
SLOW = ("pydantic", "rich", "numpy", "torch", "cloudpickle", "dramatiq", "psutil", "IPython")
# What belongs to following a job, and to many jobs.
FURTHER = (
    "gpulayer.cli.documents",
    "gpulayer.cli.follow",
    "gpulayer.logs",
    "gpulayer.cli.many",
)
LOADED = """
import json, sys
from gpulayer.cli import run
assert run(sys.argv[1:]) == 0
json.dump(sorted(sys.modules), sys.stderr)
"""


def loaded_by(*arguments: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: list[str] = json.loads(ended.stderr.splitlines()[-1])
    return found


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    "arguments",
    [
        [
            "submit",
            "--detach",
            "--gpus",
            "0",
            "--retries",
            "2",
            "--outputs-to",
            "x",
            "--env",
            "A=1",
            "--",
            "true",
        ],
        ["jobs", "-n", "5", "--state", "failed"],
        ["--help"],
        ["submit", "--help"],
    ],
)
def test_a_command_loads_nothing_that_takes_long_and_is_not_needed(arguments: list[str]) -> None:
    assert not set(SLOW) & {name.partition(".")[0] for name in loaded_by(*arguments)}


@pytest.mark.usefixtures("bench")
def test_a_submit_that_leaves_at_once_loads_nothing_of_what_comes_after() -> None:
    assert not set(FURTHER) & set(loaded_by("submit", "--detach", "--", "true"))


def show(
    text: Annotated[str, typer.Option()] = "t",
    number: Annotated[int | None, typer.Option()] = None,
    bounded: Annotated[int, typer.Option(min=1)] = 50,
    ranged: Annotated[int, typer.Option(min=1, max=9)] = 5,
    folder: Annotated[Path | None, typer.Option()] = None,
    many: Annotated[list[str] | None, typer.Option()] = None,
    numbers: Annotated[list[int] | None, typer.Option()] = None,
    flag: Annotated[bool, typer.Option("--flag")] = False,
    words: Annotated[list[str] | None, typer.Argument()] = None,
) -> None:
    """Says what it was given."""
    raise Given((text, number, bounded, ranged, folder, many, numbers, flag, words))


class Given(Exception):
    """What a command was given."""


def outcome(arguments: list[str], cls: type[typer.core.TyperCommand]) -> Any:
    """What the command was given, or the line that tells why not."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
    app.command(cls=cls)(show)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what Typer raises depends on its version
        app(arguments, prog_name="show", standalone_mode=False)
    error = raised.value
    assert isinstance(error, Given) or is_usage_error(error)
    return error.args[0] if isinstance(error, Given) else usage_line(error)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--text", ""],
        ["--text", "5"],
        ["--number", "7"],
        ["--number", "-7"],
        ["--number", "007"],
        ["--number", "1_000"],
        ["--number", " 7 "],
        ["--number", "7.0"],
        ["--number", "9" * 30],
        ["--bounded", "1"],
        ["--ranged", "9"],
        ["--folder", "a/../b"],
        ["--many", "1", "--many", "x"],
        ["--numbers", "1", "--numbers", "2"],
        ["--flag"],
        ["--flag", "a", "b"],
        ["--", "--flag", "-1"],
        ["--nothing"],
        ["--number"],
    ],
    ids=" ".join,
)
def test_values_are_what_typer_makes_of_them(arguments: list[str]) -> None:
    assert outcome(arguments, Command) == outcome(arguments, typer.core.TyperCommand)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--number", "seven", "'seven' is not a whole number"),
        ("--number", "1.5", "'1.5' is not a whole number"),
        ("--number", "\N{ARABIC-INDIC DIGIT SEVEN}", "'\N{ARABIC-INDIC DIGIT SEVEN}' is not a whole number"),
        ("--number", "", "'' is not a whole number"),
        ("--bounded", "0", "'0' is not a whole number of 1 or more"),
        ("--bounded", "-1", "'-1' is not a whole number of 1 or more"),
        ("--ranged", "10", "'10' is not a whole number from 1 to 9"),
        ("--numbers", "x", "'x'"),
    ],
)
def test_a_value_that_typer_refuses_is_shown(option: str, value: str, text: str) -> None:
    assert f"invalid value for '{option}': " in outcome([option, value], typer.core.TyperCommand)
    assert f"invalid value for '{option}': " in outcome([option, value], Command)
    assert text in outcome([option, value], Command)


def test_a_path_that_is_empty_is_refused_and_not_the_current_folder() -> None:
    assert "invalid value for '--folder': it is empty" in outcome(["--folder", ""], Command)
