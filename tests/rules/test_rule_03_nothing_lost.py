"""Rule 3: a message leaves its stream only in the call that ends, retries or requeues the job: a kill loses nothing."""

from __future__ import annotations

import random

import pytest

from gpulayer_broker.connection import NoAnswer
from gpulayer_broker.job import new_job_id
from tests.rules.crowd import CPU, Place, feed, finish_all, lose_all, processes, together
from tests.servers import QueueServer

pytestmark = pytest.mark.rule_03


def test_workers_killed_anywhere_lose_no_job(place: Place) -> None:
    """SIGKILL at random moments, between claim and commit and within; the others pick up what is lost."""
    dice = random.Random(3)
    with place.hand() as hand:
        hand.link.call("HSET", hand.key("config"), "lost_workers", 1000)
        jobs: list[str] = []
        for round_number in range(4):
            names = [f"w{round_number}{n}" for n in range(2)]
            with processes(place, *names) as workers:
                jobs += feed(hand, workers, dice.randrange(1, 20), dice.randrange(1, 20))
            lose_all(hand)
            place.check()
        finish_all(hand, hand.machine("last"))
    seen = place.check()
    assert {seen.job(job)["state"] for job in jobs} == {"succeeded"}
    assert not [name for name in seen.streams if name.startswith("queue:")]


@pytest.mark.parametrize("server", ["no", "always"], indirect=True)
def test_every_acknowledged_submit_is_there_after_the_server_was_killed(
    durable: Place, server: QueueServer
) -> None:
    acknowledged: list[str] = []
    tried: list[str] = []

    def submit() -> None:
        with durable.hand() as hand:
            while True:
                job = new_job_id()
                tried.append(job)
                try:
                    acknowledged.append(hand.submit(CPU, id=job))
                except NoAnswer:
                    return

    def kill() -> None:
        while len(acknowledged) < 500:
            pass
        server.kill()

    together(submit, submit, submit, kill)
    server.start()

    seen = durable.check()
    assert set(acknowledged) <= set(seen.jobs) <= set(tried)
    with durable.hand() as hand:
        for job in tried:
            hand.submit(CPU, id=job)
        assert set(durable.check().jobs) == set(tried)


def test_an_entry_stays_until_the_commit_that_ends_its_job(place: Place) -> None:
    with place.hand() as hand:
        job = hand.submit(CPU)
        worker = hand.machine("w1")
        (grant,) = hand.claim(worker)
        held = place.check().streams[f"queue:{CPU}:local:2"]
        hand.commit(worker, grant)

        assert list(held.pending.values()) == ["held"]
        assert [fields["j"] for fields in held.entries.values()] == [job]
        assert hand.link.call("EXISTS", hand.key(f"queue:{CPU}:local:2")) == 0
