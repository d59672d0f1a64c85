"""Output since a moment: of a running job by the queue's clock, of an ended one by what its log's index says."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.client import Client
from gpulayer.handle import Job
from gpulayer.logs import NOTE, Piece, read_log
from gpulayer_worker.joblog import MOST_RUNS, JobLog
from tests.sdk.benches import Bench
from tests.sdk.test_logs import Writer, kept, output
from tests.support import PATIENCE_S, wait_until


@pytest.fixture
def job(client: Client) -> Job[None]:
    return client.submit(["true"])


def now_ms(bench: Bench) -> int:
    seconds, micros = bench.hand.link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000


def test_of_a_running_job_only_what_came_since_is_read(client: Client, bench: Bench, job: Job[None]) -> None:
    writer = Writer(bench, bench.take(job.id))
    writer.write("out", b"old\n")
    before_ms = now_ms(bench)
    since_ms = wait_until(lambda: (now := now_ms(bench)) > before_ms and now, PATIENCE_S, "time goes on")
    writer.write("err", b"new\n")

    pieces = list(read_log(client._session, job.id, since_ms=since_ms))
    assert pieces == [Piece("err", b"new\n")]
    assert list(read_log(client._session, job.id, since_ms=since_ms + 60_000)) == []


def test_what_is_older_and_lost_is_not_missed(client: Client, bench: Bench, job: Job[None]) -> None:
    writer = Writer(bench, bench.take(job.id))
    for _ in range(3):
        writer.write("out", b"x" * 600_000)

    assert next(read_log(client._session, job.id)).stream == NOTE
    assert list(read_log(client._session, job.id, since_ms=now_ms(bench) + 60_000)) == []


def test_of_an_ended_job_only_what_came_since_is_read(client: Client, bench: Bench, job: Job[None]) -> None:
    index = b'[0,4,"out",1000]\n[4,4,"err",2000]\n[8,6,"out",3000]\n'
    bench.end(job.id, fields=kept(client, b"one\ntwo\nthree\n", index))

    pieces = list(read_log(client._session, job.id, since_ms=2000))
    assert output(pieces) == [("err", b"two\n"), ("out", b"three\n")]


class Timed:
    """A job's log on a clock of the test's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0
        monkeypatch.setattr("gpulayer_worker.joblog.now_ms", lambda: self.now_ms)
        self.log = JobLog("j_1", "1:t", folder / "spill", 1 << 20, pipes=2)

    def write(self, at_ms: int, stream: str = "out") -> None:
        self.now_ms = at_ms
        self.log.write(stream, b"x")


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(tmp_path, monkeypatch)


def test_a_log_s_index_knows_within_a_second_when_each_byte_came(timed: Timed) -> None:
    for at_ms in (1000, 1900, 2100, 6000):
        timed.write(at_ms)

    assert timed.log.runs == [[0, 2, "out", 1900], [2, 1, "out", 2100], [3, 1, "out", 6000]]


def test_a_job_that_writes_for_days_leaves_room_for_changes_of_the_stream(timed: Timed) -> None:
    for second in range(MOST_RUNS):
        timed.write(1000 * second)
    timed.write(1000 * MOST_RUNS, "err")

    assert len(timed.log.runs) == MOST_RUNS // 2 + 1
    assert timed.log.runs[-1] == [MOST_RUNS, 1, "err", 1000 * MOST_RUNS]
    assert timed.log.runs[-2][3] == 1000 * (MOST_RUNS - 1), (
        "the run that goes on knows when its last byte came"
    )
