"""Waiting: woken by the queue, sure of nothing that a loss may have hidden."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer import waiter as waiters
from gpulayer.client import Client
from gpulayer.session import Session
from gpulayer.slots import Early, Notice, Slot
from gpulayer.targets import resolve_target
from gpulayer.waiter import Waiter
from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import WaitTimeout
from gpulayer_broker.job import new_job_id
from gpulayer_broker.keys import root_of
from tests.queueing import Hand
from tests.sdk.benches import Bench
from tests.servers import QueueServer
from tests.support import PATIENCE_S, in_background, wait_until


def work() -> int:
    return 1


def test_a_wait_is_woken_and_does_not_poll(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The silence after which it would ask on its own.
    monkeypatch.setattr(client._opened.waiter, "_silence_s", 10 * PATIENCE_S)
    job = client.submit(work)
    ended = threading.Event()
    client._opened.waiter.listen(job._slot, lambda _: ended.set())
    wait_until(lambda: client._opened.waiter._link is not None, PATIENCE_S, "the waiter is connected")

    bench.give(job.id, 1)
    assert ended.wait(PATIENCE_S)


def test_after_an_end_the_next_is_heard_before_it_is_waited_for(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "LINGER_S", PATIENCE_S)
    monkeypatch.setattr(client._opened.waiter, "_silence_s", PATIENCE_S)
    first, second = client.submit(work), client.submit(work)
    with in_background(lambda: bench.give(first.id, 1)):
        assert first.result(PATIENCE_S) == 1

    bench.give(second.id, 2)
    wait_until(lambda: second._slot.notice is not None, PATIENCE_S, "the next end is heard")


@pytest.fixture
def listening(client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Waiter:
    """A waiter that hears all that is told from now on, and does not ask by itself."""
    waiter = client._opened.waiter
    monkeypatch.setattr(waiter, "_silence_s", 10 * PATIENCE_S)
    waiter.listen(client.submit(work)._slot, lambda _: None)
    wait_until(lambda: waiter._link is not None, PATIENCE_S, "the waiter is connected")
    return waiter


def test_an_end_that_is_told_before_the_submit_has_come_back_is_known(
    client: Client, bench: Bench, listening: Waiter
) -> None:
    early = client.submit(work)
    job_id = early.id
    del early  # and its slot: as if the submit were still on its way
    bench.give(job_id, 7)
    wait_until(lambda: job_id in listening._early._kept, PATIENCE_S, "the end is told")

    assert listening.wait(listening.slot(job_id, submitted=True), 0)
    assert job_id not in listening._early._kept


def test_where_too_much_is_told_too_early_a_wait_asks_first(
    client: Client, bench: Bench, listening: Waiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening._early, "_most", 1)
    ids = [client.submit(work).id for _ in range(3)]
    for job_id in ids:
        bench.give(job_id, 7)
    wait_until(lambda: ids[-1] in listening._early._kept, PATIENCE_S, "the last end is told")

    assert list(listening._early._kept) == ids[-1:]
    for job_id in ids:
        assert listening.wait(listening.slot(job_id, submitted=True), PATIENCE_S)


def test_early_news_is_kept_for_as_long_as_a_submit_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    early, notice = Early(), Notice("succeeded")
    early.keep("old", notice)
    monkeypatch.setattr("gpulayer.slots.SUBMIT_S", 0.0)
    early.keep("new", notice)

    assert "old" not in early._kept
    assert early.slot("new", True).watched


def test_who_follows_after_a_page_was_told_is_told_that_pages_were_missed(listening: Waiter) -> None:
    told: list[str] = []

    class Follower:
        def page(self, start: int, data: bytes) -> None:
            told.append(f"page {start}")

        def missed(self) -> None:
            told.append("missed")

    follower, later = Follower(), Follower()
    listening._page("j_early", 0, b"")
    slot = listening.slot("j_early", submitted=True)
    listening.follow(slot, follower)
    listening._page("j_early", 5, b"")
    listening.follow(slot, later)

    assert told == ["missed", "page 5"]


def test_the_thread_ends_soon_after_the_last_wait(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "LINGER_S", 0.05)
    first, second = client.submit(work), client.submit(work)
    with in_background(lambda: bench.give(first.id, 1)):
        assert first.result(PATIENCE_S) == 1

    wait_until(lambda: client._opened.waiter._thread is None, PATIENCE_S, "the thread has ended")
    bench.give(second.id, 2)
    assert second.result(PATIENCE_S) == 2


def test_a_wait_of_no_time_at_all_says_at_once_that_the_end_is_not_there(client: Client) -> None:
    job = client.submit(work)
    for timeout in (0, -1):
        with pytest.raises(WaitTimeout):
            job.result(timeout)

    late: list[bool] = []
    with in_background(lambda: late.append(client._opened.waiter.wait(job._slot, -1))):
        wait_until(lambda: bool(late), PATIENCE_S, "another thread has waited")
    assert late == [False]


def test_a_doubt_is_settled_while_another_thread_submits(client: Client) -> None:
    waiter, held, done = client._opened.waiter, deque[Slot](maxlen=500), threading.Event()

    def submits() -> None:
        while not done.is_set():
            held.append(waiter.slot(new_job_id(), submitted=True))

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with in_background(submits):
            try:
                for _ in range(100):
                    waiter._ask_again(client._session.queue)
            finally:
                done.set()
    finally:
        sys.setswitchinterval(usual_s)
    assert held


def test_many_threads_wait_for_one_job(client: Client, bench: Bench) -> None:
    job = client.submit(work)
    results: list[int] = []
    with in_background(*[lambda: results.append(job.result(PATIENCE_S))] * 8):
        bench.give(job.id, 5)

    assert results == [5] * 8


def test_ctrl_c_in_the_middle_of_the_waiter_s_start_spoils_no_later_wait_and_no_close(
    client: Client, address: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    def wait_with_ctrl_c(job: gl.Job[int]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                job.wait(PATIENCE_S)

    with Client(redis=address) as other:
        job = other.submit(work)
        wait_with_ctrl_c(job)
        assert not job._slot.callbacks
        bench.give(job.id, 7)
        assert job.result(PATIENCE_S) == 7
    with Client(redis=address) as last:
        wait_with_ctrl_c(last.submit(work))


def test_another_process_s_job_is_waited_for(client: Client, address: str, bench: Bench) -> None:
    job = client.submit(work)
    with Client(redis=address) as other:
        handle = other.get(job.id)
        with in_background(lambda: bench.give(job.id, 9)):
            assert handle.result(PATIENCE_S) == 9


def test_a_job_that_ended_before_it_was_asked_for_is_known_at_once(
    client: Client, address: str, bench: Bench
) -> None:
    job = client.submit(work)
    bench.give(job.id, 9)
    with Client(redis=address) as other:
        assert other.get(job.id).wait(PATIENCE_S) == "succeeded"


def test_notices_that_are_lost_are_made_up_for(address: str, bench: Bench) -> None:
    session = Session(resolve_target(redis=address))
    waiter = Waiter(session, silence_s=0.1)
    with Client(redis=address) as client:
        job = client.submit(work)
        slot = waiter.slot(job.id, submitted=True)
        ended = threading.Event()
        waiter.listen(slot, lambda _: ended.set())
        # Nobody tells this waiter: the job is watched by no client of its name.
        bench.give(job.id, 1)
        assert ended.wait(PATIENCE_S)
    waiter.close()
    session.close()


def test_a_gap_in_the_notices_is_noticed(client: Client, bench: Bench) -> None:
    first, second, third = (client.submit(work) for _ in range(3))
    key = bench.hand.key(f"done:{client._opened.waiter.client}")
    bench.give(first.id, 1)
    assert first.result(PATIENCE_S) == 1
    bench.give(second.id, 2)
    bench.hand.link.call("XDEL", key, "0-2")
    bench.give(third.id, 3)

    assert third.result(PATIENCE_S) == 3
    assert second.result(PATIENCE_S) == 2


def test_a_job_that_waits_for_jobs_that_cannot_begin_says_so_once(
    address: str,
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    with Client(redis=address) as outside:
        running, waiting = outside.submit(work), outside.submit(work)
        bench.take(running.id)
        if waiting.id in bench.machine.held:
            bench.hand.commit(bench.machine, bench.machine.held[waiting.id], "retry", delay_ms=60_000)
    monkeypatch.setenv("GPULAYER_JOB_ID", "j_parent")
    monkeypatch.setenv("GPULAYER_STORE", str(tmp_path))
    monkeypatch.setenv("GPULAYER_OWNER", "somebody@somewhere")
    session = Session(resolve_target())
    waiter = Waiter(session, silence_s=0.1)
    try:
        assert not waiter.wait(waiter.slot(running.id), 0.5)
        assert capfd.readouterr().err == ""
        assert not waiter.wait(waiter.slot(waiting.id), 0.5)
        told = capfd.readouterr().err
        assert told.count("this job waits for 1 jobs of its own, none of which has begun") == 1
        assert "holds its slot" in told
        with Client() as inside:
            child = inside.submit(work).record
            assert child.owner == "somebody@somewhere"
            assert inside.trusts_workers
    finally:
        waiter.close()
        session.close()


def test_silence_lets_the_clock_tick(address: str, bench: Bench) -> None:
    session = Session(resolve_target(redis=address))
    waiter = Waiter(session, silence_s=0.1)
    with Client(redis=address) as client:
        job = client.submit(work, delay=0.2)
        assert job.record.phase == "delayed"
        slot = waiter.slot(job.id)
        waiter.listen(slot, lambda _: None)
        wait_until(lambda: job.record.phase == "ready", PATIENCE_S, "the delayed job became runnable")
    waiter.close()
    session.close()


def test_it_survives_a_kill_of_the_server_and_its_restart(
    queue_server: Callable[..., QueueServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_NAMESPACE", "default")
    server = queue_server("--appendfsync", "always", append_only=True)
    with Client(redis=server.endpoint.url) as client, Link(server.endpoint) as link:
        bench = Bench(Hand(link, root_of("default")), "default")
        job = client.submit(work)
        results: list[int] = []
        with in_background(lambda: results.append(job.result(PATIENCE_S))):
            wait_until(lambda: client._opened.waiter._link is not None, PATIENCE_S, "the waiter is connected")
            server.kill()
            server.start()
            bench.give(job.id, 6)

        assert results == [6]
        after = client.submit(work)
        bench.give(after.id, 7)
        assert after.result(PATIENCE_S) == 7


def test_a_forked_child_waits_on_a_connection_of_its_own(client: Client, bench: Bench) -> None:
    first, second = client.submit(work), client.submit(work)
    bench.give(first.id, 1)
    assert first.result(PATIENCE_S) == 1
    name = client._opened.waiter.client

    pid = os.fork()
    if pid == 0:
        try:
            ok = (
                client._opened.waiter.client != name
                and second.result(PATIENCE_S) == 2
                and first.result(PATIENCE_S) == 1
            )
            ok = ok and client.submit(work).state == "queued"
        except BaseException:  # noqa: BLE001 - the child must never return into pytest
            ok = False
        os._exit(0 if ok else 1)
    bench.give(second.id, 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert second.result(PATIENCE_S) == 2


def test_closing_the_client_ends_its_waits_and_its_thread(address: str) -> None:
    client = Client(redis=address)
    job = client.submit(work)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            job.result(PATIENCE_S)
        except gl.QueueUnreachable as error:
            errors.append(error)

    with in_background(wait), closing(client):
        wait_until(lambda: client._opened.waiter._link is not None, PATIENCE_S, "the waiter is connected")

    assert [type(error) for error in errors] == [gl.QueueUnreachable]
    wait_until(
        lambda: not any(thread.name == "gpulayer-waiter" for thread in threading.enumerate()),
        PATIENCE_S,
        "no waiter's thread is left",
    )
    client.submit  # noqa: B018 - a closed client still has its names
    with pytest.raises(gl.QueueUnreachable, match="closed"):
        client.submit(work)


def test_read_notices_leave_the_queue(client: Client, bench: Bench, link: Link) -> None:
    key = bench.hand.key(f"done:{client._opened.waiter.client}")
    jobs = [job for batch in _batches(client, 1200) for job in batch]
    with in_background(lambda: bench.serve(1200, lambda _: 1)):
        for job in jobs:
            job.wait(PATIENCE_S)

    assert link.call("XLEN", key) < 1000


def _batches(client: Client, count: int) -> list[list[gl.Job[int]]]:
    from gpulayer.maps import submit_jobs
    from gpulayer.options import plan_of
    from gpulayer.payload import pack_function

    opened = client._opened
    orders = opened.submitter.function_orders(pack_function(work), [((), {})] * count, plan_of({}))
    return list(submit_jobs(opened, orders))


def test_a_handle_that_nobody_holds_costs_nothing(client: Client) -> None:
    client.submit(work)

    assert len(client._opened.waiter._slots) == 0


def test_a_callback_that_fails_ends_no_other_wait(
    client: Client, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Slot) -> None:
        raise RuntimeError("its loop is closed")

    first, second = client.submit(work), client.submit(work)
    ended = threading.Event()
    client._opened.waiter.listen(first._slot, fails)
    client._opened.waiter.listen(first._slot, lambda _: ended.set())
    with in_background(lambda: second.wait(PATIENCE_S)):
        wait_until(lambda: second._slot.callbacks, PATIENCE_S, "the second is waited for")
        bench.give(first.id, 1)
        assert ended.wait(PATIENCE_S)
        bench.give(second.id, 2)

    assert second.result(PATIENCE_S) == 2
    assert f"a callback of job {first.id} failed" in caplog.text


def test_waiting_that_cannot_begin_leaves_nothing_behind(
    client: Client, address: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise gl.QueueUnreachable("nobody answers")

    job = client.submit(work)
    with Client(redis=address) as other:
        handle = other.get(job.id)
        with monkeypatch.context() as patched:
            patched.setattr(other._opened.waiter, "_watch", away)
            patched.setattr("gpulayer.session.PATIENCE_S", 0)
            with pytest.raises(gl.QueueUnreachable, match="nobody answers"):
                other._opened.waiter.listen(handle._slot, lambda _: None)
        assert not handle._slot.callbacks
        assert not handle._slot.watched
        monkeypatch.setattr(other._opened.waiter, "_silence_s", 10 * PATIENCE_S)
        with in_background(lambda: bench.give(job.id, 9)):
            assert handle.result(PATIENCE_S) == 9


def test_a_repeated_callback_is_not_made(client: Client, bench: Bench) -> None:
    job = client.submit(work)
    heard: list[Slot] = []
    client._opened.waiter.listen(job._slot, heard.append)
    bench.hand.run(functions.watch(client._opened.waiter.client, [job.id]))
    bench.give(job.id, 1)
    job.wait(PATIENCE_S)

    later = client.submit(work)
    bench.give(later.id, 1)
    later.wait(PATIENCE_S)
    assert heard == [job._slot]
