"""A connection that breaks after any number of bytes of a submit, claim or commit: nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from gpulayer_broker.attempts import Attempt, Attempts
from gpulayer_broker.connection import Link, NoAnswer
from gpulayer_broker.functions import Ending, Registration, Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import build_requirements
from tests import checker
from tests.queueing import claims_of, signature
from tests.reliability.proxy import REPLY, REQUEST, Proxy
from tests.servers import QueueServer
from tests.snapshot import read
from tests.support import PATIENCE_S, wait_until

SIG = signature()
SPEC = b"s" * 120
STEP = 9


@dataclass
class Scene:
    """A client and a worker whose only road to the server is the proxy; `direct` looks at the server itself."""

    proxy: Proxy
    direct: Queue
    queue: Queue
    attempts: Attempts = field(default_factory=Attempts)
    delivered: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.claims = claims_of(self.queue, self.attempts, self.delivered.append)
        self.direct.load()
        hand_in = Registration("w1", "w1", "i1", "k1", 64, 64, 64_000, 10_000, 10_000, b"{}", b"{}")
        self.direct.register(hand_in)
        self.direct.link.call("HSET", self.key("fits:k1"), SIG, "-")
        self.direct.link.call("SADD", self.key(f"classes:{SIG}"), "k1")
        self.direct.link.call("HSET", self.key("signatures"), SIG, b"{}")

    def key(self, name: str) -> str:
        return self.direct.keys.root + name

    def submit(self, queue: Queue) -> str:
        return queue.submit(Submission(new_job_id(), SIG, SPEC), build_requirements())

    def states(self) -> dict[str, int]:
        names = ("queued", "running", "succeeded", "failed")
        return {name: int(self.direct.link.call("ZCARD", self.key(f"jobs:{name}"))) for name in names}

    def check(self) -> None:
        assert checker.violations(read(self.direct.link, self.direct.keys.root)) == []

    def holds_what_the_queue_says(self) -> bool:
        held = self.direct.link.call("SMEMBERS", self.key("running:w1"))
        return {attempt.id.encode() for attempt in self.attempts.all()} == set(held)


@pytest.fixture
def scene(server: QueueServer, proxy: Proxy) -> Iterator[Scene]:
    direct = Queue(Link(server.endpoint))
    scene = Scene(proxy, direct, Queue(Link(proxy.endpoint, socket_timeout_s=2), deadline_s=5))
    yield scene
    scene.queue.link.close()
    direct.link.close()


def sweep(proxy: Proxy, size: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Arms a cut at each point of an exchange of that size, until it no longer happens within it."""
    for direction in (REQUEST, REPLY):
        for count in [*range(1, 12), *range(12, size[direction] + 1, STEP), size[direction]]:
            cuts = proxy.cuts
            proxy.cut_after(count, direction)
            yield direction, count
            assert proxy.cuts == cuts + 1, f"the {direction} was cut after {count} bytes"


def sized(proxy: Proxy, before: dict[str, int]) -> dict[str, int]:
    return {name: proxy.passed[name] - before[name] for name in proxy.passed}


def test_a_submit_cut_anywhere_enters_the_queue_once(scene: Scene) -> None:
    scene.submit(scene.queue)
    before = dict(scene.proxy.passed)
    scene.submit(scene.queue)
    size, submitted = sized(scene.proxy, before), 2
    for where in sweep(scene.proxy, size):
        job = scene.submit(scene.queue)
        submitted += 1
        assert scene.direct.record(job).state == "queued", where
        assert scene.states()["queued"] == submitted, where
    scene.check()


def test_a_claim_cut_anywhere_holds_each_job_once(scene: Scene) -> None:
    scene.claims.open(2)
    scene.submit(scene.direct)
    scene.claims.claim()
    before = dict(scene.proxy.passed)
    scene.submit(scene.direct)
    scene.claims.claim()
    size = sized(scene.proxy, before)
    for granted, where in enumerate(sweep(scene.proxy, size), 3):
        scene.claims.capacity += 1
        scene.submit(scene.direct)
        assert scene.claims.claim() == 1, where
        assert len(scene.delivered) == len({a.id for a in scene.delivered}) == granted, where
        if granted == 60:
            end_all(scene)
    assert scene.holds_what_the_queue_says()
    scene.check()


def end_all(scene: Scene) -> None:
    """Makes room: the worker has 64 slots."""
    scene.claims._open = False
    for attempt in scene.attempts.all():
        scene.direct.commit(Ending(attempt.id, attempt.token, "succeeded"), None, ())
        scene.attempts.remove(attempt)
    scene.claims.open(1)


