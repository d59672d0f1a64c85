"""`gpulayer retry` and `gpulayer gc`: what ended is run again, or leaves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from gpulayer import private
from gpulayer_broker import spec as specs
from gpulayer_broker.connection import Link
from gpulayer_broker.queue import Queue
from gpulayer_broker.store.local import LocalStore
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench
from tests.workers import WorkerProcess


@pytest.mark.usefixtures("worker")
def test_a_failed_job_is_run_again_with_its_files(cli: Cli, here: Path, link: Link, namespace: str) -> None:
    (here / "data.csv").write_text("a,b\n")
    first = cli("submit", "--env", "CODE=3", "--", "sh", "-c", "cat data.csv; exit $CODE", "data.csv")
    assert (first.code, first.out) == (3, "a,b\n")
    (old,) = (record.id for record in [Queue(link, namespace).record(cli("jobs").out.split()[0])])

    again = cli("retry", old, "--follow")

    assert (again.code, again.out) == (3, "a,b\n")
    assert f"{old} again" in again.err


def test_a_retry_is_a_new_job_under_the_same_options(
    cli: Cli, bench: Bench, link: Link, namespace: str
) -> None:
    old = cli("submit", "-d", "--priority", "high", "--retries", "2", "--name", "n", "--", "true").out.strip()
    bench.end(old)

    new = cli("retry", old).out.strip()

    before, after = Queue(link, namespace).records([old, new])
    assert before is not None
    assert after is not None
    assert new != old
    assert (after.state, after.priority, after.name, after.owner) == ("queued", 1, "n", before.owner)
    assert specs.message_options(after.spec) == {"max_retries": 2}
    assert specs.decode(after.spec).extra == {"retry_of": old}
    assert json.loads(cli("retry", old, "--json").out)[0]["retry_of"] == old


def test_what_has_not_ended_is_not_run_again(cli: Cli, bench: Bench) -> None:
    job_id = cli("submit", "-d", "--", "true").out.strip()

    outcome = cli("retry", job_id)

    assert outcome.code == 2
    assert "only what has ended can be run again" in outcome.err


def test_a_job_whose_files_are_gone_is_not_run_again(cli: Cli, here: Path, bench: Bench, link: Link) -> None:
    (here / "data.csv").write_text("a")
    job_id = cli("submit", "-d", "--", "cat", "data.csv").out.strip()
    bench.end(job_id)
    link.call("DEL", *link.call("KEYS", bench.hand.key("blob:*")))

    outcome = cli("retry", job_id)

    assert outcome.code != 0
    assert "its files are no longer kept" in outcome.err


def test_gc_removes_what_ended_long_ago_and_nothing_else(
    cli: Cli, bench: Bench, link: Link, namespace: str
) -> None:
    old, waiting = (cli("submit", "-d", "--", "true").out.strip() for _ in range(2))
    bench.end(old)

    assert json.loads(cli("gc", "--json").out)["jobs"] == 0
    time.sleep(0.002)
    outcome = cli("gc", "--older-than", "1ms")
    assert "removed 1 jobs older than" in outcome.err
    assert [record and record.id for record in Queue(link, namespace).records([old, waiting])] == [
        None,
        waiting,
    ]


@pytest.fixture
def own_set_up(isolated_environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(isolated_environment / "state" / tmp_path.name))
    yield
    private.down()
    private.release_private()


@pytest.mark.usefixtures("own_set_up")
def test_gc_of_the_private_set_up_removes_files_that_nobody_used(cli: Cli, here: Path) -> None:
    (here / "data.csv").write_text("a" * 50_000)
    assert cli("submit", "--", "cat", "data.csv").code == 0
    from gpulayer_broker.folders import locate_folders

    blobs = [
        path for path in Path(LocalStore(locate_folders().store).root, "blobs").rglob("*") if path.is_file()
    ]
    for path in blobs:
        os.utime(path, (1, 1))

    document = json.loads(cli("gc", "--older-than", "1h", "--json").out)

    assert document["blobs"] == len(blobs)
    assert document["bytes"] >= 50_000
    assert document["jobs"] == 0


def test_gc_tells_a_duration_without_sense(cli: Cli, worker: WorkerProcess) -> None:
    assert cli("gc", "--older-than", "soon").code == 2
