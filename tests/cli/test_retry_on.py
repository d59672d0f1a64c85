"""`--retries` and `--retry-on`, by a real worker: which failures are tried again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli

pytestmark = pytest.mark.usefixtures("worker")


@pytest.mark.parametrize(("code", "attempts"), [(75, 2), (3, 1)])
def test_only_the_named_exit_codes_are_tried_again(cli: Cli, code: int, attempts: int) -> None:
    command = ("--retries", "1", "--retry-on", "75", "--", "sh", "-c", f"exit {code}")

    outcome = cli("submit", "--json", *command)

    assert (outcome.code, json.loads(outcome.out)["attempt"]) == (code, attempts)


@pytest.mark.parametrize(("error", "attempts"), [("ConnectionResetError", 2), ("ValueError", 1)])
def test_only_the_named_exceptions_and_what_derives_from_them_are_tried_again(
    cli: Cli, here: Path, error: str, attempts: int
) -> None:
    (here / f"fails_{error}.py").write_text(f"def job():\n    raise {error}('no')\n")

    outcome = cli(
        "run",
        f"fails_{error}:job",
        "--retries",
        "1",
        "--retry-on",
        "ConnectionError",
        "--retry-on",
        "oom",
        "--json",
    )

    assert (outcome.code, json.loads(outcome.out)["attempt"]) == (1, attempts)
