"""The heartbeat's thread: whatever it is doing, a stop is heard."""

from __future__ import annotations

from gpulayer_broker.attempts import Attempts
from gpulayer_broker.connection import Link
from gpulayer_broker.heartbeat import Heartbeat
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_S


def test_a_stop_in_the_middle_of_a_beat_ends_the_thread_at_once(link: Link) -> None:
    beats: list[bool] = []

    def stopped_meanwhile() -> bytes:
        beats.append(True)
        heartbeat.stop()
        return b""

    heartbeat = Heartbeat(
        Queue(link),
        Attempts(),
        Settings(heartbeat_s=10 * PATIENCE_S, lease_s=40 * PATIENCE_S),
        worker="w1",
        incarnation="i1",
        register=lambda: None,
        on_lease=lambda _: None,
        on_superseded=lambda: None,
        known=lambda: "",
        info=stopped_meanwhile,
    )

    heartbeat.start()
    heartbeat.join(PATIENCE_S)

    assert not heartbeat.is_alive()
    assert beats == [True]
