"""Rides: quick, silent calls of one lane are granted several at once to one slot, and each of them ends by itself."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Committed, Grant
from gpulayer_broker.connection import ReplyError
from gpulayer_broker.functions import CallEnding, CallsEnding, DeviceLot, Ending
from tests import snapshot
from tests.checker import violations
from tests.queueing import Hand, Machine, signature

CPU = signature()
# Of a line of 80 its eighth, for that is more than 2 ms of them.
QUICK_US, SLOW_US = 1000, 50_000


@pytest.fixture
def worker(hand: Hand) -> Machine:
    return hand.machine("w1", {CPU: ()}, slots=1)


def end(
    hand: Hand, grants: tuple[Grant, ...], us: int | None = None, verdict: str = "succeeded"
) -> Committed:
    calls = tuple(CallEnding(Ending(g.id, g.token, verdict), us) for g in grants)
    return hand.run(fn.commit(CallsEnding(calls)))


def teach(hand: Hand, worker: Machine, us: int = QUICK_US, lane: str = "lane") -> None:
    """One call of the lane has told how long it took."""
    hand.submit(CPU, lane=lane)
    assert end(hand, hand.claim(worker, 1), us).verdicts == ("ok",)


def submitted(hand: Hand, count: int, lane: str = "lane") -> list[str]:
    return [hand.submit(CPU, lane=lane) for _ in range(count)]


def sound(hand: Hand) -> bool:
    return violations(snapshot.read(hand.link, hand.root)) == []


def repair(hand: Hand, key: str, ended: set[str]) -> None:
    """What the key would hold, had it been the queue's own."""
    name = hand.key(key)
    for job in ended:
        if key in ("jobs:succeeded", "jobs:final"):
            score = hand.link.call(
                "HGET", hand.key(f"job:{job}"), "seq" if key == "jobs:succeeded" else "ended_ms"
            )
            hand.link.call("ZADD", name, score, job)
        else:
            hand.link.call("ZREM" if key == "leases" else "SREM", name, job)


def ids(grants: tuple[Grant, ...]) -> list[str]:
    return [grant.id for grant in grants]


