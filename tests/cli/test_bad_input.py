"""Bad input: one line that says what is wrong and what to do, an exit code of its kind, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker.test_connection import scripted_server
from tests.cli.conftest import Cli
from tests.servers import QueueServer
from tests.support import PATIENCE_S

Spawn = Callable[..., "subprocess.Popen[str]"]


def one_line(text: str) -> str:
    """The line, without its start; fails for anything but one line of ours."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("gpulayer: "), text
    assert "Traceback" not in text
    return lines[0].removeprefix("gpulayer: ")


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--framework", "torch=>2"], "--framework torch =>2: '=>2' is not a version range"),
        (["--python", "newest"], "--python newest"),
        (["--accelerator", "cudda"], "--accelerator cudda: not known: did you mean 'cuda'?"),
        (["--priority", "urgent"], "known are critical, high, normal, low, idle"),
        (["--priority", "hihg"], "--priority hihg: not known: did you mean 'high'?"),
        (
            ["--profile", "pytorch-cudda"],
            "profile 'pytorch-cudda' is not known: did you mean 'pytorch-cuda'?",
        ),
        (["--gpus", "-1"], "--gpus -1: gpus must be 0 or more"),
        (["--gpus", "two"], "invalid value for '--gpus': 'two' is not a whole number"),
        (["--gpus", "1.5"], "invalid value for '--gpus': '1.5' is not a whole number"),
        (["--memory", "lots"], "--memory lots: 'lots' is not a size"),
        (["--gpu-memory", "24XB", "--gpus", "1"], "--gpu-memory 24XB"),
        (["--gpu-memory", "24GB"], "--gpu-memory 24GB: a CPU job has no GPU"),
        (["--timeout", "soon"], "--timeout soon: 'soon' is not a duration"),
        (["--timeout", "0"], "--timeout 0: a job needs some time"),
        (["--retries", "-1"], "--retries -1: retries must be 0 or more"),
        (["--cpus", "0"], "--cpus 0: cpus must be 1 or more"),
        (["--label", "zone"], "--label zone: a label is written key=value"),
        (["--env", "GPULAYER_NO_SUCH_NAME"], "is not set here"),
        (["--env", "A-B=1"], "--env A-B: a variable's name"),
        (["--source", "nothing-here"], "nothing-here: not a folder that can be read"),
        (["--input", "nothing-here"], "nothing-here does not exist"),
        (["--output", "../*"], "output '../*' is not a pattern of files below the job's folder"),
        (["--target", "cloud"], "no target is saved as 'cloud'"),
        (["--redis", "http://x"], "http://x"),
        (["--gpsu", "1"], "unknown option '--gpsu': did you mean '--gpus'?"),
        (["--concurrency", "2"], "--concurrency 2: of which jobs? give a concurrency_key too"),
        (["--rate-limit", "often", "--concurrency-key", "k"], "--rate-limit often: write NUMBER/TIME"),
        (["--after", "a b"], "--after a b: give jobs"),
        (["--source", ""], "invalid value for '--source': it is empty"),
        (["--outputs-to", ""], "invalid value for '--outputs-to': it is empty"),
        (["--each-line", ""], "invalid value for '--each-line': it is empty"),
        (["--idempotency-key", ""], "--idempotency-key: it is empty"),
        (["--env", ""], "--env : write NAME=VALUE"),
        (["--env", "=x"], "--env =x: write NAME=VALUE"),
        (["--delay", "soon"], "--delay soon: 'soon' is not a duration"),
        (["--name", "a\nb"], "a name is one printable line"),
    ],
)
def test_a_submit_without_sense_is_refused_in_one_line(cli: Cli, arguments: list[str], text: str) -> None:
    outcome = cli("submit", *arguments, "--", "true")

    assert text in one_line(outcome.err)
    assert outcome.code in (2, 78)
    assert outcome.out == ""


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("command", [[], ["--"], ["--", ""]])
def test_an_empty_command_is_refused(cli: Cli, command: list[str]) -> None:
    outcome = cli("submit", *command)

    assert "the command is empty" in one_line(outcome.err)
    assert outcome.code == 2


def test_nothing_is_submitted_by_a_refused_command(cli: Cli, address: str) -> None:
    cli("submit", "--gpus", "-1", "--", "true")

    assert cli("jobs").out == ""


def test_a_source_that_is_too_large_names_its_largest_paths(
    cli: Cli, here: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "data").mkdir()
    (here / "data" / "big.bin").write_bytes(b"x" * 5000)
    monkeypatch.setenv("GPULAYER_SOURCE_BYTES", "4000")

    outcome = cli("submit", "--source", ".", "--", "true")
    assert "big.bin" in one_line(outcome.err)
    assert outcome.code == 2


