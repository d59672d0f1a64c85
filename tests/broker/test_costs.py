"""Commands, keys and words inside the server per submit, claim and commit: the same however much is queued or finished.

With more signatures a claim may look at more heads, within a stated bound.
"""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Ending, Submission
from gpulayer_broker.job import new_job_id
from tests.queueing import Hand, Machine, signature
from tests.rules.costs import Costs, cancel_all, cost_of, costs_of_one_job, fill

CPU = signature()
# A claim looks at 64 heads at most, then at its class's own signatures 1,000 at a time.
CLAIM_BOUND = 200


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    hand = Hand(link, root)
    hand.introduce(CPU, {})
    return hand


def measured(hand: Hand, sig: str = CPU) -> Costs:
    return costs_of_one_job(hand, Machine("meter"), sig)


@pytest.mark.rule_09
@pytest.mark.timeout(1200)
def test_a_job_costs_the_same_at_ten_and_at_a_hundred_thousand_others_that_wait_or_have_ended(
    hand: Hand,
) -> None:
    hand.run(fn.drain(hand.machine("first", {CPU: ()}).id, "offline"))
    fill(hand, CPU, queued=10, finished=10)
    few = measured(hand)

    fill(hand, CPU, queued=100_000, finished=10_000)
    assert measured(hand) == few

    cancel_all(hand, but=10)
    assert hand.link.call("ZCARD", hand.key("jobs:final")) > 100_000
    assert measured(hand) == few


@pytest.mark.rule_09
def test_no_call_costs_more_than_its_bound_with_a_thousand_signatures(hand: Hand) -> None:
    """All waiting, none of which this worker can run, but for its own one, the youngest."""
    costs: dict[int, Costs] = {}
    for total in (10, 1000):
        for n in range(total):
            hand.introduce(signature(tag=f"t{n}"), {})
            hand.submit(signature(tag=f"t{n}"))
        own = signature(tag=f"own{total}")
        hand.introduce(own, {})
        machine = Machine(f"meter{total}", class_id=f"k{total}")
        hand.register(machine, {own: ()})
        submit = cost_of(hand, fn.submit(Submission(new_job_id(), own, b"spec")))
        nonce = f"{total:032}"
        claim = cost_of(hand, fn.claim(machine.offer(1, nonce)))
        (grant,) = hand.claim(machine, 1, nonce)
        commit = cost_of(hand, fn.commit(Ending(grant.id, grant.token, "succeeded")))
        costs[total] = Costs(submit, claim, commit)

    few, many = costs[10], costs[1000]
    assert many.submit == few.submit
    assert many.commit == few.commit
    assert max(few.claim.commands.total(), many.claim.commands.total()) <= CLAIM_BOUND
    assert many.claim.keys == few.claim.keys


@pytest.mark.rule_09
def test_a_plain_job_costs_so_many_commands_in_the_server_and_no_more(hand: Hand) -> None:
    """A line with others in it, a worker that has just come: what a call gets more expensive by shows here."""
    hand.run(fn.drain(hand.machine("first", {CPU: ()}).id, "offline"))
    fill(hand, CPU, queued=10, finished=10)

    costs = measured(hand)

    for cost, most in ((costs.submit, 15), (costs.claim, 26), (costs.commit, 30)):
        assert cost.commands.total() <= most, cost
