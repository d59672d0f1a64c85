"""`gpulayer submit` on a real worker that shares nothing with it but the queue."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer_broker import spec as specs
from gpulayer_broker.connection import Link
from gpulayer_broker.queue import Queue
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until
from tests.workers import WorkerProcess

Spawn = Callable[..., "subprocess.Popen[str]"]

SCRIPT = """
import os, sys
print("to stdout", *sys.argv[1:])
print("to stderr", file=sys.stderr)
with open(os.path.join(os.environ["GPULAYER_OUTPUTS"], "made.txt"), "w") as file:
    file.write(open("data.csv").read().upper())
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def project(here: Path) -> Path:
    (here / "train.py").write_text(SCRIPT)
    (here / "data.csv").write_text("a,b")
    return here


@pytest.mark.usefixtures("worker")
def test_a_command_runs_with_the_files_that_it_names_and_brings_its_outputs_back(
    cli: Cli, project: Path
) -> None:
    outcome = cli("submit", "--name", "first", "--", sys.executable, "train.py", "data.csv", "--lr", "1")

    assert outcome.code == 0, outcome.err
    assert outcome.out == "to stdout data.csv --lr 1\n"
    assert "shipping data.csv, train.py" in outcome.err
    assert "to stderr" in outcome.err
    assert "submitted: first" in outcome.err
    assert " succeeded on " in outcome.err
    (folder,) = (project / "gpulayer_runs").iterdir()
    assert (folder / "outputs" / "made.txt").read_text() == "A,B"


@pytest.mark.usefixtures("worker")
def test_the_exit_code_is_the_command_s_own_and_outputs_go_where_they_are_wanted(
    cli: Cli, project: Path
) -> None:
    options = ("--env", "CODE=7", "--outputs-to", "out", "--source", ".")
    outcome = cli("submit", *options, "--", sys.executable, "train.py")

    assert outcome.code == 7
    assert "exit code 7" in outcome.err
    assert (project / "out" / "outputs" / "made.txt").read_text() == "A,B"


@pytest.mark.usefixtures("worker")
def test_a_signal_s_end_is_128_and_its_number(cli: Cli) -> None:
    outcome = cli("submit", "--", "sh", "-c", "kill -SEGV $$")

    assert outcome.code == 128 + signal.SIGSEGV


@pytest.mark.usefixtures("worker")
def test_a_job_past_its_timeout_ends_with_124(cli: Cli) -> None:
    outcome = cli("submit", "--timeout", "0.3s", "--", "sleep", "60")

    assert outcome.code == 124
    assert "timeout" in outcome.err


@pytest.mark.usefixtures("worker")
def test_a_program_that_is_not_there_is_told(cli: Cli) -> None:
    outcome = cli("submit", "--", "no-such-program-here")

    assert outcome.code != 0
    assert "no-such-program-here" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.usefixtures("worker")
def test_json_is_one_document_and_output_leaves_stdout_alone(cli: Cli) -> None:
    outcome = cli("submit", "--json", "--", "echo", "words")

    document = json.loads(outcome.out)
    assert document["state"] == "succeeded"
    assert document["exit_code"] == 0
    assert document["attempt"] == 1
    assert document["run_time_s"] >= 0
    assert "words" in outcome.err