def test_calls_of_a_quick_lane_share_a_slot_in_the_order_of_their_age(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    jobs = submitted(hand, 80)

    grants = hand.claim(worker, 1)

    assert ids(grants) == jobs[:10]  # an eighth of the line
    assert {grant.ride for grant in grants} == {f"{jobs[0]}/{grants[0].token}"}
    assert len({grant.token for grant in grants}) == 10
    assert hand.link.call("HLEN", hand.key("held:w1")) == 1
    assert sound(hand)


def test_tiny_calls_are_not_shared_out(hand: Hand, worker: Machine) -> None:
    teach(hand, worker, us=200)
    jobs = submitted(hand, 12)

    assert ids(hand.claim(worker, 1)) == jobs[:10]  # 2 ms of them
    assert sound(hand)


def test_the_first_calls_of_a_lane_are_granted_one_by_one(hand: Hand, worker: Machine) -> None:
    jobs = submitted(hand, 40)

    (grant,) = hand.claim(worker, 1)

    assert (grant.id, grant.ride) == (jobs[0], "")


def test_a_quick_call_with_nobody_behind_it_is_a_ride_of_one(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    (job,) = submitted(hand, 1)

    (grant,) = hand.claim(worker, 1)

    assert grant.ride == f"{job}/{grant.token}"
    assert sound(hand)
    end(hand, (grant,))
    assert sound(hand)


@pytest.mark.parametrize("us", [SLOW_US, -1])
def test_a_slow_or_a_loud_call_rides_with_none(hand: Hand, worker: Machine, us: int) -> None:
    teach(hand, worker, us)
    submitted(hand, 1)

    (grant,) = hand.claim(worker, 1)

    assert grant.ride == ""


@pytest.mark.parametrize(("us", "most"), [(10, 32), (QUICK_US, 20), (5_000, 4), (SLOW_US, 1), (-1, 1)])
def test_a_ride_is_worth_about_twenty_milliseconds(hand: Hand, worker: Machine, us: int, most: int) -> None:
    teach(hand, worker, us)
    submitted(hand, 400)

    assert len(hand.claim(worker, 1)) == most
    assert sound(hand)


def test_a_lane_that_wrote_something_stays_with_single_calls(hand: Hand, worker: Machine) -> None:
    teach(hand, worker, -1)
    teach(hand, worker, QUICK_US)
    submitted(hand, 80)

    assert len(hand.claim(worker, 1)) == 1


def test_calls_of_another_lane_or_of_none_do_not_ride_along(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    ours = submitted(hand, 2)
    submitted(hand, 1, lane="other")
    submitted(hand, 77)

    assert ids(hand.claim(worker, 1)) == ours


def test_a_call_under_which_a_worker_was_lost_goes_alone(hand: Hand, worker: Machine) -> None:
    jobs = submitted(hand, 41)
    grants = hand.claim(worker, 1)
    hand.run(fn.release(grants[0].id, grants[0].token, "lost"))
    teach_by = hand.claim(worker, 1)  # the lost one, again
    assert ids(teach_by) == [jobs[0]]
    end(hand, teach_by, QUICK_US)
    (second, *others) = hand.claim(worker, 1)
    hand.run(fn.release(second.id, second.token, "lost"))
    end(hand, tuple(others))

    assert ids(hand.claim(worker, 1)) == [second.id]


def test_the_slot_is_held_until_the_last_call_of_a_ride_has_left(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)

    for n, grant in enumerate(grants):
        assert hand.claim(worker, 1) == (), f"{n} calls have left"
        assert sound(hand)
        end(hand, (grant,))

    assert hand.link.call("HLEN", hand.key("held:w1")) == 0
    assert hand.link.call("HLEN", hand.key("rides")) == 0
    assert sound(hand)
    assert hand.claim(worker, 1)


def test_calls_end_together_each_with_its_own_result_and_the_next_ride_is_claimed(
    hand: Hand, worker: Machine
) -> None:
    teach(hand, worker)
    jobs = submitted(hand, 80)
    grants = hand.claim(worker, 1)
    calls = tuple(
        CallEnding(
            Ending(g.id, g.token, "succeeded", fields={"result": str(n), "result_kind": "json"}), QUICK_US
        )
        for n, g in enumerate(grants)
    )

    committed = hand.run(fn.commit(CallsEnding(calls), worker.offer(1)))

    assert committed.verdicts == ("ok",) * 10
    assert [hand.get(job, "result") for job in jobs[:10]] == [str(n) for n in range(10)]
    assert ids(committed.claimed.grants) == jobs[10:18]
    assert sound(hand)


def test_a_ride_goes_on_when_one_of_its_calls_is_taken_from_the_worker(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    first, second, *others = hand.claim(worker, 1)
    hand.expire(first.id)
    hand.tick()

    assert hand.state(first.id) == "queued"
    assert end(hand, (first, second), QUICK_US).verdicts == ("stale", "ok")
    assert hand.link.call("HLEN", hand.key("held:w1")) == 1
    assert sound(hand)
    end(hand, tuple(others))
    assert hand.link.call("HLEN", hand.key("held:w1")) == 0
    assert sound(hand)


def test_a_call_is_ended_once_and_only_by_its_holder(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)
    forged = tuple(CallEnding(Ending(g.id, "1:other", "succeeded")) for g in grants)

    assert set(hand.run(fn.commit(CallsEnding(forged))).verdicts) == {"stale"}
    assert set(end(hand, grants).verdicts) == {"ok"}
    assert set(end(hand, grants).verdicts) == {"already"}
    assert sound(hand)


def test_who_watches_logs_or_waits_behind_a_call_is_told_and_released_with_it(
    hand: Hand, worker: Machine
) -> None:
    teach(hand, worker)
    jobs = submitted(hand, 80)
    behind = hand.submit(CPU, after=(jobs[3],))
    hand.run(fn.watch("other", [jobs[1]]))
    grants = hand.claim(worker, 1)
    assert hand.run(fn.log(grants[2].id, grants[2].token, 0, "out", 0, b"hello")) == "ok"

    assert set(end(hand, grants).verdicts) == {"ok"}

    (told,) = hand.link.call("XRANGE", hand.key("done:other"), "-", "+")
    assert told[1][:2] == [b"job", jobs[1].encode()]
    last = hand.link.call("XREVRANGE", hand.key(f"log:{jobs[2]}:1:0"), "+", "-", "COUNT", 1)
    assert b"end" in last[0][1]
    assert hand.link.call("HGET", hand.key(f"job:{behind}"), "phase") == b"ready"
    assert sound(hand)


def test_a_report_that_breaks_off_leaves_whole_what_it_has_ended(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)
    hand.link.call("DEL", hand.key("lane:lane"))
    hand.link.call("LPUSH", hand.key("lane:lane"), "no number")

    with pytest.raises(ReplyError, match="does not hold what the queue wrote"):
        end(hand, grants, QUICK_US)

    hand.link.call("DEL", hand.key("lane:lane"))
    assert {hand.state(grant.id) for grant in grants} == {"succeeded"}
    assert sound(hand)


@pytest.mark.parametrize("key", ["jobs:succeeded", "jobs:final", "leases", "running:w1"])
def test_a_key_that_somebody_else_wrote_keeps_a_report_from_no_other(
    hand: Hand, worker: Machine, key: str
) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)
    name = hand.key(key)
    kept = hand.link.call("DUMP", name)
    hand.link.call("SET", name, "somebody else's")

    with pytest.raises(ReplyError, match="does not hold what the queue wrote"):
        end(hand, grants, QUICK_US)

    hand.link.call("DEL", name)
    hand.link.call("RESTORE", name, 0, kept)
    seen = snapshot.read(hand.link, hand.root)
    ended = {grant.id for grant in grants}
    for stream in seen.streams.values():
        assert ended.isdisjoint(fields.get("j") for fields in stream.entries.values())
    others = {"jobs:running", "jobs:succeeded", "jobs:final", "leases"} - {key}
    for other in others:
        there = {i for i in ended if hand.link.call("ZSCORE", hand.key(other), i) is not None}
        assert there == (ended if other in ("jobs:succeeded", "jobs:final") else set()), other
    repair(hand, key, ended)
    assert sound(hand)


def test_a_call_whose_cancel_was_asked_for_ends_so_and_the_others_do_not(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)
    assert hand.run(fn.cancel(grants[1].id))[0] == "asked"

    calls = tuple(
        CallEnding(Ending(g.id, g.token, "cancelled" if n == 1 else "succeeded"))
        for n, g in enumerate(grants)
    )

    verdicts = hand.run(fn.commit(CallsEnding(calls))).verdicts
    assert verdicts == ("ok", "cancelled", *["ok"] * 8)
    assert hand.state(grants[1].id) == "cancelled"
    assert sound(hand)


def test_a_call_that_is_handed_back_runs_again_at_its_old_age(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    grants = hand.claim(worker, 1)
    hand.run(fn.release(grants[4].id, grants[4].token, "returned"))
    end(hand, (*grants[:4], *grants[5:]))

    (again, *_) = hand.claim(worker, 1)

    assert (again.id, again.attempt, again.losses) == (grants[4].id, 2, 0)
    assert sound(hand)


def test_a_lost_answer_grants_the_same_ride_again(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)

    first = hand.claim(worker, 1, nonce="n" * 32)

    assert hand.claim(worker, 1, nonce="n" * 32) == first
    assert len(first) == 10


def test_calls_with_a_device_do_not_share_it(hand: Hand) -> None:
    gpu = signature(gpus=1, tag="gpu")
    lots = (DeviceLot("G1", 0, 0, 1000),)
    worker = hand.machine("w1", {CPU: ()}, slots=1, lots=lots)
    hand.introduce(gpu, {"k1": (0,)})
    hand.submit(gpu, lane="lane")
    end(hand, hand.claim(worker, 1), QUICK_US)
    for _ in range(80):
        hand.submit(gpu, lane="lane")

    assert len(hand.claim(worker, 1)) == 1


def test_calls_with_a_disk_of_their_own_go_alone(hand: Hand, worker: Machine) -> None:
    sized = "c0.0.1.0.64.disk"
    hand.introduce(sized, {"k1": ()})
    teach(hand, worker)
    for _ in range(80):
        hand.submit(sized, lane="lane")

    assert len(hand.claim(worker, 1)) == 1


def test_a_ride_counts_as_one_job_in_fair_share(hand: Hand, worker: Machine) -> None:
    teach(hand, worker)
    submitted(hand, 80)
    hand.claim(worker, 1)

    assert hand.link.call("HGETALL", hand.key("owners")) == [b"local", b"1"]


def test_a_lane_asks_for_no_retry_by_report_and_bounds_how_many_end_at_once(
    hand: Hand, worker: Machine
) -> None:
    job = hand.submit(CPU, lane="lane")
    (grant,) = hand.claim(worker, 1)

    with pytest.raises(ReplyError, match="not tried again"):
        end(hand, (grant,), verdict="retry")
    with pytest.raises(ReplyError, match="33 at once"):
        end(hand, (grant,) * 33)
    assert hand.state(job) == "running"
