"""What an actor needs is an option of it or of one message, kept by whatever follows from it."""

from __future__ import annotations

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage

from gpulayer_broker.broker import CapabilityBroker, Needs
from gpulayer_broker.errors import BadRequirement
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until


def test_an_actor_says_what_it_needs_and_a_message_may_say_otherwise(broker: CapabilityBroker) -> None:
    @dramatiq.actor(accelerator="cuda", gpus=1, frameworks={"torch": ">=2.4"})
    def train() -> None: ...

    one, four = train.send(), train.send_with_options(gpus=4)

    assert broker.queue.record(one.message_id).signature.startswith("g1.")
    assert broker.queue.record(four.message_id).signature.startswith("g4.")


def test_a_retry_keeps_what_its_message_alone_needs(broker: CapabilityBroker, start: Start) -> None:
    seen: list[tuple[str, str]] = []
    broker.add_middleware(CurrentMessage())

    @dramatiq.actor(cpus=1, memory="1MB", max_retries=1, min_backoff=1, max_backoff=2)
    def fails() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        signature = broker.queue.record(message.message_id).signature
        seen.append((message.options["memory"], signature))
        raise ValueError("once more")

    sent = fails.send_with_options(memory="100MB")
    start()
    broker.join("default", timeout=PATIENCE_MS)

    signature = broker.queue.record(sent.message_id).signature
    assert seen == [("100MB", signature)] * 2
    assert broker.queue.record(fails.send().message_id).signature != signature


def test_a_pipelines_next_message_goes_where_its_own_actor_needs(
    broker: CapabilityBroker, start: Start
) -> None:
    @dramatiq.actor
    def prepare() -> int:
        return 1

    @dramatiq.actor(accelerator="cuda", gpus=2)
    def train(n: int) -> None: ...

    target = train.message_with_options(args=())
    (prepare.message() | target).run()
    worker = start()

    wait_until(lambda: broker.queue.records([target.message_id])[0], PATIENCE_S, "the next message is there")
    worker.stop()

    record = broker.queue.record(target.message_id)
    assert (record.state, record.signature[:3]) == ("queued", "g2.")


def test_a_message_that_no_worker_can_serve_waits_and_holds_nobody_up(
    broker: CapabilityBroker, start: Start
) -> None:
    seen: list[int] = []

    @dramatiq.actor(frameworks={"no-such-framework": ">=1"})
    def cannot() -> None:
        seen.append(0)

    @dramatiq.actor
    def can() -> None:
        seen.append(1)

    message = cannot.send()
    can.send()
    start()

    wait_until(lambda: seen == [1], PATIENCE_S, "the other message has run")
    assert broker.queue.record(message.message_id).state == "queued"
    broker.flush("default")


def test_an_option_that_is_misspelt_or_makes_no_sense_is_refused(broker: CapabilityBroker) -> None:
    with pytest.raises(ValueError, match="acelerator"):

        @dramatiq.actor(acelerator="cuda")
        def misspelt() -> None: ...

    @dramatiq.actor
    def job() -> None: ...

    with pytest.raises(BadRequirement):
        job.send_with_options(gpus=-1)


def test_an_apps_own_tests_run_on_dramatiqs_stub_broker() -> None:

    class StubNeeds(dramatiq.Middleware):
        actor_options = Needs().actor_options

    stub, seen = StubBroker(), list[int]()
    stub.add_middleware(StubNeeds())
    stub.emit_after("process_boot")

    @dramatiq.actor(broker=stub, accelerator="cuda", gpus=1)
    def train(n: int) -> None:
        seen.append(n)

    train.send(1)
    worker = dramatiq.Worker(stub, worker_timeout=50, worker_threads=1)
    worker.start()
    stub.join("default", timeout=PATIENCE_MS)
    worker.stop()
    stub.close()

    assert seen == [1]