@pytest.mark.usefixtures("worker")
def test_inputs_and_a_copied_variable_reach_the_job(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_HERE", "copied")
    (here / "notes.txt").write_text("inside\n")
    options = ("--input", "notes.txt:in/n.txt", "--env", "FROM_HERE", "--env", "GIVEN=a=b")
    outcome = cli("submit", *options, "--", "sh", "-c", "cat in/n.txt; echo $FROM_HERE $GIVEN")

    assert outcome.out == "inside\ncopied a=b\n"


def test_detach_prints_the_id_alone(cli: Cli, address: str, link: Link, namespace: str) -> None:
    outcome = cli("submit", "--detach", "--priority", "high", "--retries", "2", "--", "true")

    job_id = outcome.out.strip()
    assert outcome.out == f"{job_id}\n"
    record = Queue(link, namespace).record(job_id)
    assert (record.state, record.priority) == ("queued", 1)
    assert outcome.code == 0


def test_detach_with_json_is_a_document(cli: Cli, address: str) -> None:
    document = json.loads(cli("submit", "--detach", "--json", "--", "true").out)

    assert document["state"] == "queued"
    assert document["id"].startswith("j_")


def test_one_idempotency_key_is_one_job(cli: Cli, address: str) -> None:
    first = cli("submit", "-d", "--idempotency-key", "k", "--", "true")
    again = cli("submit", "-d", "--idempotency-key", "k", "--", "true")
    other = cli("submit", "-d", "--idempotency-key", "k", "--", "false")

    assert again.out == first.out
    assert other.code == 2
    assert "idempotency key 'k'" in other.err


def test_a_job_can_wait_for_others_and_take_turns(cli: Cli, bench: Bench, link: Link, namespace: str) -> None:
    first = cli("submit", "-d", "--concurrency-key", "disk", "--", "true").out.strip()
    second = cli("submit", "-d", "--after", first, "--", "true").out.strip()
    third = cli("submit", "-d", "--concurrency-key", "disk", "--", "true").out.strip()
    later = cli("submit", "-d", "--delay", "1h", "--", "true").out.strip()

    phases = [Queue(link, namespace).record(job_id).phase for job_id in (first, second, third, later)]
    assert phases == ["ready", "blocked", "limited", "delayed"]
    assert "state       queued (blocked)" in cli("show", second).out


def test_options_after_the_command_are_the_command_s(
    cli: Cli, address: str, link: Link, namespace: str
) -> None:
    outcome = cli("submit", "-d", "ls", "--json", "--gpus", "3")

    record = Queue(link, namespace).record(outcome.out.strip())
    assert specs.decode(record.spec).argv == ("ls", "--json", "--gpus", "3")


@pytest.mark.parametrize("options", [("--no-ship",), ("--source", "empty")])
def test_files_are_not_shipped_when_that_is_turned_off(
    cli: Cli, project: Path, address: str, link: Link, namespace: str, options: tuple[str, ...]
) -> None:
    (project / "empty").mkdir()
    outcome = cli("submit", "-d", *options, "--", "cat", "data.csv")

    assert "shipping" not in outcome.err
    assert Queue(link, namespace).record(outcome.out.strip()).state == "queued"


def test_what_no_worker_can_ever_run_is_accepted_with_a_warning(
    cli: Cli, bench: Bench, namespace: str
) -> None:
    outcome = cli("submit", "-d", "--framework", "jax>=0.4", "--", "true")

    assert outcome.code == 0
    assert "warning: no known worker can ever run this" in outcome.err
    assert "framework 'jax' not installed" in outcome.err


def test_must_fit_refuses_what_no_worker_can_ever_run(cli: Cli, bench: Bench) -> None:
    outcome = cli("submit", "-d", "--must-fit", "--accelerator", "cuda", "--", "true")

    assert outcome.code == 2
    assert "not submitted" in outcome.err
    assert "accelerator 'cuda' not available (has cpu)" in outcome.err
    assert cli("jobs").out == ""
    assert cli("submit", "-d", "--must-fit", "--", "true").code == 0


def test_ctrl_c_only_detaches_and_says_how_to_come_back(
    spawn: Spawn, worker: WorkerProcess, cli: Cli
) -> None:
    process = spawn("submit", "--", "sh", "-c", "echo begun; sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    line = err.splitlines()[-1]
    assert line.startswith("detached: job j_")
    job_id = line.split()[2]
    assert f"gpulayer logs -f {job_id}" in line
    assert cli("jobs", "--state", "running").out.startswith(job_id)
    cli("cancel", job_id)
    assert cli("wait", job_id).code == 130


def test_a_closed_pipe_ends_it_quietly(spawn: Spawn, worker: WorkerProcess, cli: Cli) -> None:
    process = spawn("submit", "--", "sh", "-c", "echo one; echo two; sleep 0.5; yes | head -c 300000")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(PATIENCE_S)

    assert "Traceback" not in err
    wait_until(lambda: "running" not in cli("jobs").out, PATIENCE_S, "the job has ended by itself")


@pytest.mark.usefixtures("worker")
def test_bytes_that_are_no_text_come_through_a_pipe_as_they_are(spawn: Spawn) -> None:
    script = r"printf 'a\033[31mred\033[0m\377\r\n'"
    command = [
        sys.executable,
        "-c",
        "from gpulayer.cli import main; main()",
        "submit",
        "--",
        "sh",
        "-c",
        script,
    ]
    found = subprocess.run(command, capture_output=True, env=os.environ.copy(), check=True)

    assert found.stdout == b"a\x1b[31mred\x1b[0m\xff\r\n"
