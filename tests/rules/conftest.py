"""A place for each rule's test: a namespace on the shared server, or on one of its own that the test kills."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulayer_broker.connection import Endpoint
from tests.rules.crowd import CPU, Place
from tests.servers import QueueServer


@pytest.fixture
def place(valkey: Endpoint, root: str) -> Place:
    place = Place(valkey, root)
    with place.hand() as hand:
        hand.introduce(CPU, {})
        hand.machine("seed", {CPU: ()})
    return place


@pytest.fixture
def server(queue_server: Callable[..., QueueServer], request: pytest.FixtureRequest) -> QueueServer:
    """Append-only, so that it may be killed; synced by the system, unless a test names another `appendfsync`."""
    return queue_server("--appendfsync", getattr(request, "param", "no"), append_only=True)


@pytest.fixture
def durable(server: QueueServer) -> Place:
    place = Place(server.endpoint, "gpulayer:{t}:")
    with place.hand() as hand:
        hand.introduce(CPU, {})
        hand.machine("seed", {CPU: ()})
    return place