def test_a_commit_cut_anywhere_ends_its_job_once_and_brings_the_next(scene: Scene) -> None:
    scene.claims.open(1)
    scene.submit(scene.direct)
    scene.claims.claim()

    def commit() -> str:
        scene.submit(scene.direct)
        attempt = scene.attempts.all()[0]
        ending = Ending(
            attempt.id, attempt.token, "succeeded", fields={"result": b"r" * 100, "result_kind": "json"}
        )
        return scene.claims.commit((attempt,), ending).verdict

    before = dict(scene.proxy.passed)
    assert commit() == "ok"
    size, ended = sized(scene.proxy, before), 1
    for where in sweep(scene.proxy, size):
        assert commit() in ("ok", "already"), where
        ended += 1
        assert scene.states() == {"queued": 0, "running": 1, "succeeded": ended, "failed": 0}, where
        assert scene.holds_what_the_queue_says(), where
    scene.check()


def test_reports_that_go_together_and_are_cut_anywhere_end_each_job_once_and_fill_both_places(
    scene: Scene,
) -> None:
    scene.claims.open(2)
    scene.submit(scene.direct)
    scene.submit(scene.direct)
    scene.claims.claim()

    def commit(attempt: Attempt) -> str:
        ending = Ending(
            attempt.id, attempt.token, "succeeded", fields={"result": b"r", "result_kind": "json"}
        )
        return scene.claims.commit((attempt,), ending).verdict

    def commit_both() -> set[str]:
        scene.submit(scene.direct)
        scene.submit(scene.direct)
        with ThreadPoolExecutor(2) as threads:
            with scene.claims.lock:
                told = [threads.submit(commit, attempt) for attempt in scene.attempts.all()]
                wait_until(lambda: len(scene.claims._reports) == 2, PATIENCE_S, "both reports wait")
            return {report.result(PATIENCE_S) for report in told}

    before = dict(scene.proxy.passed)
    assert commit_both() == {"ok"}
    size, ended = sized(scene.proxy, before), 2
    for where in sweep(scene.proxy, size):
        assert commit_both() <= {"ok", "already"}, where
        ended += 2
        assert scene.states() == {"queued": 0, "running": 2, "succeeded": ended, "failed": 0}, where
        assert scene.holds_what_the_queue_says(), where
    scene.check()


@pytest.mark.parametrize("direction", [REQUEST, REPLY])
def test_what_a_claim_without_an_answer_was_granted_is_asked_for_later(scene: Scene, direction: str) -> None:
    scene.queue.deadline_s = 0.2
    scene.claims.open(2)
    scene.submit(scene.direct)
    scene.queue.link.call("PING")
    lose(scene, direction)
    scene.proxy.reopen()
    scene.submit(scene.direct)
    scene.queue.deadline_s = 5
    scene.claims.claim()
    assert len(scene.delivered) == 2
    assert scene.holds_what_the_queue_says()
    scene.check()


def lose(scene: Scene, direction: str) -> None:
    """A claim that is cut and cannot be sent again before its deadline."""
    scene.proxy.cut_after(1 if direction == REPLY else 20, direction)
    scene.proxy._open.clear()
    with pytest.raises(NoAnswer):
        scene.claims.claim()


def test_what_comes_after_the_end_of_its_lease_is_not_begun(scene: Scene) -> None:
    scene.claims.open(1)
    scene.claims.lease_s = 0.05
    job = scene.submit(scene.direct)
    scene.proxy.delay_s = 0.1
    assert scene.claims.claim() == 0
    scene.proxy.delay_s = 0
    assert (scene.delivered, len(scene.attempts)) == ([], 0)
    assert scene.direct.record(job).state == "running", "until a heartbeat that does not list it"
    assert scene.claims.known == f"{1:012x}", "which takes it back"


def test_a_claim_whose_answer_nobody_asks_for_any_more_is_left_to_the_next_heartbeat(scene: Scene) -> None:
    scene.queue.deadline_s = 0.2
    scene.claims.open(1)
    scene.queue.link.call("PING")
    lose(scene, REPLY)
    assert scene.claims.known == f"{0:012x}"
    scene.claims.close()
    assert scene.claims.known == f"{1:012x}"
    scene.proxy.reopen()


def test_a_lease_of_a_repeated_claim_counts_from_the_first_time(scene: Scene) -> None:
    scene.queue.deadline_s = 0.2
    scene.claims.open(1)
    scene.submit(scene.direct)
    scene.queue.link.call("PING")
    lose(scene, REPLY)
    asked = scene.claims._unanswered
    assert asked is not None
    scene.proxy.reopen()
    scene.claims.claim()
    assert scene.delivered[0].lease_until_s == asked.sent_s + 60
