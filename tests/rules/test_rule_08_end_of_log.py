"""Rule 8: the end-of-log marker is written in the call that makes the final state visible."""

from __future__ import annotations

from functools import partial

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import NoAnswer
from tests import snapshot
from tests.queueing import Hand
from tests.rules.crowd import CPU, FINAL, Place, lose_all, together
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.rule_08


def test_a_follower_that_sees_a_final_state_finds_the_end_of_the_log(place: Place) -> None:
    """Each reader watches every job until it is final, and reads its log in that moment; jobs end in every way."""
    with place.hand() as hand:
        jobs = [hand.submit(CPU) for _ in range(60)]

    def work() -> None:
        with place.hand() as hand:
            machine = hand.machine("w1", slots=1)
            for n in range(60):
                (grant,) = hand.claim(machine, 1)
                hand.run(fn.log(grant.id, grant.token, 0, "out", 0, b"line\n"))
                hand.commit(machine, grant, ("succeeded", "failed", "timed_out")[n % 3])

    def follow() -> None:
        with place.hand() as hand:
            for job in jobs:
                wait_until(partial(is_final, hand, job), PATIENCE_S, f"{job} is final", every=0)
                assert last_of_log(hand, job) == [b"end", b"1"], job

    together(work, follow, follow)
    place.check()


def is_final(hand: Hand, job: str) -> bool:
    return hand.state(job) in FINAL


def last_of_log(hand: Hand, job: str) -> list[bytes]:
    """The fields of the last entry of its first attempt's log."""
    (entry,) = hand.link.call("XREVRANGE", hand.key(f"log:{job}:1:0"), "+", "-", "COUNT", 1)
    return list(entry[1])


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

        assert last_of_log(hand, job) == [b"end", b"1"]
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
