"""Rule 2: a result, error or retry is accepted only from the current attempt. A zombie's report is refused."""

from __future__ import annotations

import logging
import signal
from functools import partial

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Grant
from gpulayer_broker.attempts import Attempt, Attempts
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Ending
from gpulayer_broker.queue import Queue
from tests.queueing import claims_of
from tests.rules.crowd import CPU, Place, lose_all, processes, together

pytestmark = pytest.mark.rule_02


@pytest.mark.parametrize("settled", [True, False])
def test_a_stopped_worker_that_wakes_after_its_lease_moved_on_is_stale_on_every_verb(
    place: Place, settled: bool
) -> None:
    """SIGSTOP while it holds a job; another worker takes the job (and ends it); SIGCONT."""
    with place.hand() as hand, processes(place, "zombie", pause_at="holds") as (zombie,):
        zombie.said("ready")
        job = hand.submit(CPU)
        zombie.said("holds")
        zombie.signal(signal.SIGSTOP)
        lose_all(hand)
        other = hand.machine("w2")
        (grant,) = hand.claim(other, 1)
        if settled:
            hand.commit(other, grant, fields={"result": b"mine"})
        before = place.look().job(job)

        zombie.signal(signal.SIGCONT)
        zombie.go_on()
        zombie.said("ended")

        assert zombie.lines[-1].split() == ["ended", "stale", "stale", "stale", "stale", "stale"]
        assert place.check().job(job) == before
        if not settled:
            assert hand.commit(other, grant, fields={"result": b"mine"}).verdict == "ok"
        assert hand.get(job, "result") == "mine"


def report(place: Place, grant: Grant, result: str, answers: dict[str, str]) -> None:
    ending = Ending(grant.id, grant.token, "succeeded", fields={"result": result})
    with place.hand() as hand:
        answers[result] = hand.run(fn.commit(ending)).verdict


def test_of_two_attempts_that_report_at_once_only_the_current_one_counts(place: Place) -> None:
    with place.hand() as hand:
        two = hand.machine("w2")
        for n in range(40):
            job = hand.submit(CPU)
            (old,) = hand.claim(hand.machine(f"lost{n}"), 1)
            lose_all(hand)
            (new,) = hand.claim(two, 1)
            answers: dict[str, str] = {}
            together(partial(report, place, old, "old", answers), partial(report, place, new, "new", answers))

            assert (answers["new"], hand.get(job, "result")) == ("ok", "new")
            assert answers["old"] == "stale"
    place.check()


def test_a_worker_whose_report_is_refused_says_so_in_its_log(
    place: Place, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    delivered: list[Attempt] = []
    with place.hand() as hand, Link(place.endpoint) as link:
        hand.machine("w1", slots=1)
        job = hand.submit(CPU)
        claims = claims_of(Queue(link, namespace), Attempts(), delivered.append)
        claims.open(1)
        claims.claim()
        lose_all(hand)
        (grant,) = hand.claim(hand.machine("w2"), 1)

        with caplog.at_level(logging.WARNING, "gpulayer"):
            late = Ending(job, delivered[0].token, "succeeded")
            assert claims.commit(delivered, late, claim_next=False).verdict == "stale"
        assert f"job {job}: report of attempt" in caplog.text
        assert "refused" in caplog.text
        assert hand.commit(hand.machine("w2"), grant).verdict == "ok"
    place.check()
