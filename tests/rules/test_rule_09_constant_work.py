"""Rule 9: work per submit, claim and commit does not grow with the number of queued or finished jobs.

Counted in commands and keys inside the server, here after a crash; tests/broker/test_costs.py counts at larger numbers.
"""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from tests.queueing import Machine
from tests.rules.costs import Costs, costs_of_one_job, fill
from tests.rules.crowd import CPU, Place, lose_all
from tests.servers import QueueServer

pytestmark = pytest.mark.rule_09


def measured(place: Place) -> Costs:
    with place.hand() as hand:
        return costs_of_one_job(hand, Machine("meter"), CPU)


def test_a_job_costs_the_same_after_a_crash_that_left_thousands_behind(
    durable: Place, server: QueueServer
) -> None:
    with durable.hand() as hand:
        fill(hand, CPU, queued=10, finished=10)
    few = measured(durable)
    with durable.hand() as hand:
        fill(hand, CPU, queued=5000, finished=2000)
        crashed = hand.machine("crashed", slots=50)
        hand.claim(crashed)
    server.kill()
    server.start()
    with durable.hand() as hand:
        lose_all(hand)
        rescue = hand.machine("rescue", slots=50)
        returned = hand.claim(rescue)
        assert len(returned) == 50
        for grant in returned:
            hand.commit(rescue, grant)
        for worker in ("crashed", "rescue"):
            hand.run(fn.drain(worker, "offline"))

    assert measured(durable) == few
    durable.check()
