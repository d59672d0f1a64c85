"""Rule 4: a device is granted to one running job at a time (or to its declared shares), whoever claims."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from gpulayer_broker.functions import DeviceLot
from tests.checker import lots_of, running
from tests.queueing import Hand, signature
from tests.rules.crowd import Place, each, lose_all, lots, together

pytestmark = pytest.mark.rule_04
GPU = signature(gpus=1, vram=4000, tag="gpu")


@pytest.fixture
def devices(place: Place) -> Place:
    with place.hand() as hand:
        hand.introduce(GPU, {"k1": (0,)})
    return place


def test_workers_that_race_for_the_same_devices_never_hold_one_twice(devices: Place) -> None:
    """Four workers of one machine offer the same three devices, and each keeps its own books beside the queue's."""
    books: dict[tuple[str, int], str] = {}
    lock = threading.Lock()
    with devices.hand() as hand:
        for _ in range(150):
            hand.submit(GPU)

    def work(name: str) -> None:
        with devices.hand() as hand:
            machine = hand.machine(name, node="n", slots=4, lots=lots(3))
            idle = 0
            while idle < 20:
                grants = hand.claim(machine, 2)
                idle = 0 if grants else idle + 1
                for grant in grants:
                    with lock:
                        assert not set(grant.lots) & set(books), (grant, books)
                        books.update(dict.fromkeys(grant.lots, grant.id))
                hand.renew(machine)  # held for the time of a call, in which the others claim
                for grant in grants:
                    with lock:
                        for lot in grant.lots:
                            del books[lot]
                    hand.commit(machine, grant)

    together(*each(work, "w0", "w1", "w2", "w3"))
    seen = devices.check()
    assert len(seen.zsets["jobs:succeeded"]) == 150


def test_a_lost_worker_keeps_its_devices_until_its_lease_has_run_out(devices: Place) -> None:
    with devices.hand() as hand:
        first, second = hand.submit(GPU), hand.submit(GPU)
        gone, other = (hand.machine(name, node="n", lots=lots(1)) for name in ("w1", "w2"))
        hand.claim(gone)

        assert hand.claim(other) == ()
        lose_all(hand)
        assert [g.id for g in hand.claim(other)] == [first]
        assert hand.state(second) == "queued"
    devices.check()


def test_shares_of_a_device_are_granted_once_each_and_within_its_memory(devices: Place) -> None:
    shares = tuple(DeviceLot("GPU-0", n, 0, 9000) for n in range(4))
    with devices.hand() as hand:
        for _ in range(40):
            hand.submit(GPU)

    def claim(name: str) -> None:
        with devices.hand() as hand:
            hand.claim(hand.machine(name, node="n", slots=8, lots=shares))

    together(*each(claim, "w0", "w1", "w2", "w3"))
    alive = running(devices.check())
    assert len(alive) == 2, "two jobs of 4,000 MiB fit 9,000 MiB, four shares or not"
    assert len({lot for j in alive.values() for lot in lots_of(j)}) == 2


def test_a_claim_whose_reply_was_lost_is_answered_again_and_grants_nothing_more(devices: Place) -> None:
    with devices.hand() as hand:
        for _ in range(4):
            hand.submit(GPU)
        machine = hand.machine("w1", lots=lots(4), slots=8)
        offer = machine.offer(2)
        answers: list[tuple[str, ...]] = []

        def claim() -> None:
            with devices.hand() as mine:
                same = replace(machine, held={})
                answers.append(tuple(g.token for g in mine.claim(same, offer.max, offer.nonce)))

        together(claim, claim, claim, claim)
        assert len(set(answers)) == 1
        assert len(answers[0]) == 2
    assert len(running(devices.check())) == 2


def test_cores_and_memory_of_a_machine_are_granted_once_whoever_claims(place: Place) -> None:
    big = signature(cpus=2, memory=3000, tag="big")
    with place.hand() as hand:
        hand.introduce(big, {"k1": ()})
        for _ in range(20):
            hand.submit(big)

    def claim(name: str) -> None:
        with place.hand() as mine:
            _claim_all(mine, name)

    together(*each(claim, "w0", "w1", "w2", "w3"))
    assert len(running(place.check())) == 2, "7,000 MiB hold two jobs of 3,000"


def _claim_all(hand: Hand, name: str) -> None:
    hand.claim(hand.machine(name, node="n", slots=8, node_cpus=16, memory_mib=7000))