def test_a_source_that_is_no_folder_is_told(cli: Cli, here: Path, address: str) -> None:
    (here / "file").write_text("x")

    outcome = cli("submit", "--source", "file", "--", "true")
    assert "file: not a folder that can be read" in one_line(outcome.err)
    assert outcome.code == 2


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["sumbit"], "command 'sumbit' is not known: did you mean 'submit'?", 2),
        (["show"], "missing argument 'JOB' (gpulayer show --help)", 2),
        (["show", "a", "b"], "(gpulayer show --help)", 2),
        (["jobs", "--limit", "0"], "'0' is not a whole number of 1 or more (gpulayer jobs --help)", 2),
        (["wait", "j_1", "--timeout", "x"], "--timeout x: 'x' is not a duration", 2),
        (["run", "lib/train.py:main"], "write the module's name, train:main, in its folder", 2),
        (["run", "os:nosuch"], " more", 2),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    cli: Cli, arguments: list[str], text: str, code: int
) -> None:
    outcome = cli(*arguments)

    assert text in one_line(outcome.err)
    assert outcome.code == code


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("command", ["show", "logs", "wait", "cancel", "explain", "outputs"])
def test_an_unknown_job_is_told(cli: Cli, command: str) -> None:
    outcome = cli(command, "j_nothing")

    assert "j_nothing" in one_line(outcome.err)
    assert outcome.code == 2


@pytest.mark.usefixtures("address")
def test_an_unknown_state_is_told(cli: Cli) -> None:
    outcome = cli("jobs", "--state", "lost")

    assert "state 'lost' is not known" in one_line(outcome.err)
    assert outcome.code == 2


@pytest.mark.parametrize("command", [["jobs"], ["submit", "--", "true"], ["status"], ["workers"]])
def test_a_queue_that_is_not_there_is_told_with_where_it_was_looked_for(cli: Cli, command: list[str]) -> None:
    address = "unix:///tmp/gpulayer-no-such.sock"
    outcome = cli(command[0], "--redis", address, *command[1:])

    line = one_line(outcome.err)
    assert f"no queue answers at {address}" in line
    assert "start a Redis or Valkey server there" in line
    assert outcome.code == 69


def test_a_database_that_the_server_has_not_is_told_with_its_address(cli: Cli, address: str) -> None:
    outcome = cli("jobs", "--redis", f"{address}?db=99")

    assert f"the queue at {address}?db=99 takes no connection" in one_line(outcome.err)
    assert outcome.code == 78


def test_an_address_without_sense_is_told_as_it_was_written(cli: Cli) -> None:
    assert one_line(cli("jobs", "--redis", "redis://h/x").err).startswith("queue address 'redis://h/x'")


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--label", "zone"], "--label zone: a label is written key=value"),
        (["--label", "zone=\x1b[31m"], "a label's value is printable text"),
        (["--label", "a b=c"], "the key a word"),
        (["--label", "a=b", "--label", "a=c"], "a label has one value"),
        (["--slots", "0"], "--slots"),
        (["--gpus", "x"], "--gpus x"),
    ],
)
@pytest.mark.parametrize("command", [["worker"], ["worker", "start"]])
def test_a_worker_without_sense_is_not_started(
    spawn: Spawn, command: list[str], arguments: list[str], text: str
) -> None:
    process = spawn(*command, *arguments)
    out, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode in (2, 78)
    assert out == ""
    assert text in err.splitlines()[-1]
    assert "\x1b" not in err


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("name", ["a\nb", " ", "x" * 300])
def test_a_worker_s_name_is_a_printable_line(spawn: Spawn, name: str) -> None:
    for arguments in (["worker", "--name", name], ["worker", "start", name]):
        process = spawn(*arguments)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 2
        assert "a worker's name is one printable line" in one_line(err)


def test_a_server_that_would_evict_jobs_is_told(cli: Cli, queue_server: Callable[..., QueueServer]) -> None:
    server = queue_server("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    outcome = cli("jobs", "--redis", server.endpoint.url)

    assert "maxmemory-policy allkeys-lru" in one_line(outcome.err)
    assert outcome.code == 78


@pytest.mark.parametrize("command", [["jobs"], ["status"], ["submit", "--", "true"]])
def test_a_server_that_is_too_old_is_told_with_what_is_needed(cli: Cli, command: list[str]) -> None:
    facts = b"redis_version:6.2.14\r\n"
    with scripted_server(*[b"$%d\r\n%s\r\n" % (len(facts), facts)] * 3) as link:
        outcome = cli(command[0], "--redis", link.endpoint.url, *command[1:])

    assert "is Redis 6.2.14: GPUlayer needs Redis 7.0 or Valkey 7.2" in one_line(outcome.err)
    assert outcome.code == 78


@pytest.mark.parametrize("command", [["jobs"], ["status"], ["submit", "--", "true"]])
def test_a_state_folder_of_another_user_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    folder, owner = Path("/usr"), 0
    if os.geteuid() == 0:
        folder, owner = tmp_path / "theirs", 12345
        folder.mkdir(mode=0o700)
        os.chown(folder, owner, owner)
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(folder))

    outcome = cli(*command)
    assert f"belongs to another user (uid {owner})" in one_line(outcome.err)
    assert outcome.code == 78


