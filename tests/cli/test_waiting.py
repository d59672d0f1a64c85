"""What is said of jobs that wait and of jobs that run: their place, who could take them, how far they are."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpulayer.position as position_module
from gpulayer.cli.terminal import progress_text
from gpulayer_broker import functions as fn
from gpulayer_broker.functions import Running
from tests.cli.conftest import Cli
from tests.queueing import LEASE_MS
from tests.sdk.benches import Bench, bad, good
from tests.support import PATIENCE_S, wait_until


def submitted(cli: Cli, *options: str) -> str:
    return cli("submit", "-d", *options, "--", "true").out.strip()


def position(cli: Cli, job_id: str) -> dict[str, object] | None:
    shown = json.loads(cli("show", job_id, "--json").out)["position"]
    explained = json.loads(cli("explain", job_id, "--json").out)["position"]
    assert (shown and shown["ahead"]) == (explained and explained["ahead"])
    return dict(shown) if shown else None


def test_a_waiting_job_shows_how_many_are_ahead(cli: Cli, bench: Bench) -> None:
    low, first, second = submitted(cli, "--priority", "low"), submitted(cli), submitted(cli)
    for job_id, ahead in ((first, 0), (second, 1), (low, 2)):
        place = position(cli, job_id)
        assert place is not None
        assert place["ahead"] == ahead
    high = submitted(cli, "--priority", "high")

    assert position(cli, first) == {"ahead": 1, "oldest_s": pytest.approx(0, abs=5), "more": False}
    assert "position    3 jobs ahead, the oldest has waited" in cli("show", low).out
    assert "(next)" in cli("explain", high).err
    bench.take(high)
    assert position(cli, high) is None
    assert position(cli, first) == {"ahead": 0, "oldest_s": None, "more": False}


def test_the_table_of_jobs_says_how_many_are_ahead_of_each_and_what_else_it_waits_for(
    cli: Cli, bench: Bench
) -> None:
    first, second = submitted(cli), submitted(cli)
    later, behind = submitted(cli, "--delay", "1h"), submitted(cli, "--after", first)
    bench.take(submitted(cli, "--priority", "high"))

    rows = [line.split("\t") for line in cli("jobs").out.splitlines()]
    states = {row[0]: row[1] for row in rows}
    assert [states[job] for job in (first, second, later, behind)] == [
        "queued (next)",
        "queued (1 ahead)",
        "queued (delayed)",
        "queued (blocked)",
    ]
    documents = {each["id"]: each["position"] for each in json.loads(cli("jobs", "--json").out)}
    assert documents[second]["ahead"] == 1
    assert documents[later] is None


def test_a_list_of_jobs_looks_at_the_oldest_of_a_long_queue_alone(
    cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_module, "OF_A_LIST", 3)
    ids = [submitted(cli) for _ in range(5)]
    states = dict(line.split("\t")[:2] for line in cli("jobs", "-n", "2").out.splitlines())

    assert states == {ids[3]: "queued (≥3 ahead)", ids[4]: "queued (≥3 ahead)"}
    assert position(cli, ids[4]) == {"ahead": 4, "oldest_s": pytest.approx(0, abs=60), "more": False}


def test_a_job_is_not_called_the_next_where_not_all_that_wait_were_looked_at(
    cli: Cli, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_module, "OF_A_LIST", 2)
    for _ in range(2):
        submitted(cli, "--accelerator", "cuda")
    last = submitted(cli)

    assert cli("jobs", "-n", "1").out.startswith(f"{last}\tqueued\t")


def test_only_jobs_that_want_the_same_workers_are_ahead(cli: Cli, bench: Bench) -> None:
    submitted(cli, "--accelerator", "cuda")
    other_needs = submitted(cli, "--memory", "1GB")
    delayed_behind = submitted(cli)

    assert position(cli, other_needs) == {"ahead": 0, "oldest_s": None, "more": False}
    assert (position(cli, delayed_behind) or {})["ahead"] == 1


def test_explain_before_a_submit_submits_nothing(cli: Cli, bench: Bench) -> None:
    outcome = cli("submit", "--explain", "--framework", "jax>=0.4", "--", "python", "train.py")

    worker, fits, reasons, _ = outcome.out.strip().split("\t")
    assert (worker, fits, reasons) == ("alpha", "never", "framework 'jax' not installed")
    assert "not submitted; it needs" in outcome.err
    document = json.loads(cli("submit", "--explain", "--json", "--", "true").out)
    assert (document["fits"], document["workers"][0]["worker"]) == ("yes", "alpha")
    assert cli("jobs").out == ""


def test_an_array_shows_how_far_it_is(cli: Cli, bench: Bench) -> None:
    import gpulayer.client as clients
    from gpulayer.handing_over import Arguments
    from gpulayer.options import plan_of
    from gpulayer.payload import pack_function

    with clients.Client() as client:
        plan = plan_of({"isolation": "warm"})
        calls: list[Arguments] = [((n,), {}) for n in range(3)]
        (job,) = client.submit_map(pack_function(abs), calls, plan, len(calls)).jobs
        bench.serve_array(job.id, lambda n: bad(ValueError("no")) if n else good(n), chunks=2, us_each=20_000)

    assert "items       2 of 3 ended, 1 of them failed" in cli("show", job.id).out
    assert json.loads(cli("show", job.id, "--json").out)["items"] == {"count": 3, "ended": 2, "failed": 1}


def test_a_map_that_failed_says_how_to_run_the_rest_again(cli: Cli, bench: Bench, here: Path) -> None:
    (here / "warm_calls.py").write_text("def job(n): return n")
    (here / "items").write_text("1\n2\n")
    array = cli("run", "warm_calls:job", "--isolation", "warm", "--map", "items", "--detach").out.strip()
    bench.serve_array(array, lambda n: bad(ValueError("no")))

    line = f"not all of its 2 calls succeeded: gpulayer retry {array} --failed runs those again"
    assert f"error       {line}" in cli("show", array).out


def test_logs_as_documents_are_a_line_each_with_their_stream(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    grant = bench.take(job_id)
    bench.hand.run(fn.log(job_id, grant.token, 0, "out", 0, b"one\n10%\r50%\rtwo\n"))
    bench.hand.run(fn.log(job_id, grant.token, 0, "err", 16, b"three"))

    documents = [json.loads(line) for line in cli("logs", "--json", job_id).out.splitlines()]
    assert documents == [
        {"stream": "out", "text": "one"},
        {"stream": "out", "text": "two"},
        {"stream": "err", "text": "three"},
    ]


def test_cancel_as_a_document_tells_why_it_ended(cli: Cli, bench: Bench) -> None:
    done = submitted(cli)
    bench.end(done)
    waiting = submitted(cli)

    first, second = json.loads(cli("cancel", waiting, done, "--json").out)
    assert (first["asked"], first["state"], first["end_reason"]) == (True, "cancelled", "cancelled")
    assert (second["asked"], second["state"], second["end_reason"]) == (False, "succeeded", None)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ('{"done": 15, "total": 30}', f"[{'#' * 15}{'.' * 15}] 15 of 30 (50%)"),
        ('{"done": 2.5, "total": 2}', f"[{'#' * 30}] 2.5 of 2 (100%)"),
        ('{"done": 1, "total": 0}', ""),
        ('{"done": "x", "total": 3}', ""),
        ("[1]", ""),
        ("", ""),
    ],
)
def test_progress_is_shown_where_it_makes_sense(told: str, shown: str) -> None:
    assert progress_text(told) == shown


class Screen:
    """A command line on a terminal, and what it has drawn."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", "from gpulayer.cli import main; main()", *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, cwd=folder, env=os.environ.copy()
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.seen = ""

    def shows(self, text: str) -> bool:
        try:
            while data := os.read(self._master, 65536):
                self.seen += data.decode(errors="replace")
        except OSError:  # nothing more now, or the other end is closed
            pass
        return text in self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def following(cli: Cli, bench: Bench, here: Path) -> Iterator[tuple[Screen, str]]:
    job_id = submitted(cli)
    screen = Screen(here, "logs", "-f", job_id)
    yield screen, job_id
    screen.close()


def test_progress_is_the_last_line_of_a_followed_log_and_goes_before_other_words(
    following: tuple[Screen, str], bench: Bench
) -> None:
    screen, job_id = following
    grant = bench.take(job_id)
    heartbeat = [Running(job_id, grant.token, True, '{"done": 3, "total": 10}')]
    bench.hand.run(fn.renew(bench.machine.id, bench.machine.incarnation, LEASE_MS, heartbeat))
    wait_until(lambda: screen.shows("3 of 10 (30%)"), PATIENCE_S, "the progress is shown")

    bench.hand.run(fn.log(job_id, grant.token, 0, "out", 0, b"a line\n"))
    wait_until(lambda: screen.shows("\r\x1b[Ka line"), PATIENCE_S, "the line takes its place")
    bench.end(job_id)
    assert screen.process.wait(PATIENCE_S) == 0
    wait_until(lambda: screen.shows("a line"), PATIENCE_S, "all is read")
    assert screen.seen.endswith("\r\x1b[K")
