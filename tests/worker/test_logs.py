"""One job's log, and the two threads that serve all of them: nothing that a job writes stops either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_broker.answers import Grant
from gpulayer_broker.connection import Link
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.store.local import LocalStore
from gpulayer_worker.joblog import DISK_FULL, MEMORY_BYTES, MOST_RUNS, OVER_LIMIT, TAIL_BYTES, JobLog
from gpulayer_worker.logs import Logs
from tests.queueing import Hand, signature
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

LIMIT_BYTES = 8 * MEMORY_BYTES


def make_log(folder: Path, limit_bytes: int = LIMIT_BYTES, spill: str = "spill") -> JobLog:
    return JobLog(new_job_id(), "1:t", folder / spill, limit_bytes, pipes=2)


def content(job_log: JobLog, folder: Path) -> bytes:
    store = LocalStore(folder / "store")
    return store.read_bytes(job_log.store(store)["sha256"], LIMIT_BYTES * 2)


@pytest.mark.parametrize("pieces", [3, 40])
def test_a_log_is_whole_in_memory_and_in_its_file(tmp_path: Path, pieces: int) -> None:
    job_log = make_log(tmp_path)
    written = [os.urandom(MEMORY_BYTES // 10) for _ in range(pieces)]
    for piece in written:
        job_log.write("out", piece)
    assert content(job_log, tmp_path) == b"".join(written)
    assert (tmp_path / "spill").exists() == (pieces > 10)
    job_log.forget()


def test_a_log_over_its_limit_says_so_once_and_counts_what_it_dropped(tmp_path: Path) -> None:
    job_log = make_log(tmp_path, limit_bytes=10)
    for _ in range(3):
        job_log.write("out", b"12345678")
    assert content(job_log, tmp_path) == b"1234567812" + OVER_LIMIT
    assert job_log.dropped == 14


def test_a_full_disk_costs_the_rest_of_the_log_and_nothing_else(tmp_path: Path) -> None:
    job_log = JobLog(new_job_id(), "1:t", Path("/dev/full"), LIMIT_BYTES, pipes=2)
    job_log.write("out", b"x" * (MEMORY_BYTES - 200))
    job_log.write("out", b"y" * 1000)
    job_log.write("out", b"z" * 1000)
    assert content(job_log, tmp_path) == b"x" * (MEMORY_BYTES - 200) + DISK_FULL
    assert job_log.dropped == 2000


def test_a_job_that_changes_streams_for_ever_has_a_bounded_index(tmp_path: Path) -> None:
    job_log = make_log(tmp_path)
    for _ in range(MOST_RUNS // 2 + 10):
        job_log.write("out", b"o")
        job_log.write("err", b"e")
    assert len(job_log.runs) == MOST_RUNS
    assert sum(run[1] for run in job_log.runs) == job_log.size


def test_what_comes_after_the_end_is_dropped(tmp_path: Path) -> None:
    job_log = make_log(tmp_path)
    job_log.write("out", b"before")
    job_log.forget()
    job_log.write("out", b"after")
    assert job_log.unshipped(16) == []


def test_what_did_not_arrive_is_taken_again(tmp_path: Path) -> None:
    job_log = make_log(tmp_path)
    job_log.write("out", b"one")
    first = job_log.unshipped(16)
    job_log.write("err", b"two")
    job_log.ship_again(first[0][1])
    assert job_log.unshipped(16) == [("out", 0, b"one"), ("err", 3, b"two")]


def test_shipping_skips_what_no_tail_would_hold(tmp_path: Path) -> None:
    job_log = make_log(tmp_path)
    job_log.write("out", b"x" * (3 * TAIL_BYTES))
    assert job_log.unshipped(16)[0][1] == 2 * TAIL_BYTES
    job_log.forget()


# --- with threads and a queue ---


class Scene:
    """Logs of a worker that holds one job."""

    def __init__(self, server: QueueServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.logs = Logs(Queue(Link(server.endpoint, socket_timeout_s=1)), LIMIT_BYTES)
        self.logs.start()
        self.link = Link(server.endpoint)

    def grant(self) -> Grant:
        hand = Hand(self.link, "gpulayer:{default}:")
        sig = signature()
        hand.introduce(sig, {})
        machine = hand.machine("w1", {sig: ()})
        hand.submit(sig)
        return hand.claim(machine)[0]

    def tail(self, job_id: str) -> bytes:
        return b"".join(self.entries(job_id))

    def entries(self, job_id: str) -> list[bytes]:
        entries = self.link.call_idempotent(
            "XRANGE", f"gpulayer:{{default}}:log:{job_id}:1:0", "-", "+", deadline_s=PATIENCE_S
        )
        return [dict(zip(v[::2], v[1::2], strict=True)).get(b"d", b"") for _, v in entries]


def end(scene: Scene, opened: list[tuple[JobLog, list[int]]]) -> None:
    for job_log, writers in opened:
        for writer in writers:
            os.close(writer)
        scene.logs.finish(job_log, PATIENCE_S)
        scene.logs.forget(job_log)


@pytest.fixture
def scene(queue_server: object, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(queue_server(append_only=True), tmp_path)  # type: ignore[operator]
    yield scene
    scene.logs.stop()
    scene.link.close()


def test_a_live_tail_is_whole_after_an_outage(scene: Scene) -> None:
    grant = scene.grant()
    job_log, writers = scene.logs.open(grant.id, grant.token, scene.folder / "spill")
    os.write(writers[0], b"before ")
    wait_until(lambda: scene.tail(grant.id) == b"before ", PATIENCE_S, "the first words are shipped")
    scene.server.kill()
    os.write(writers[0], b"during ")
    wait_until(lambda: job_log.size == 14, PATIENCE_S, "the words of the outage are read")
    scene.server.start()
    os.write(writers[1], b"after")
    wait_until(lambda: scene.tail(grant.id) == b"before during after", PATIENCE_S, "all words are shipped")
    for writer in writers:
        os.close(writer)
    scene.logs.finish(job_log, PATIENCE_S)
    scene.logs.forget(job_log)


def test_a_log_that_is_gone_while_its_pipe_is_open_stops_no_other(scene: Scene) -> None:
    grant = scene.grant()
    gone, theirs = scene.logs.open("j_gone", "1:x", scene.folder / "gone")
    scene.logs.forget(gone)
    os.write(theirs[0], b"x" * 1000)
    job_log, writers = scene.logs.open(grant.id, grant.token, scene.folder / "spill")
    os.write(writers[0], b"heard")
    wait_until(lambda: scene.tail(grant.id) == b"heard", PATIENCE_S, "another log is read and shipped")
    for writer in (*theirs, *writers):
        os.close(writer)
    scene.logs.finish(job_log, PATIENCE_S)
    scene.logs.forget(job_log)


def test_the_first_words_of_a_job_do_not_wait_for_anothers_pause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer_worker.logs.SHIP_EVERY_S", 10 * PATIENCE_S)
    first, second = scene.grant(), scene.grant()
    logs = [scene.logs.open(grant.id, grant.token, scene.folder / grant.id) for grant in (first, second)]
    os.write(logs[0][1][0], b"first\n")
    wait_until(lambda: scene.tail(first.id) == b"first\n", PATIENCE_S, "the first job's words are shipped")

    os.write(logs[0][1][0], b"more\n")
    os.write(logs[1][1][0], b"second\n")

    wait_until(lambda: scene.tail(second.id) == b"second\n", PATIENCE_S, "the second job's words are shipped")
    assert scene.tail(first.id) == b"first\n"
    end(scene, logs)
    assert scene.tail(first.id) == b"first\nmore\n"


def test_a_line_that_comes_in_pieces_is_shipped_as_soon_as_it_is_whole(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer_worker.logs.LINE_S", 10 * PATIENCE_S)
    grant = scene.grant()
    opened = scene.logs.open(grant.id, grant.token, scene.folder / "spill")

    os.write(opened[1][0], b"the line")
    wait_until(lambda: opened[0].size == 8, PATIENCE_S, "the first piece is read")
    os.write(opened[1][0], b"\n")

    wait_until(
        lambda: scene.entries(grant.id) == [b"the line\n"], PATIENCE_S, "the line is shipped in one entry"
    )
    end(scene, [opened])


def unread(scene: Scene, grant: Grant) -> tuple[JobLog, list[int]]:
    return scene.logs.open(grant.id, grant.token, scene.folder / "spill", at_once=False)


def test_a_log_that_nobody_read_while_its_job_ran_is_whole_at_its_end(scene: Scene) -> None:
    grant = scene.grant()
    job_log, writers = unread(scene, grant)
    os.write(writers[0], b"out")
    os.write(writers[1], b"err")

    end(scene, [(job_log, writers)])

    assert scene.tail(grant.id) == b"outerr"
    assert job_log.closed.done()


def test_a_log_is_read_live_from_the_moment_that_it_is_watched(scene: Scene) -> None:
    grant = scene.grant()
    job_log, writers = unread(scene, grant)
    os.write(writers[0], b"before ")
    scene.logs.watch(job_log)
    os.write(writers[0], b"after")

    wait_until(lambda: scene.tail(grant.id) == b"before after", PATIENCE_S, "all words are shipped")

    end(scene, [(job_log, writers)])


def test_who_still_holds_the_pipe_of_an_unread_log_is_heard_for_a_while(scene: Scene) -> None:
    grant = scene.grant()
    job_log, writers = unread(scene, grant)
    os.write(writers[0], b"job ")
    scene.logs.finish(job_log, 0.01)
    os.write(writers[0], b"stray")

    wait_until(lambda: job_log.size == len(b"job stray"), PATIENCE_S, "the late words are read")

    end(scene, [(job_log, writers)])
    assert scene.tail(grant.id) == b"job stray"


def test_a_log_that_was_never_read_leaves_no_pipe_open(scene: Scene) -> None:
    grant = scene.grant()
    job_log, writers = unread(scene, grant)

    scene.logs.forget(job_log)

    for writer in writers:
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"to nobody")
        os.close(writer)