def test_the_private_set_up_that_is_switched_off_is_not_started(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_PRIVATE", "off")
    outcome = cli("submit", "--", "true")

    assert "GPULAYER_PRIVATE" in one_line(outcome.err)
    assert outcome.code == 78


def test_an_unknown_setting_in_a_file_is_told(cli: Cli, here: Path) -> None:
    (here / ".gpulayer").mkdir()
    (here / ".gpulayer" / "config.toml").write_text('redis_ulr = "redis://x"\n')

    outcome = cli("jobs")
    assert "unknown setting 'redis_ulr': did you mean 'redis_url'?" in one_line(outcome.err)
    assert outcome.code == 78


def test_the_traceback_is_shown_when_it_is_asked_for(
    cli: Cli, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpulayer_broker.errors import BadRequirement

    monkeypatch.setenv("GPULAYER_DEBUG", "1")
    with pytest.raises(BadRequirement):
        cli("submit", "--gpus", "-1", "--", "true")


def test_arguments_that_are_not_utf_8_are_refused_in_one_line(cli: Cli) -> None:
    for command in (
        ("submit", "--", "echo", "\udcff"),
        ("show", "\udcff"),
        ("submit", "--env", "A=\udcff", "--", "true"),
    ):
        refused = cli(*command)

        assert refused.code == 2
        assert "is not UTF-8" in refused.err
        assert len(refused.err.splitlines()) == 1


def test_an_error_shows_no_control_characters_and_not_all_of_a_long_value(cli: Cli) -> None:
    coloured = cli("submit", "--memory", "\x1b[31mred\n", "--", "true")
    long = cli("submit", "--memory", "x" * 100_000, "--", "true")

    assert coloured.code == long.code == 2
    assert coloured.err.rstrip("\n").isprintable()
    assert len(long.err) < 3000
    assert "write 24GB" in long.err, "the cure stays"


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize("age", ["", "-1", "soon"])
def test_an_age_without_sense_removes_nothing(cli: Cli, age: str) -> None:
    outcome = cli("gc", "--older-than", age)

    assert outcome.code == 2
    assert f"--older-than {age}: '{age}' is not a duration" in one_line(outcome.err)


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["show", "j_nothing", "--json"], 2, {"code": "job_not_found", "value": "j_nothing"}),
        (["submit", "--json", "--gpus", "-1", "--", "true"], 2, {"code": "bad_requirement"}),
        (
            ["jobs", "--json", "--redis", "unix:///tmp/gpulayer-no-such.sock"],
            69,
            {"code": "queue_unreachable"},
        ),
        (["jobs", "--json", "--limit", "x"], 2, {"code": "usage"}),
        (["jobs", "--json", "--bogus"], 2, {"code": "usage"}),
        (["logs", "--json", "j_nothing"], 2, {"code": "job_not_found"}),
    ],
)
def test_a_script_is_given_the_error_as_a_document(
    cli: Cli, arguments: list[str], code: int, error: dict[str, object]
) -> None:
    outcome = cli(*arguments)

    assert outcome.code == code
    told = json.loads(outcome.out)["error"]
    assert {name: told[name] for name in error} == error
    assert told["message"] == one_line(outcome.err)


@pytest.mark.usefixtures("address")
def test_what_follows_the_two_dashes_asks_for_no_document(cli: Cli) -> None:
    assert cli("submit", "--gpus", "-1", "--", "tool", "--json").out == ""


@pytest.mark.usefixtures("address")
def test_one_document_is_printed_and_not_two(cli: Cli) -> None:
    waiting = cli("submit", "-d", "--", "true").out.strip()
    outcome = cli("cancel", waiting, "j_nothing", "--json")

    assert outcome.code == 2
    assert [each["id"] for each in json.loads(outcome.out)] == [waiting]
    assert "no job 'j_nothing'" in outcome.err


def test_any_number_of_jobs_may_be_asked_for(cli: Cli, address: str) -> None:
    assert cli("jobs", "--limit", "99999999999999999999999").code == 0


@pytest.mark.parametrize(
    "command", [["submit", "--", "true"], ["jobs"], ["status"], ["down"], ["worker", "start"]]
)
def test_a_variable_without_sense_is_named_by_every_command(
    cli: Cli, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_LOST_WORKERS", "none")

    outcome = cli(*command)

    assert one_line(outcome.err) == "GPULAYER_LOST_WORKERS: 'none' is not a whole number"
    assert (outcome.code, outcome.out) == (78, "")
