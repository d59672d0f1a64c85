"""The messages of an app, looked at with the command line: what they need, and what only the app can do for them."""

from __future__ import annotations

import dramatiq
import pytest

from gpulayer.client import Client
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint
from gpulayer_broker.errors import UsageError
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS


@pytest.fixture
def client(valkey: Endpoint, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("GPULAYER_NAMESPACE", namespace)
    return Client(redis=valkey.url)


def test_a_message_that_waits_is_explained(broker: CapabilityBroker, client: Client) -> None:
    @dramatiq.actor(memory="1GiB")
    def big() -> None: ...

    found = client.explain(big.send().message_id)

    assert found.needs.startswith("accelerator cpu, 1.0 GB memory")
    assert found.summary == "no worker is known yet"


def test_what_a_message_needed_is_not_kept_and_only_its_app_runs_it_again(
    broker: CapabilityBroker, client: Client, start: Start
) -> None:
    @dramatiq.actor
    def small() -> None: ...

    start()
    message = small.send()
    broker.join("default", timeout=PATIENCE_MS)

    with pytest.raises(UsageError, match="a message of a Dramatiq app"):
        client.retry(message.message_id)
