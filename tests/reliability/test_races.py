"""Cancels, submits under one key and broken-off calls that meet other things at every moment have one outcome."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import GpulayerError, IdempotencyConflict, QueueUnreachable
from gpulayer_broker.store.bundle import make_bundle
from tests.reliability.conftest import Hire
from tests.reliability.nemesis import is_gone, outage
from tests.reliability.proxy import Proxy
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk


def cancel(desk: Desk, job: str) -> tuple[str, str]:
    return desk.queue.run(functions.cancel(job))


# --- cancel at every moment ---


def test_a_cancel_at_any_moment_ends_a_job_once_and_its_processes_with_it(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    hire(slots=3)
    dice = random.Random(39)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(30):
        (source / f"f{number}").write_text("x")
    digest = make_bundle(source, desk.store).digest
    pids, answers = tmp_path / "pids", Counter[str]()
    seen: dict[str, str] = {}
    for number in range(90):
        last_s = 300 if number % 10 == 5 else 0.01 * (number % 7)
        script = f"echo $$ >> {pids}; trap 'exit 0' TERM; sleep {last_s} & wait"
        job = desk.shell(script, source=digest if number % 3 == 0 else "")
        if number % 10 == 5:
            desk.reaches(job, "running")
        elif number % 10 == 0:
            desk.final(job)
        else:
            pause(dice.choice([0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1]))
        seen[job] = cancel(desk, job)[0]
        answers[seen[job]] += 1
    for job, answer in seen.items():
        state = desk.final(job).state
        allowed = {"cancelled": {"cancelled"}, "asked": {"cancelled", "succeeded"}, "too_late": {"succeeded"}}
        assert state in allowed[answer]
    assert answers.keys() == {"cancelled", "asked", "too_late"}, "the moments were spread over the whole life"
    assert all(is_gone(int(pid)) for pid in pids.read_text().split())
    told = done(desk)
    assert {job: told.count(job) for job in seen} == dict.fromkeys(seen, 1)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def done(desk: Desk) -> list[str]:
    """Every end that the client was told."""
    entries = desk.link.call("XRANGE", desk.queue.keys.done(desk.client), "-", "+")
    return [dict(zip(values[::2], values[1::2], strict=True))[b"job"].decode() for _, values in entries]


@pytest.mark.parametrize("delay_s", [0.02, 0.1])
def test_a_cancel_that_meets_a_commit_in_flight_leaves_one_end(
    desk: Desk, proxy: Proxy, hire: Hire, delay_s: float, tmp_path: Path
) -> None:
    hire(endpoint=proxy.endpoint, slots=4)
    desk.final(desk.command("true"))
    proxy.delay_s = delay_s
    for number in range(12):
        gate = tmp_path / f"gate{number}"
        job = desk.shell(f"while [ ! -e {gate} ]; do sleep 0.005; done")
        desk.reaches(job, "running")
        gate.touch()
        pause(0.004 * number)
        answer, _ = cancel(desk, job)
        state = desk.final(job).state
        assert state in {"asked": ("cancelled", "succeeded"), "too_late": ("succeeded",)}[answer]
        assert desk.record(job).state == state
    proxy.delay_s = 0


def test_a_cancelled_job_whose_worker_is_lost_ends_cancelled(desk: Desk, hire: Hire) -> None:
    worker = hire()
    job = desk.shell("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    wait_until(lambda: desk.tail(job), PATIENCE_S, "it runs")
    cancel(desk, job)
    worker.kill()
    worker.start()
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("cancelled", "cancelled")


# --- one key, many submits ---


def test_fifty_submits_of_one_key_across_a_killed_server_make_one_job(
    desk: Desk, server: QueueServer, tmp_path: Path
) -> None:
    ids: list[str] = []
    start = threading.Barrier(51)

    def submit() -> None:
        mine = Desk(server.endpoint, desk.namespace)
        start.wait()
        while True:
            try:
                ids.append(mine.submit(mine.command_spec("true"), idempotency_key="k", digest="d"))
                break
            except QueueUnreachable:
                continue
        mine.close()

    threads = [threading.Thread(target=submit) for _ in range(50)]
    for thread in threads:
        thread.start()
    start.wait()
    with outage(server):
        pass
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ids) == 50
    assert len(set(ids)) == 1
    assert desk.link.call("ZCARD", desk.queue.keys.jobs("queued")) == 1


def test_one_key_for_two_requests_is_a_conflict(desk: Desk) -> None:
    first = desk.submit(desk.command_spec("true"), idempotency_key="k", digest="one")
    with pytest.raises(IdempotencyConflict) as refused:
        desk.submit(desk.command_spec("false"), idempotency_key="k", digest="two")
    assert refused.value.job_id == first


# --- a call that is broken off ---


A_MOMENT_S = 0.0001


class Interrupted(BaseException):
    """As Ctrl-C, or the cancel of whoever waits, in the middle of a call."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def strike(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name == "__del__":  # Python itself drops what is raised in there
                signal.setitimer(signal.ITIMER_REAL, A_MOMENT_S)
                return
            frame = frame.f_back
        raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A socket that is just being made belongs to nobody yet: Python closes it, and says so.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_call_broken_off_anywhere_gives_its_answer_to_nobody_else(
    server: QueueServer, proxy: Proxy
) -> None:
    dice = random.Random(12)
    proxy.delay_s = 0.003
    broken, moment_s = 0, 0.006
    with Link(proxy.endpoint) as link:
        for number in range(150):
            try:
                with interrupted_after(dice.uniform(0.1, 2) * moment_s):
                    assert link.call("ECHO", f"first {number}") == b"first %d" % number
                moment_s *= 0.9
            except (Interrupted, GpulayerError):
                broken += 1
                # About as long as a call takes here, whatever that is.
                moment_s *= 1.1
            assert link.call("ECHO", f"second {number}") == b"second %d" % number
    assert 20 < broken < 150
