"""`join` sees all that is open; `flush` drops all that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import dramatiq
import pytest
from dramatiq.errors import QueueJoinTimeout, QueueNotFound

from gpulayer_broker import queue as queue_module
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import NotAllowed
from tests.dramatiq.conftest import Start
from tests.servers import QueueServer
from tests.support import PATIENCE_MS


def test_join_waits_for_what_waits_runs_is_delayed_or_is_to_be_retried(
    broker: CapabilityBroker, start: Start
) -> None:
    done: list[str] = []
    tries: list[int] = []

    @dramatiq.actor
    def work(name: str) -> None:
        threading.Event().wait(0.1)
        done.append(name)

    @dramatiq.actor(max_retries=1, min_backoff=200, max_backoff=300)
    def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("once")
        done.append("flaky")

    for name in "abc":
        work.send(name)
    work.send_with_options(args=("delayed",), delay=400)
    flaky.send()
    start(threads=1)
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(done) == ["a", "b", "c", "delayed", "flaky"]


def test_join_waits_for_what_a_message_leads_to(broker: CapabilityBroker, start: Start) -> None:
    """The successor is there in the same call that ends its predecessor: join sees no gap between them."""
    seen: list[int] = []

    @dramatiq.actor
    def down(n: int) -> int:
        seen.append(n)
        return n - 1

    start()
    for _ in range(5):
        dramatiq.pipeline([down.message(3), *(down.message_with_options(args=()) for _ in range(3))]).run()
        broker.join("default", interval=1, timeout=PATIENCE_MS)
        assert seen == [3, 2, 1, 0]
        seen.clear()


def test_join_gives_up_after_its_timeout(broker: CapabilityBroker) -> None:
    @dramatiq.actor
    def never() -> None: ...

    never.send()
    with pytest.raises(QueueJoinTimeout):
        broker.join("default", timeout=200)


def test_join_of_one_queue_does_not_wait_for_another(broker: CapabilityBroker) -> None:
    @dramatiq.actor(queue_name="other")
    def elsewhere() -> None: ...

    elsewhere.send()
    broker.join("default", timeout=PATIENCE_MS)


def test_flush_drops_delayed_messages_too(broker: CapabilityBroker) -> None:
    @dramatiq.actor
    def job() -> None: ...

    job.send()
    job.send_with_options(delay=60_000)
    broker.flush("default")

    broker.join("default", timeout=PATIENCE_MS)
    assert broker.dead_letters("default") == []


def test_flush_all_drops_every_queue(broker: CapabilityBroker) -> None:
    @dramatiq.actor
    def job() -> None: ...

    @dramatiq.actor(queue_name="other")
    def elsewhere() -> None: ...

    job.send()
    elsewhere.send()
    broker.flush_all()

    assert broker.queue.open_jobs("default") == broker.queue.open_jobs("other") == 0


def test_flush_reads_the_queue_a_page_at_a_time(
    broker: CapabilityBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "_PAGE_OF_IDS", 3)

    @dramatiq.actor
    def job() -> None: ...

    @dramatiq.actor(queue_name="other")
    def elsewhere() -> None: ...

    for _ in range(5):
        job.send()
        elsewhere.send()
    pages = list(broker.queue.waiting("default"))
    broker.flush("default")

    assert max(map(len, pages)) <= 3
    assert sum(map(len, pages)) == 5
    assert (broker.queue.open_jobs("default"), broker.queue.open_jobs("other")) == (0, 5)


@pytest.mark.parametrize("forbidden", ["-hget", "-fcall"])
def test_a_flush_that_is_refused_says_so(queue_server: Callable[..., QueueServer], forbidden: str) -> None:
    """A queue that kept its messages must not look empty: no refused read or cancel is passed over."""
    server = queue_server()
    with Link(server.endpoint) as link:
        allowed = ("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all")
        link.call(*allowed)
        broker = CapabilityBroker(f"unix://app:secret@{server.endpoint.path}")
        broker.declare_queue("default")
        broker.enqueue(dramatiq.Message("default", "job", (), {}, {}))
        link.call(*allowed, forbidden)

        with pytest.raises(NotAllowed, match="does not allow this"):
            broker.flush("default")

        link.call(*allowed)
        assert broker.queue.open_jobs("default") == 1
        broker.close()


def test_a_message_for_a_queue_that_nobody_declared_is_refused(broker: CapabilityBroker) -> None:
    with pytest.raises(QueueNotFound):
        broker.enqueue(dramatiq.Message("nowhere", "some_actor", (), {}, {}))
