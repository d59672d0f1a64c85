"""`gpulayer run`: functions by name on a real worker, and what is said of what cannot be called."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.cli.run_function import plain_value
from gpulayer.options import KNOWN
from gpulayer_broker import spec as specs
from gpulayer_broker.arguments import Wording
from gpulayer_broker.connection import Link
from gpulayer_broker.queue import Queue
from tests.cli.conftest import Cli, Outcome
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S

Spawn = Callable[..., "subprocess.Popen[str]"]

MODULE = """
import gpulayer as gl

def power(base, exponent=2, *, note=""):
    print("computing", note)
    if base == 13:
        raise ValueError("unlucky")
    return {"value": base ** exponent, "note": note}

@gl.remote(name="mine", priority="low", isolation="warm")
def double(n):
    return 2 * n

number = 3
"""


@pytest.fixture
def project(here: Path) -> Path:
    (here / "job_functions.py").write_text(MODULE)
    return here


@pytest.fixture
def run(spawn: Spawn, project: Path) -> Callable[..., Outcome]:
    """Runs a function by a command line of its own process, which imports the module anew."""

    def call(*arguments: str) -> Outcome:
        process = spawn("run", *arguments)
        out, err = process.communicate(timeout=PATIENCE_S)
        return Outcome(process.returncode, out, err)

    return call


@pytest.mark.usefixtures("worker")
def test_the_result_alone_is_on_stdout_as_json(run: Callable[..., Outcome]) -> None:
    outcome = run("job_functions:power", "--arg", "3", "--kw", "exponent=3", "--kw", "note=a text")

    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == {"value": 27, "note": "a text"}
    assert "computing a text" in outcome.err


@pytest.mark.usefixtures("worker")
def test_an_exception_is_one_line_and_exit_code_1(run: Callable[..., Outcome]) -> None:
    outcome = run("job_functions:power", "--arg", "13", "--json")

    assert outcome.code == 1
    assert "gpulayer: ValueError: unlucky" in outcome.err
    document = json.loads(outcome.out)
    assert (document["end_reason"], document["result"]) == ("user_error", None)


@pytest.mark.usefixtures("worker")
def test_a_map_prints_a_line_for_each_line_of_its_file(run: Callable[..., Outcome], project: Path) -> None:
    (project / "items.jsonl").write_text("2\n\n13\n4\n")

    outcome = run("job_functions:power", "--map", "items.jsonl", "--kw", "exponent=1")

    first, second, third = map(json.loads, outcome.out.splitlines())
    assert (first["value"], third["value"]) == (2, 4)
    assert (second["type"], second["message"]) == ("ValueError", "unlucky")
    assert outcome.code == 1
    assert "1 of 3 calls failed" in outcome.err


def test_a_map_of_a_warm_function_is_one_array_under_its_own_options(
    run: Callable[..., Outcome], project: Path, bench: Bench, link: Link, namespace: str
) -> None:
    (project / "items.jsonl").write_text("\n".join(map(str, range(30))))

    outcome = run("job_functions:double", "--map", "items.jsonl", "--detach", "--priority", "high")

    record = Queue(link, namespace).record(outcome.out.strip())
    assert (record.count, record.name, record.priority) == (30, "mine", 1)
    assert specs.decode(record.spec).isolation == "warm"


def test_a_document_tells_each_call_and_why_it_all_ended(
    spawn: Spawn, project: Path, bench: Bench, link: Link, namespace: str
) -> None:
    (project / "items.jsonl").write_text("1\n2\n")
    process = spawn("run", "job_functions:power", "--map", "items.jsonl", "--json")
    bench.serve(2, lambda _: 7)
    out, err = process.communicate(timeout=PATIENCE_S)

    document = json.loads(out)
    assert process.returncode == 0, err
    assert document["failed"] == 0
    assert document["end_reason"] is None
    assert [each["result"] for each in document["results"]] == [7, 7]
    assert [each[:2] for each in document["ids"]] == ["g_"]


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["job_functions"], "write MODULE:FUNCTION, such as train:main"),
        (["job_functions.py:power"], "write the module's name, job_functions:power"),
        (["no_such_module:main"], "no module 'no_such_module' here or installed"),
        (["os.path:bsename"], "os.path has no 'bsename': did you mean 'basename'?"),
        (["json:__name__"], "is no function but str"),
        (["json:dumps", "--kw", "indent"], "--kw indent: write NAME=VALUE"),
        (["json:dumps", "--map", "nothing.jsonl"], "--map nothing.jsonl: cannot be read"),
        (["json:dumps", "--gpus", "-1"], "--gpus -1: gpus must be 0 or more"),
        (["json:dumps", "--isolation", "warn"], "--isolation warn: not known: did you mean 'warm'?"),
    ],
)
def test_what_cannot_be_called_is_refused_in_one_line(cli: Cli, arguments: list[str], text: str) -> None:
    outcome = cli("run", *arguments)

    assert outcome.code == 2
    assert text in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.usefixtures("address")
def test_a_line_that_is_no_json_is_named(cli: Cli, here: Path) -> None:
    (here / "items.jsonl").write_text("1\n{oops\n")

    outcome = cli("run", "json:dumps", "--map", "items.jsonl")

    assert outcome.code == 2
    assert "--map items.jsonl: line 2 is no JSON value" in outcome.err


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": (1, 2)}, {"a": [1, 2]}),
        ({1: None}, {"1": None}),
        ({1}, "{1}"),
        ([2**70], [2**70]),
        (1j, "1j"),
    ],
)
def test_what_json_has_not_is_shown_as_python_shows_it(value: object, shown: object) -> None:
    assert plain_value(value) == shown


def test_the_same_key_submits_the_same_call_once(
    run: Callable[..., Outcome], project: Path, bench: Bench
) -> None:
    first, second = (
        run("job_functions:power", "--arg", "3", "--idempotency-key", "k", "--detach") for _ in range(2)
    )

    assert first.code == second.code == 0
    assert first.out == second.out
    other = run("job_functions:power", "--arg", "4", "--idempotency-key", "k", "--detach")
    assert other.code == 2
    (project / "items").write_text("1\n2\n")
    mapped = run("job_functions:power", "--map", "items", "--idempotency-key", "k", "--detach")
    assert mapped.err == "gpulayer: --idempotency-key names one job: a map has many\n"


def test_both_commands_that_submit_have_every_option_of_a_job(cli: Cli) -> None:
    flags = {str(Wording(True).error(option, "", "")).split(" ")[0] for option in KNOWN} - {"--on-outage"}
    for command, without in (("run", set[str]()), ("submit", {"--isolation", "--result-ttl"})):
        helped = cli(command, "--help").out
        assert {flag for flag in flags if f"  {flag} " not in helped} == without
