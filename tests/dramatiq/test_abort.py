"""dramatiq-abort, as its documentation uses it, beside this broker's own abort."""

from __future__ import annotations

import threading
import time

import dramatiq
import pytest

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint, plain_client
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS, PATIENCE_S

dramatiq_abort = pytest.importorskip("dramatiq_abort")
backends = pytest.importorskip("dramatiq_abort.backends")


def test_dramatiq_abort_ends_a_message_that_runs_and_skips_one_that_waits(
    broker: CapabilityBroker, start: Start, valkey: Endpoint
) -> None:
    began, ended = threading.Event(), list[str]()
    with plain_client(valkey) as client:
        abortable = dramatiq_abort.Abortable(backend=backends.RedisBackend(client=client))
        dramatiq.get_broker().add_middleware(abortable)

        @dramatiq.actor(max_retries=3, min_backoff=1)
        def my_long_running_task() -> None:
            began.set()
            try:
                while True:
                    time.sleep(0.01)
            except dramatiq_abort.Abort:
                ended.append("aborted")
                raise

        @dramatiq.actor
        def waiting() -> None:
            ended.append("ran")

        message, other = my_long_running_task.send(), waiting.send()
        dramatiq_abort.abort(other.message_id)
        start(threads=1)
        assert began.wait(PATIENCE_S)
        dramatiq_abort.abort(message.message_id)
        broker.join("default", timeout=PATIENCE_MS)

    assert ended == ["aborted"]
