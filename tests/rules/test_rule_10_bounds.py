"""Rule 10: everything that grows has a bound or a retention: streams, logs, finished jobs, consumers, tables."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from tests import snapshot
from tests.queueing import LEASE_MS, NO_RETENTION, signature
from tests.rules.crowd import CPU, Place, feed, finish_all, lose_all, processes, together
from tests.virtual import virtual_library

pytestmark = pytest.mark.rule_10
# What stays of a namespace in which nothing waits and nobody works.
PERMANENT = {"seq", "clock", "events", "classes_version", "signatures_version", "config"}


def test_after_kills_and_retention_nothing_of_jobs_and_workers_is_left(place: Place) -> None:
    with place.hand() as hand:
        hand.submit(CPU, client="c", idempotency_key="k", digest="d")
        with processes(place, "w1", "w2") as workers:
            feed(hand, workers, 5, 5, client="c")
        lose_all(hand)
        finish_all(hand, hand.machine("w3"))
        for worker_id in ("w1", "w2", "w3", "seed"):
            hand.run(fn.drain(worker_id, "offline"))
        place.check()
        for _ in range(100):
            hand.run(fn.tick(older_than_ms=-1, results_older_than_ms=NO_RETENTION))
    left = {name for keys in vars(place.check()).values() for name in keys}
    assert not [
        n
        for n in left
        if n.startswith(("job:", "jobs:", "queue:", "heads:", "waiting:", "idem:", "log:", "dead:"))
    ]
    assert not [n for n in left if n.startswith(("held:", "device:", "running:", "idle:", "watchers:"))]
    assert not left & {
        "owners",
        "sigjobs",
        "leases",
        "delayed",
        "rung",
        "rungsig",
        "room",
        "idleclasses",
    }


def test_nothing_but_the_permanent_keys_outlives_days_of_silence(place: Place) -> None:
    with place.hand() as hand, virtual_library(hand.link) as clock:
        hand.tick()
        machine = hand.machine("w1")
        for n in range(20):
            hand.introduce(signature(tag=f"s{n}"), {})
            hand.submit(CPU)
        finish_all(hand, machine)
        clock.set(3_000_000_000_000)
        for _ in range(8):
            clock.advance(LEASE_MS // 3)
            hand.run(fn.tick(older_than_ms=86_400_000, results_older_than_ms=86_400_000))

        names = {name for keys in vars(snapshot.read(hand.link, hand.root)).values() for name in keys}
        assert names <= PERMANENT


def test_a_worker_that_crashes_a_hundred_times_leaves_no_consumers_and_no_keys(place: Place) -> None:
    with place.hand() as hand:
        hand.link.call("HSET", hand.key("config"), "lost_workers", 1000)
        for _ in range(3):
            hand.submit(CPU)
        machine = hand.machine("w1")
        hand.claim(machine, 1)
        before = _keys(place)
        for n in range(100):
            machine.incarnation = f"i{n}x"
            hand.register(machine)
            hand.link.call("HDEL", hand.key("worker:w1"), "quarantined_until")
            hand.claim(machine, 1)

        stream = hand.key(f"queue:{CPU}:local:2")
        assert _keys(place) - before <= {"inbox:w1", "deaths:w1"}
        assert hand.link.call("XINFO", "GROUPS", stream)[0][3] <= 2
    place.check()


def test_racing_writers_keep_events_mail_and_logs_below_their_bounds(place: Place) -> None:
    with place.hand() as hand:
        hand.claim(hand.machine("w1", slots=1), 1)

    def flood(owner: str) -> None:
        with place.hand() as hand:
            for _ in range(4000):
                hand.run(fn.cancel(hand.submit(CPU, owner=owner)))
                hand.run(fn.drain("w1", "online"))

    together(lambda: flood("ann"), lambda: flood("bob"))
    with place.hand() as hand:
        job = hand.submit(CPU)
        (grant,) = hand.claim(hand.machine("w2"), 1)
        for n in range(40):
            hand.run(fn.log(job, grant.token, 0, "out", n * 65536, b"x" * 65536))
        assert hand.link.call("XLEN", hand.key("events")) < 10_300
        assert hand.link.call("XLEN", hand.key("inbox:w1")) < 300
        assert hand.link.call("XLEN", hand.key(f"log:{job}:1:0")) <= 17


def test_the_live_tail_of_an_attempt_shrinks_at_its_end_and_is_gone_an_hour_later(place: Place) -> None:
    """A hundred thousand finished jobs must not keep their logs in memory: the whole log is in the store by then."""
    with place.hand() as hand:
        for how in ("ended", "lost"):
            job = hand.submit(CPU)
            worker = hand.machine(how, slots=1)
            (grant,) = hand.claim(worker, 1)
            for n in range(12):
                hand.run(fn.log(job, grant.token, 0, "out", n * 65536, b"x" * 65536))
            if how == "ended":
                hand.commit(worker, grant)
            else:
                lose_all(hand)
            log = hand.key(f"log:{job}:1:0")

            assert hand.link.call("XLEN", log) == 5 + 1, "256 KiB, the piece that they begin in, and the end"
            assert 0 < hand.link.call("TTL", log) <= 3600
    place.check()


def _keys(place: Place) -> set[str]:
    return {name for keys in vars(place.look()).values() for name in keys}
