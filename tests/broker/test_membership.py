"""A worker's membership when the other side misbehaves: damaged records, lost functions, a next incarnation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import dramatiq
import orjson
import pytest

from gpulayer_broker import functions
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.outbox import Entry
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.settings import Settings
from tests.queueing import Hand, signature
from tests.servers import QueueServer
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until

SETTINGS = Settings(lease_s=4, heartbeat_s=0.4, lease_grace_s=1)
NEEDS = build_requirements(queue="default", default_cpus=0)


@pytest.fixture
def start() -> Iterator[Callable[[CapabilityBroker], None]]:
    workers: list[dramatiq.Worker] = []

    def start(broker: CapabilityBroker) -> None:
        workers.append(dramatiq.Worker(broker, worker_threads=2, worker_timeout=50))
        workers[-1].start()

    yield start
    for worker in workers:
        worker.stop(timeout=PATIENCE_MS)
        worker.broker.close()


@pytest.fixture
def broker(valkey: Endpoint, namespace: str) -> Iterator[CapabilityBroker]:
    with closing(CapabilityBroker(valkey, settings=SETTINGS.changed(namespace=namespace))) as broker:
        yield broker


def actor(broker: CapabilityBroker) -> tuple[dramatiq.Actor[[], None], threading.Semaphore]:
    ran = threading.Semaphore(0)

    @dramatiq.actor(broker=broker)
    def ring() -> None:
        ran.release()

    return ring, ran


def record(queue: Queue, spec: bytes, job_id: str = "") -> str:
    job_id = job_id or new_job_id()
    return queue.submit(Submission(job_id, NEEDS.signature, spec, queue="default"), NEEDS)


def damaged(**fields: object) -> bytes:
    message: dict[str, object] = {
        "queue_name": "default",
        "actor_name": "ring",
        "args": [],
        "kwargs": {},
        "options": {},
    }
    message |= {"message_id": "j_damaged", "message_timestamp": 1, **fields}
    return orjson.dumps(message)


@pytest.mark.parametrize(
    "fields",
    [
        {"queue_name": "nobodys"},
        {"kwargs": None},
        {"options": ["eta"]},
        {"actor_name": 7},
        {"message_id": "j_another"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_record_of_wrong_form_is_set_aside_and_the_next_one_runs(
    broker: CapabilityBroker, start: Callable[[CapabilityBroker], None], fields: dict[str, object]
) -> None:
    ring, ran = actor(broker)
    bad = record(broker.queue, damaged(**fields), "j_damaged")
    ring.send()
    start(broker)
    assert ran.acquire(timeout=PATIENCE_S)
    wait_until(lambda: broker.queue.record(bad).final, PATIENCE_S, "the damaged record is set aside")
    assert (broker.queue.record(bad).state, broker.queue.record(bad).end_reason) == ("failed", "undecodable")


def test_a_queue_full_of_damaged_records_is_worked_off(
    broker: CapabilityBroker, start: Callable[[CapabilityBroker], None]
) -> None:
    ring, ran = actor(broker)
    for _ in range(1200):
        record(broker.queue, b"\x00\xff not a message")
    ring.send()
    start(broker)
    assert ran.acquire(timeout=PATIENCE_S)
    broker.join("default", timeout=PATIENCE_MS)


def test_a_report_that_the_queue_refuses_ends_as_a_failure_that_says_so(
    broker: CapabilityBroker, start: Callable[[CapabilityBroker], None]
) -> None:
    @dramatiq.actor(broker=broker)
    def report() -> None:
        message = dramatiq.middleware.CurrentMessage.get_current_message()
        message.outcome.verdict, message.outcome.fields = "succeeded", {"token": b"forged"}  # type: ignore[union-attr]

    broker.add_middleware(dramatiq.middleware.CurrentMessage())
    start(broker)
    job = report.send().message_id
    wait_until(lambda: broker.queue.record(job).final, PATIENCE_S, "the job is final")
    assert broker.queue.record(job).end_reason == "result_error"
    assert b"commit does not write token" in broker.queue.record(job).error


def test_a_server_that_lost_its_functions_is_given_them_again(
    queue_server: Callable[..., QueueServer], start: Callable[[CapabilityBroker], None]
) -> None:
    server = queue_server()
    broker = CapabilityBroker(server.endpoint, settings=SETTINGS)
    ring, ran = actor(broker)
    start(broker)
    ring.send()
    assert ran.acquire(timeout=PATIENCE_S)
    server.kill()
    server.start()  # without an append-only file: no data, no functions, no worker's record
    with CapabilityBroker(server.endpoint, settings=SETTINGS).queue.link as link:
        Queue(link).submit(Entry(ring.message(), NEEDS).submission(), NEEDS)
        assert ran.acquire(timeout=PATIENCE_S)


def test_what_a_replaced_incarnation_says_of_its_end_is_not_said_of_the_next(link: Link, root: str) -> None:
    hand = Hand(link, root)
    sig = signature()
    hand.introduce(sig, {})
    hand.machine("w1", {sig: ()}, incarnation="old")
    hand.machine("w1", {sig: ()}, incarnation="new")
    assert hand.run(functions.drain("w1", "offline", "old")) == "superseded"
    assert link.call("HGET", f"{root}worker:w1", "state") == b"online"
    assert hand.run(functions.drain("w1", "draining", "new")) == "ok"
    assert hand.run(functions.drain("w1", "offline")) == "ok"


def test_a_worker_that_cannot_register_is_no_member(broker: CapabilityBroker, link: Link, root: str) -> None:
    link.call("SET", f"{root}workers", "not a sorted set")
    actor(broker)
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        assert broker.member is None
    finally:
        worker.stop(timeout=PATIENCE_MS)
        broker.close()
    half = [key for what in ("worker", "siblings") for key in link.call("KEYS", f"{root}{what}:*")]
    link.call("DEL", f"{root}workers", *half)


def test_an_interrupt_reaches_the_attempt_that_was_meant_and_no_later_one(
    broker: CapabilityBroker, start: Callable[[CapabilityBroker], None]
) -> None:
    begun, gate, told = threading.Event(), threading.Event(), list[str]()

    @dramatiq.actor(broker=broker)
    def hold() -> None:
        begun.set()
        gate.wait(PATIENCE_S)

    hold.send()
    start(broker)
    assert begun.wait(PATIENCE_S)
    member = broker.member
    assert member is not None
    (attempt,) = member.attempts.all()
    attempt.on_interrupt = lambda: told.append(attempt.id)
    inbox = broker.queue.keys.inbox(member.identity.worker)
    for token in ("1:of-another", attempt.token):
        broker.queue.link.call("XADD", inbox, "*", "kind", "interrupt", "job", attempt.id, "token", token)

    wait_until(lambda: told, PATIENCE_S, "it is told")
    gate.set()
    broker.join("default", timeout=PATIENCE_MS)
    assert told == [attempt.id]
