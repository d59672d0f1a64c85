"""Every command says what it does, with an example, and can print a document; shells complete its name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer.main

from gpulayer.cli.app import app
from tests.cli.conftest import Cli

# These run something else, or only print words.
WITHOUT_DOCUMENT = {("worker",)}


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield (*path, name), command
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("path", "command"), ALL, ids=["-".join(path) for path, _ in ALL])
def test_every_command_has_help_with_an_example_that_names_it(
    cli: Cli, path: tuple[str, ...], command: object
) -> None:
    outcome = cli(*path, "--help")

    assert outcome.code == 0
    assert f"Example: gpulayer {' '.join(path)}" in " ".join(outcome.out.split())
    if path not in WITHOUT_DOCUMENT:
        assert "--json" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sumbit"], "did you mean 'submit'?"),
        (["worker", "statsu"], "did you mean 'status'?"),
        (["jobs", "--jsno"], "did you mean '--json'?"),
        (["gc", "--older-thn", "1d"], "did you mean '--older-than'?"),
    ],
)
def test_a_slip_is_answered_with_the_nearest_there_is(cli: Cli, arguments: list[str], text: str) -> None:
    outcome = cli(*arguments)

    assert outcome.code == 2
    assert text in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["resources"]])
def test_a_group_without_a_command_shows_its_help_as_it_is_written(cli: Cli, arguments: list[str]) -> None:
    outcome = cli(*arguments)

    assert outcome.code == 2
    assert outcome.err.rstrip() == cli(*arguments, "--help").out.rstrip()
    assert len(outcome.err.splitlines()) > 5


def test_the_help_cuts_no_sentence(cli: Cli) -> None:
    assert "..." not in cli("--help").out.replace("[ARGS]...", "")


def test_python_runs_the_command_line_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "gpulayer", "--version"], capture_output=True, text=True, check=True
    )

    assert found.stdout.startswith("gpulayer ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("gpulayer re", {"resources", "retry"}),
        ("gpulayer worker st", {"start", "status", "stop"}),
        ("gpulayer submit --priority h", {"high"}),
        ("gpulayer submit --accelerator c", {"cpu", "cuda"}),
        ("gpulayer submit --profile pytorch-c", {"pytorch-cpu", "pytorch-cuda"}),
        ("gpulayer submit --retry-on o", {"oom"}),
        ("gpulayer run --isolation w", {"warm"}),
        ("gpulayer jobs --state s", {"scheduled", "succeeded"}),
    ],
)
def test_a_shell_completes_commands_and_words(words: str, expected: set[str]) -> None:
    environment = {
        **os.environ,
        "_GPULAYER_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    found = subprocess.run(
        [sys.executable, "-c", "from gpulayer.cli import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert set(found.stdout.split()) == expected, found.stderr
