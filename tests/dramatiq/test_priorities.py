"""An actor's priority, lower first, is a band of the queue."""

from __future__ import annotations

import dramatiq
import pytest

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.outbox import band_of
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS


def test_lower_priorities_go_first(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    def actor(priority: int) -> dramatiq.Actor[[], None]:
        @dramatiq.actor(priority=priority, actor_name=f"at_{priority}")
        def at() -> None:
            seen.append(priority)

        return at

    for priority in (100, 5, 0, -5, -100):
        actor(priority).send()
    start(threads=1)
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [-100, -5, 0, 5, 100]


def test_within_a_band_the_oldest_goes_first(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    @dramatiq.actor
    def keep(n: int) -> None:
        seen.append(n)

    for n in range(20):
        keep.send(n)
    start(threads=1)
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == list(range(20))


def test_a_message_may_have_a_priority_of_its_own(broker: CapabilityBroker) -> None:
    @dramatiq.actor(priority=20)
    def low() -> None: ...

    assert broker.queue.record(low.send().message_id).priority == 4
    assert broker.queue.record(low.send_with_options(priority=-1).message_id).priority == 1


@pytest.mark.parametrize(
    ("priority", "band"), [(-100, 0), (-10, 0), (-9, 1), (-1, 1), (0, 2), (1, 3), (9, 3), (10, 4), (100, 4)]
)
def test_priorities_map_to_the_five_bands(priority: int, band: int) -> None:
    assert band_of(priority) == band
