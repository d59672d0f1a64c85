"""Reports that gather while a call is under way: they go together, each has its own verdict, and they claim once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from gpulayer_broker import claims as claims_module
from gpulayer_broker import functions
from gpulayer_broker.answers import Committed
from gpulayer_broker.attempts import Attempt
from gpulayer_broker.connection import Endpoint, Link, ReplyError
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.functions import Ending
from gpulayer_broker.queue import Queue
from tests.queueing import Claimer, Hand, signature
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

CPU = signature()
SLOTS = 4


@dataclass
class Worker(Claimer):
    """One with four places, all of them taken."""

    def __post_init__(self) -> None:
        self.joins(CPU, slots=SLOTS + 2, capacity=SLOTS)
        for _ in range(SLOTS):
            self.hand.submit(CPU)
        assert self.claims.claim() == SLOTS
        self.held = self.taken()

    def taken(self) -> list[Attempt]:
        """What was delivered since this was last asked."""
        attempts, self.delivered[:] = list(self.delivered), []
        return attempts

    @contextmanager
    def together(self, endings: Sequence[Ending], attempts: Sequence[Attempt]) -> Iterator[Reports]:
        """All of them are ready to go while another call holds the road."""
        with ThreadPoolExecutor(len(endings)) as threads, self.claims.lock:
            reports = [
                threads.submit(self.claims.commit, (attempt,), ending)
                for attempt, ending in zip(attempts, endings, strict=True)
            ]
            wait_until(
                lambda: len(self.claims._reports) == len(endings), PATIENCE_S, "the reports have gathered"
            )
            yield reports

    def end(self, attempts: Sequence[Attempt], **changes: Ending) -> list[Committed]:
        endings = [changes.get(attempt.id, success(attempt)) for attempt in attempts]
        with self.together(endings, attempts) as reports:
            pass
        return [report.result(PATIENCE_S) for report in reports]


Reports = list[Future[Committed]]


def success(attempt: Attempt) -> Ending:
    return Ending(attempt.id, attempt.token, "succeeded", fields={"result": b"1", "result_kind": "json"})


@pytest.fixture
def worker(link: Link, root: str, valkey: Endpoint, namespace: str) -> Iterator[Worker]:
    queue = Queue(Link(valkey), namespace)
    yield Worker(Hand(link, root), queue)
    queue.link.close()


def test_reports_that_gathered_end_their_attempts_and_fill_all_their_places_by_one_claim(
    worker: Worker,
) -> None:
    waiting = [worker.hand.submit(CPU) for _ in range(SLOTS + 1)]

    verdicts = [committed.verdict for committed in worker.end(worker.held)]

    assert verdicts == ["ok"] * SLOTS
    assert [attempt.id for attempt in worker.taken()] == waiting[:SLOTS]
    assert {attempt.id for attempt in worker.attempts.all()} == set(waiting[:SLOTS])
    assert {worker.queue.record(attempt.id).state for attempt in worker.held} == {"succeeded"}


def test_no_bell_rings_for_places_that_the_same_send_fills(worker: Worker) -> None:
    for _ in range(SLOTS):
        worker.hand.submit(CPU)

    worker.end(worker.held)

    assert "work" not in worker.hand.mail("w1")


def test_each_report_gets_its_own_verdict(worker: Worker) -> None:
    stale, cancelled, *_ = worker.held
    worker.hand.expire(stale.id)
    worker.hand.tick()
    worker.hand.run(functions.cancel(cancelled.id))
    failure = Ending(cancelled.id, cancelled.token, "failed", "user_error")

    verdicts = [committed.verdict for committed in worker.end(worker.held, **{cancelled.id: failure})]

    assert verdicts == ["stale", "cancelled", "ok", "ok"]
    assert [attempt.id for attempt in worker.taken()] == [stale.id], "which waits again"


@pytest.mark.parametrize("position", range(SLOTS))
def test_a_report_that_the_queue_refuses_is_told_to_its_own_thread_alone(
    worker: Worker, position: int
) -> None:
    """Wherever it stands: the places of the others are filled, and its own is still taken."""
    waiting = [worker.hand.submit(CPU) for _ in range(SLOTS)]
    refused = worker.held[position]
    endings = [success(attempt) for attempt in worker.held]
    endings[position] = Ending(refused.id, refused.token, "succeeded", fields={"no such field": b""})

    with worker.together(endings, worker.held) as reports:
        pass

    others = [report for report in reports if report is not reports[position]]
    assert [report.result(PATIENCE_S).verdict for report in others] == ["ok"] * (SLOTS - 1)
    with pytest.raises(ReplyError, match="no such field"):
        reports[position].result(PATIENCE_S)
    assert worker.attempts.get(refused.id) is refused
    came = worker.taken()
    assert len(came) >= SLOTS - 1
    assert [attempt.id for attempt in came] == waiting[: len(came)]

    worker.claims.commit((refused,), Ending(refused.id, refused.token, "failed", "result_error"))
    assert len(worker.attempts) == SLOTS, "as many as it has places"


def test_reports_beyond_one_send_go_in_the_next(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "MOST_TOGETHER", SLOTS - 1)
    waiting = [worker.hand.submit(CPU) for _ in range(SLOTS)]

    assert [committed.verdict for committed in worker.end(worker.held)] == ["ok"] * SLOTS
    assert [attempt.id for attempt in worker.taken()] == waiting


def test_reports_without_an_answer_fail_for_each_thread_and_are_told_again_by_the_next_try(
    queue_server: Callable[..., QueueServer],
) -> None:
    server = queue_server()
    with Link(server.endpoint) as link:
        queue = Queue(Link(server.endpoint, socket_timeout_s=0.2), deadline_s=0.2)
        worker = Worker(Hand(link, queue.keys.root), queue)
        waiting = [worker.hand.submit(CPU) for _ in range(SLOTS)]

        with worker.together([success(attempt) for attempt in worker.held], worker.held) as reports:
            os.kill(server.pid, signal.SIGSTOP)
        errors = [report.exception(PATIENCE_S) for report in reports]
        os.kill(server.pid, signal.SIGCONT)

        assert all(isinstance(error, QueueUnreachable) for error in errors)
        assert len({id(error) for error in errors}) == SLOTS, "each thread raises its own"
        assert len(worker.attempts) == SLOTS
        queue.deadline_s = PATIENCE_S
        assert {committed.verdict for committed in worker.end(worker.held)} <= {"ok", "already"}
        assert [attempt.id for attempt in worker.taken()] == waiting
        queue.link.close()
