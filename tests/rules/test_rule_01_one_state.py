"""Rule 1: a job is in exactly one state; a transition happens in exactly one function call, and appends one event."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import NoAnswer
from gpulayer_broker.functions import Ending
from tests.moves import MOVES
from tests.rules.crowd import CPU, FINAL, Place, each, finish_all, lose_all, together
from tests.servers import QueueServer

pytestmark = pytest.mark.rule_01


def paths(place: Place) -> dict[str, list[str]]:
    """Each job's states, as the events tell them."""
    out: defaultdict[str, list[str]] = defaultdict(lambda: [""])
    for entry in place.look().streams["events"].entries.values():
        out[entry["job"]].append(entry["state"])
    return out


def send(place: Place, call: fn.Call[Any]) -> None:
    with place.hand() as hand:
        hand.run(call)


def expire(place: Place, job: str) -> None:
    with place.hand() as hand:
        hand.expire(job)
        hand.tick()


def test_whoever_ends_an_attempt_at_once_it_ends_once(place: Place) -> None:
    """Two commits, a release, a cancel and the reaper race for each attempt."""
    with place.hand() as hand:
        worker = hand.machine("w1", slots=1)
        for _ in range(40):
            job = hand.submit(CPU)
            (grant,) = hand.claim(worker)

            calls = (
                fn.commit(Ending(job, grant.token, "succeeded")),
                fn.commit(Ending(job, grant.token, "failed")),
                fn.release(job, grant.token, "returned"),
                fn.cancel(job),
            )
            together(*(partial(send, place, call) for call in calls), partial(expire, place, job))
            place.check()
            finish_all(hand, worker)
            worker.held.clear()
            hand.link.call(
                "DEL", hand.key("deaths:w1")
            )  # a worker that the reaper meets too often is put aside
    seen = place.check()
    for job, path in paths(place).items():
        assert path[-1] == seen.job(job)["state"] in FINAL
        assert sum(state in FINAL for state in path) == 1, path
        assert all(move in MOVES for move in pairwise(path)), path


def test_a_server_that_is_killed_under_load_leaves_every_job_in_one_state(
    durable: Place, server: QueueServer
) -> None:
    def load(name: str) -> None:
        with place.hand() as hand:
            worker = hand.machine(name, slots=1)
            try:
                for _ in range(10_000):
                    hand.submit(CPU)
                    for grant in hand.claim(worker, 1):
                        hand.commit(worker, grant, "succeeded", claim_next=False)
                raise AssertionError("the server was not killed")
            except NoAnswer:
                return

    place = durable
    together(
        *each(load, "w0", "w1", "w2"),
        lambda: _kill_after(place, server, 200),
    )
    server.start()
    place.check()
    with place.hand() as hand:
        lose_all(hand)
        finish_all(hand, hand.machine("w9"))
    seen = place.check()
    assert {j["state"] for j in seen.jobs.values()} == {"succeeded"}
    assert all(move in MOVES for path in paths(place).values() for move in pairwise(path))


def _kill_after(place: Place, server: QueueServer, jobs: int) -> None:
    with place.hand() as hand:
        while int(hand.link.call("GET", hand.key("seq")) or 0) < 2 * jobs:
            pass
    server.kill()
