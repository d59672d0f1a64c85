"""Rule 5: a job holds all that it asks for or none of it.

What exists now is the part of one machine: a job of several devices gets all of them in one call or none. That it gets
its turn at all is in `test_rule_05_turns.py`; jobs over several machines come with gangs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checker import running
from tests.queueing import signature
from tests.rules.crowd import Place, each, lose_all, lots, together

pytestmark = pytest.mark.rule_05
PAIR = signature(gpus=2, tag="pair")
TRIPLE = signature(gpus=3, tag="triple")


@pytest.fixture
def devices(place: Place) -> Place:
    with place.hand() as hand:
        hand.introduce(PAIR, {"k1": (0,)})
        hand.introduce(TRIPLE, {"k1": (0,)})
    return place


@pytest.mark.parametrize("shares", [1, 2])
def test_racing_claims_never_hold_a_part_of_what_a_job_asks_for(devices: Place, shares: int) -> None:
    """Jobs of two and of three devices race for five: each grant is whole, and in the end the ledger is empty.
    Two shares of one device are not two devices."""
    offered = tuple(replace(lot, share=share) for lot in lots(5) for share in range(shares))
    with devices.hand() as hand:
        for n in range(60):
            hand.submit(PAIR if n % 2 else TRIPLE)

    def work(name: str) -> None:
        with devices.hand() as hand:
            machine = hand.machine(name, node="n", slots=4, lots=offered)
            idle = 0
            while idle < 20:
                grants = hand.claim(machine, 1)
                idle = 0 if grants else idle + 1
                for grant in grants:
                    assert len({uuid for uuid, _ in grant.lots}) == (2 if grant.signature == PAIR else 3)
                    hand.commit(machine, grant)

    together(*each(work, "w0", "w1", "w2", "w3"))
    seen = devices.check()
    assert len(seen.zsets["jobs:succeeded"]) == 60
    assert not [name for name in seen.hashes if name.startswith(("device:", "held:"))]


def test_a_lost_job_gives_back_all_its_devices_in_one_call(devices: Place) -> None:
    with devices.hand() as hand:
        job = hand.submit(TRIPLE)
        hand.claim(hand.machine("w1", node="n", lots=lots(3)))
        other = hand.machine("w2", node="n", lots=lots(3))
        assert hand.claim(other) == ()

        lose_all(hand)

        assert [g.id for g in hand.claim(other)] == [job]
    assert len(running(devices.check())) == 1


def test_a_job_that_fits_only_in_part_holds_nothing(devices: Place) -> None:
    with devices.hand() as hand:
        hand.submit(PAIR)
        hand.submit(TRIPLE)
        machine = hand.machine("w1", lots=lots(4), slots=8)

        assert [g.signature for g in hand.claim(machine)] == [PAIR]
    assert len(running(devices.check())) == 1
