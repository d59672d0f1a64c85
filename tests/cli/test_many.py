"""`--array` and `--each-line`: one command many times, and its group afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer_broker import spec as specs
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_job_for_each_number_and_what_failed_again(cli: Cli, here: Path) -> None:
    script = 'echo "$1 $GPULAYER_INDEX" > "$GPULAYER_OUTPUTS/n.txt"; [ "$1" != "${BAD:-none}" ]'
    command = ("--name", "odd", "--env", "BAD=3", "--", "sh", "-c", script, "sh", "{}")

    outcome = cli("submit", "--array", "1-5:2", "--outputs-to", "results", *command)

    assert outcome.code == 1
    assert "2 succeeded, 1 failed" in outcome.err or "1 failed, 2 succeeded" in outcome.err
    assert "odd[3]: job g_" in outcome.err
    group = outcome.err.split("group ")[1].split()[0]
    texts = [(here / "results" / f"{group}-{n}" / "outputs" / "n.txt").read_text() for n in (1, 2, 3)]
    assert texts == ["1 1\n", "3 3\n", "5 5\n"]

    again = cli("retry", group, "--failed", "--follow")
    assert again.code == 1
    assert f"1 jobs of {group} again" in again.err
    assert "1 failed" in again.err


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_job_for_each_line_gets_the_files_that_its_own_command_names(cli: Cli, here: Path) -> None:
    for name in ("a b.txt", "c.txt"):
        (here / name).write_text(f"text of {name}")
    (here / "list").write_text("a b.txt\n\nc.txt\n")
    script = 'cat "$1"; [ "$1" = "$GPULAYER_LINE" ]'

    outcome = cli("submit", "--each-line", "list", "--", "sh", "-c", script, "sh", "{}")

    assert outcome.code == 0, outcome.err
    assert "shipping a b.txt" in outcome.err
    group = outcome.err.split("group ")[1].split()[0]
    assert cli("logs", f"{group}-2").out == "text of c.txt"
    assert "name one of its jobs" in cli("logs", group).err


def test_members_know_their_number_and_so_many_run_at_once(cli: Cli, bench: Bench) -> None:
    group = cli("submit", "--detach", "--array", "7-9%2", "--name", "n", "--", "run", "--seed={}").out.strip()

    records = bench.queue.records([f"{group}-{n}" for n in (1, 2, 3)])
    phases = [record.phase for record in records if record]
    decoded = [specs.decode(record.spec) for record in records if record]
    assert phases == ["ready", "ready", "limited"]
    assert [spec.argv for spec in decoded] == [("run", f"--seed={n}") for n in (7, 8, 9)]
    assert [spec.env for spec in decoded] == [{"GPULAYER_INDEX": str(n)} for n in (7, 8, 9)]
    assert [spec.name for spec in decoded] == ["n[7]", "n[8]", "n[9]"]


def test_a_group_is_shown_waited_for_and_cancelled(cli: Cli, bench: Bench) -> None:
    group = json.loads(cli("submit", "--detach", "--json", "--array", "1-3", "--", "true").out)["id"]
    bench.end(f"{group}-1")
    bench.fail(f"{group}-2", ValueError("no"))

    shown = cli("show", group).out
    assert "1 succeeded" in shown
    assert f"failed      {group}-2 true[2]: user_error" in shown
    assert cli("cancel", group).err == f"group {group}: the end of 1 jobs is asked for\n"
    waited = cli("wait", group, "--json")
    assert waited.code == 1
    assert json.loads(waited.out) == {
        "schema": 1,
        "id": group,
        "total": 3,
        "states": {"succeeded": 1, "failed": 1, "cancelled": 1},
        "failed": [f"{group}-2", f"{group}-3"],
    }
    assert json.loads(cli("retry", group, "--failed", "--json").out)[0]["count"] == 2
    assert json.loads(cli("cancel", group, "--json").out)["asked"] == 0
    assert cli("wait", "g_nothing").code == 2


def test_a_group_waits_until_all_of_it_has_ended(spawn: Spawn, cli: Cli, bench: Bench) -> None:
    group = cli("submit", "--detach", "--array", "1-2", "--", "true").out.strip()
    bench.end(f"{group}-1")

    assert cli("wait", group, "--timeout", "50ms").code == 124
    process = spawn("wait", group)
    bench.end(f"{group}-2")
    assert process.communicate(timeout=PATIENCE_S)[0].split("\t") == [group, "2 succeeded\n"]


def test_who_stops_waiting_is_told_that_nothing_was_ended(spawn: Spawn, cli: Cli, bench: Bench) -> None:
    job_id = cli("submit", "--detach", "--", "true").out.strip()
    process = spawn("wait", job_id)
    watchers = bench.hand.key(f"watchers:{job_id}")
    wait_until(lambda: bench.hand.link.call("SCARD", watchers), PATIENCE_S, "it waits")
    process.send_signal(signal.SIGINT)

    assert line_with(process, "no longer waiting") == (
        f"no longer waiting: {job_id} not ended by this; gpulayer cancel ends a job\n"
    )
    assert process.wait(PATIENCE_S) == 130
    assert not bench.queue.record(job_id).final


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """The next line on stderr that has the text; warnings about the server may come before it."""
    assert process.stderr is not None
    return next(line for line in process.stderr if text in line)


def test_ctrl_c_leaves_a_group_alone_and_twice_cancels_it(spawn: Spawn, bench: Bench, cli: Cli) -> None:
    # However long this machine takes between the two.
    patient = "import gpulayer.watching; gpulayer.watching.SECOND_CHANCE_S = 600"
    process = spawn("submit", "--array", "1-3", "--", "true", before=patient)
    group = line_with(process, "group g_").split()[1]
    bench.end(f"{group}-1")
    wait_until(lambda: bench.queue.record(f"{group}-1").final, PATIENCE_S, "one has ended")

    process.send_signal(signal.SIGINT)
    told = line_with(process, "go on")
    assert f"gpulayer wait {group}" in told
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert [bench.queue.record(f"{group}-{n}").state for n in (2, 3)] == ["cancelled"] * 2


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--array", "x"], "--array x: write numbers and ranges"),
        (["--each-line", "nothing"], "--each-line nothing: cannot be read"),
        (["--each-line", "empty"], "--each-line empty: it has no lines"),
        (["--array", "1", "--each-line", "empty"], "give one of them"),
        (["--array", "1", "--idempotency-key", "k"], "names one job"),
        (["--array", "1%2", "--concurrency-key", "k"], "the concurrency_key already says"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    cli: Cli, here: Path, arguments: list[str], text: str
) -> None:
    (here / "empty").write_text("\n")

    outcome = cli("submit", "--detach", *arguments, "--", "true")

    assert outcome.code == 2
    assert text in outcome.err
    assert len(outcome.err.splitlines()) == 1
