"""Rule 8: the end-of-log marker is written in the call that makes the final state visible."""

from __future__ import annotations

import threading

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import NoAnswer
from tests import snapshot
from tests.rules.crowd import CPU, FINAL, Place, lose_all, together
from tests.servers import QueueServer

pytestmark = pytest.mark.rule_08


def test_a_follower_that_sees_a_final_state_finds_the_end_of_the_log(place: Place) -> None:
    """Readers poll state and log while worker threads write and end jobs in every way."""
    with place.hand() as hand:
        jobs = [hand.submit(CPU) for _ in range(60)]
    over = threading.Event()

    def work() -> None:
        with place.hand() as hand:
            machine = hand.machine("w1", slots=1)
            for n in range(60):
                (grant,) = hand.claim(machine, 1)
                hand.run(fn.log(grant.id, grant.token, 0, "out", 0, b"line\n"))
                hand.commit(machine, grant, ("succeeded", "failed", "timed_out")[n % 3])
        over.set()

    def follow() -> None:
        with place.hand() as hand:
            while not over.is_set():
                for job in jobs:
                    state, log = (
                        hand.state(job),
                        hand.link.call("XREVRANGE", hand.key(f"log:{job}:1:0"), "+", "-", "COUNT", 1),
                    )
                    assert state not in FINAL or b"end" in log[0][1], (job, state, log)

    together(work, follow, follow)
    place.check()


@pytest.mark.parametrize("how", ["lost", "returned", "retry", "cancel"])
def test_every_way_out_of_an_attempt_ends_its_log(place: Place, how: str) -> None:
    with place.hand() as hand:
        job = hand.submit(CPU)
        machine = hand.machine("w1")
        (grant,) = hand.claim(machine)
        hand.run(fn.log(job, grant.token, 0, "out", 0, b"x"))
        if how == "lost":
            lose_all(hand)
        elif how == "retry":
            hand.commit(machine, grant, "retry")
        elif how == "cancel":
            hand.run(fn.cancel(job))
            hand.run(fn.release(job, grant.token, "returned"))
        else:
            hand.run(fn.release(job, grant.token, how))

        last = hand.link.call("XREVRANGE", hand.key(f"log:{job}:1:0"), "+", "-", "COUNT", 1)
    assert last[0][1] == [b"end", b"1"]
    place.check()


def test_a_server_that_is_killed_leaves_no_final_job_without_the_end_of_its_log(
    durable: Place, server: QueueServer
) -> None:
    ended = 0

    def work(name: str) -> None:
        nonlocal ended
        with durable.hand() as hand:
            machine = hand.machine(name, slots=1)
            try:
                while True:
                    hand.submit(CPU)
                    for grant in hand.claim(machine, 1):
                        hand.run(fn.log(grant.id, grant.token, 0, "out", 0, b"x"))
                        hand.commit(machine, grant)
                        ended += 1
            except NoAnswer:
                return

    def kill() -> None:
        while ended < 150:
            pass
        server.kill()

    together(lambda: work("w1"), lambda: work("w2"), kill)
    server.start()
    seen = durable.check()
    final = {job for job, j in seen.jobs.items() if j["state"] in FINAL}
    assert len(final) >= 150
    for job, stream in snapshot.under(seen.streams, "log:"):
        marked = any("end" in fields for fields in stream.entries.values())
        assert marked == (job.split(":")[0] in final)
