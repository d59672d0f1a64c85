"""Rule 7: within a priority the oldest job that the worker can run goes first; no signature starves another.

Fair share between submitters is the stated exception, and has its own tests here.
"""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.queueing import Hand, signature
from tests.rules.crowd import CPU, Place, each, lose_all, together
from tests.support import PATIENCE_S

pytestmark = pytest.mark.rule_07
SIGNATURES = [signature(tag=f"s{n}") for n in range(5)]


@pytest.fixture
def many(place: Place) -> Place:
    with place.hand() as hand:
        for sig in SIGNATURES:
            hand.introduce(sig, {"k1": ()})
    return place


def test_no_job_is_passed_over_while_others_race_to_submit(many: Place) -> None:
    """Whatever was acknowledged before a claim was sent and is older than what it got, had been granted before."""
    waiting: dict[str, int] = {}
    lock = threading.Lock()
    left = threading.Semaphore(0)

    def submit(part: int) -> None:
        with many.hand() as hand:
            for n in range(60):
                job = hand.submit(SIGNATURES[(n * part) % 5])
                age = int(hand.get(job, "entry").split("-")[0] or 0)
                with lock:
                    waiting[job] = age
                left.release()

    def claim() -> None:
        with many.hand() as hand:
            machine = hand.machine("w1", slots=1)
            for _ in range(240):
                assert left.acquire(timeout=PATIENCE_S)
                with lock:
                    before = dict(waiting)
                (grant,) = hand.claim(machine, 1)
                age = int(hand.get(grant.id, "entry").split("-")[0])
                older = {job for job, other in before.items() if other < age}
                assert not older, "acknowledged, older, and passed over"
                hand.commit(machine, grant)
                with lock:
                    waiting.pop(grant.id, None)
                    waiting_done.add(grant.id)
                    for job in waiting_done & waiting.keys():
                        del waiting[job]

    waiting_done: set[str] = set()
    together(*(partial(submit, n) for n in range(1, 5)), claim)
    many.check()


def test_what_was_lost_goes_on_at_its_old_age(many: Place) -> None:
    with many.hand() as hand:
        first = hand.submit(SIGNATURES[0])
        rest = [hand.submit(SIGNATURES[n % 5]) for n in range(10)]
        hand.claim(hand.machine("lost"), 1)
        lose_all(hand)

        assert order(hand) == [first, *rest]
    many.check()


def test_a_flood_of_one_signature_does_not_keep_another_waiting(many: Place) -> None:
    with many.hand() as hand:
        flood = [hand.submit(SIGNATURES[0]) for _ in range(20)]
        lone = hand.submit(SIGNATURES[1])
        more = [hand.submit(SIGNATURES[0]) for _ in range(20)]

        assert order(hand) == [*flood, lone, *more]


def test_a_submitter_with_a_thousand_jobs_does_not_keep_another_waiting(place: Place) -> None:
    """Two submitters race: with many slots each gets half of them."""
    with place.hand() as hand:
        for _ in range(50):
            hand.submit(CPU, owner="ann")
        for _ in range(10):
            hand.submit(CPU, owner="bob")
    owners: list[str] = []

    def claim(name: str) -> None:
        with place.hand() as hand:
            owners.extend(g.owner for g in hand.claim(hand.machine(name, slots=4)))

    together(*each(claim, "w0", "w1", "w2", "w3"))
    assert (owners.count("ann"), owners.count("bob")) == (8, 8)
    place.check()


def test_an_old_job_of_a_rare_signature_is_found_behind_hundreds_of_others(place: Place) -> None:
    """Behind 64 heads that this worker cannot run, its own oldest goes first all the same."""
    mine = [signature(tag=f"mine{n}") for n in range(3)]
    with place.hand() as hand:
        for n in range(150):
            hand.introduce(signature(tag=f"other{n}"), {})
            hand.submit(signature(tag=f"other{n}"))
        for sig in mine:
            hand.introduce(sig, {"k1": ()})
        jobs = [hand.submit(sig) for sig in mine]

        assert order(hand) == jobs


def order(hand: Hand) -> list[str]:
    """The jobs as one worker with one slot takes them."""
    machine, out = hand.machine("order", slots=1), []
    while grants := hand.claim(machine, 1):
        out.append(grants[0].id)
        hand.commit(machine, grants[0])
    return out
