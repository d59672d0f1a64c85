"""Arrays: one record for many calls, handed out in ranges whose size follows how long an item takes."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Grant
from gpulayer_broker.connection import ReplyError
from gpulayer_broker.functions import ItemsEnding, Submission
from gpulayer_broker.queue import Queue
from tests.queueing import Hand, Machine, signature

CPU = signature()


@pytest.fixture
def worker(hand: Hand) -> Machine:
    return hand.machine("w1", {CPU: ()}, slots=1)


def end(hand: Hand, grant: Grant, upto: int | None = None, failed: int = 0, us_each: int = 20_000) -> str:
    upto = grant.stop if upto is None else upto
    took_us = us_each * (upto - grant.start)
    page = f"{grant.start}-{upto}".encode()
    return hand.run(fn.commit_items(ItemsEnding(grant.id, grant.token, upto, failed, took_us, page))).verdict


def run_all(hand: Hand, worker: Machine, us_each: int = 20_000) -> list[tuple[int, int]]:
    """Ranges in the order in which they were handed out, until nothing is."""
    ranges = []
    while grants := hand.claim(worker, 1):
        ranges.append((grants[0].start, grants[0].stop))
        end(hand, grants[0], us_each=us_each)
    return ranges


def pages(hand: Hand, array: str) -> dict[bytes, bytes]:
    raw = hand.link.call("HGETALL", hand.key(f"pages:{array}"))
    return dict(zip(raw[::2], raw[1::2], strict=True))


def test_every_item_is_handed_out_once_and_the_array_ends_when_all_have_outcomes(
    hand: Hand, worker: Machine
) -> None:
    array = hand.submit(CPU, count=5)

    assert run_all(hand, worker) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert hand.state(array) == "succeeded"
    assert len(pages(hand, array)) == 5
    assert hand.link.call("HGET", hand.key("sigjobs"), CPU) is None


def test_a_range_is_worth_about_twenty_milliseconds(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=3000)

    sizes = [stop - start for start, stop in run_all(hand, worker, us_each=100)]

    assert sizes[0] == 1
    assert sizes[1] == 200
    assert max(sizes) <= 1000
    assert sum(sizes) == 3000


def test_several_ranges_are_out_at_once_under_tokens_of_their_own(hand: Hand) -> None:
    array = hand.submit(CPU, count=10)
    wide = hand.machine("w2", {CPU: ()}, slots=3)

    grants = hand.claim(wide)

    assert [(g.start, g.stop) for g in grants] == [(0, 1), (1, 2), (2, 3)]
    assert len({g.token for g in grants}) == 3
    assert hand.link.call("SCARD", hand.key(f"chunks:{array}")) == 3


def test_what_had_not_begun_goes_back_and_is_taken_first(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=600)
    (first,) = hand.claim(worker, 1)
    end(hand, first, us_each=100)
    (second,) = hand.claim(worker, 1)
    assert (second.start, second.stop) == (1, 201)

    end(hand, second, upto=50, us_each=100)

    (third,) = hand.claim(worker, 1)
    assert third.start == 50
    assert third.stop <= 201


def test_a_range_that_lost_its_worker_comes_back_item_by_item(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=600)
    (first,) = hand.claim(worker, 1)
    end(hand, first, us_each=100)
    (lost,) = hand.claim(worker, 1)
    hand.run(fn.release(lost.id, lost.token, "lost"))

    (again,) = hand.claim(worker, 1)

    assert (again.start, again.stop) == (1, 2)
    assert again.losses == 1


def test_an_item_that_takes_three_workers_along_fails_alone(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=3)
    for _ in range(3):
        (grant,) = hand.claim(worker, 1)
        assert grant.start == 0
        hand.run(fn.release(grant.id, grant.token, "lost"))

    assert run_all(hand, worker) == [(1, 2), (2, 3)]
    assert (hand.state(array), hand.get(array, "end_reason")) == ("failed", "user_error")
    assert pages(hand, array)[b"0"].startswith(b"!1 worker_lost ")


def test_a_failed_item_fails_the_array_at_its_end(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=2)
    (grant,) = hand.claim(worker, 1)
    end(hand, grant, failed=1)
    assert hand.state(array) == "running"

    run_all(hand, worker)

    assert hand.state(array) == "failed"


def test_a_chunks_report_is_taken_once_and_only_from_its_holder(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=2)
    (grant,) = hand.claim(worker, 1)

    assert hand.run(fn.commit_items(ItemsEnding(grant.id, "1:other", 1, 0, 1, b""))).verdict == "stale"
    assert end(hand, grant) == "ok"
    assert end(hand, grant) == "already"


def test_outcomes_beyond_the_range_are_refused(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=2)
    (grant,) = hand.claim(worker, 1)

    with pytest.raises(ReplyError, match="upto"):
        end(hand, grant, upto=2)


def test_a_repeated_nonce_hands_out_the_same_range(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=5)

    first = hand.claim(worker, 1, nonce="b" * 32)
    again = hand.claim(worker, 1, nonce="b" * 32)

    assert first == again
    assert first[0].spec == b"spec"


def test_cancelling_an_array_stops_what_waits_and_asks_the_holders(hand: Hand, worker: Machine) -> None:
    waiting = hand.submit(CPU, count=5)
    assert hand.run(fn.cancel(waiting)) == ("cancelled", "")

    array = hand.submit(CPU, count=5)
    (grant,) = hand.claim(worker, 1)
    assert hand.run(fn.cancel(array)) == ("asked", "")
    assert hand.renew(worker).cancelled == (grant.id,)
    hand.commit(worker, grant, "cancelled", reason="cancelled")

    assert hand.state(array) == "cancelled"
    assert hand.claim(worker) == ()


def test_outcomes_that_come_with_the_cancel_are_kept(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=5)
    (grant,) = hand.claim(worker, 1)
    hand.run(fn.cancel(array))

    end(hand, grant)

    assert hand.state(array) == "cancelled"
    assert pages(hand, array) == {b"0": b"0-1"}


def items_before(hand: Hand, worker: Machine, job: str, us_each: int) -> int:
    """How many items of an array are handed out, and end, before a job has its turn."""
    handed_out = 0
    while (grant := hand.claim(worker, 1)[0]).id != job:
        handed_out += grant.stop - grant.start
        end(hand, grant, us_each=us_each)
    return handed_out


@pytest.mark.parametrize("owner", ["ann", "bob"])
def test_others_of_the_same_priority_are_not_kept_waiting_by_a_long_array(
    hand: Hand, worker: Machine, owner: str
) -> None:
    hand.submit(CPU, count=1000, owner="ann")
    (first,) = hand.claim(worker, 1)
    end(hand, first, us_each=18_000)
    short = hand.submit(CPU, owner=owner)

    assert 64 <= items_before(hand, worker, short, 18_000) + 1 <= 64 + 1


def test_a_turn_of_quick_items_is_worth_a_second(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=10_000)
    (first,) = hand.claim(worker, 1)
    end(hand, first, us_each=400)
    short = hand.submit(CPU)

    assert 2500 <= items_before(hand, worker, short, 400) <= 2500 + 50


def test_an_array_that_was_overtaken_has_waited_as_long_as_it_did(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=1000)
    (first,) = hand.claim(worker, 1)
    end(hand, first, us_each=18_000)
    waited_since = hand.get(array, "queued_ms")
    items_before(hand, worker, hand.submit(CPU), 18_000)

    assert hand.get(array, "queued_ms") == waited_since


def test_an_array_alone_on_its_priority_keeps_its_age(hand: Hand) -> None:
    hand.submit(CPU)
    array = hand.submit(CPU, count=1000)
    wide = hand.machine("w2", {CPU: ()}, slots=2)
    (_plain, first) = hand.claim(wide)
    end(hand, first, us_each=300)
    age = hand.get(array, "entry")

    (grant,) = hand.claim(wide)

    assert (grant.start, grant.stop) == (1, 67)
    assert hand.get(array, "entry") == age


def test_ranges_of_an_array_outlive_an_outage_if_it_was_asked_to(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=1, on_outage="keep")
    (grant,) = hand.claim(worker, 1)
    hand.tick()
    hand.expire(grant.id)

    assert hand.tick().reaped == 0
    assert end(hand, grant) == "ok"


def test_a_range_does_not_succeed_without_its_items(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=1)
    (grant,) = hand.claim(worker, 1)

    with pytest.raises(ReplyError, match="its items"):
        hand.commit(worker, grant, "succeeded")

    assert end(hand, grant) == "ok"
    assert hand.state(array) == "succeeded"


def test_a_range_of_an_array_keeps_no_checkpoint(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=1)
    (grant,) = hand.claim(worker, 1)

    with pytest.raises(ReplyError, match="keeps none"):
        hand.run(fn.checkpoint(grant.id, grant.token, "digest"))

    assert end(hand, grant) == "ok"


@pytest.mark.parametrize("ended", [False, True])
def test_a_range_is_no_job_to_cancel_or_to_wait_for(hand: Hand, worker: Machine, ended: bool) -> None:
    hand.submit(CPU, count=1)
    (grant,) = hand.claim(worker, 1)
    if ended:
        end(hand, grant)

    assert hand.run(fn.cancel(grant.id)) == ("missing", "")
    assert hand.run(fn.watch("c", [grant.id])) == {grant.id: "missing"}
    assert not hand.link.call("EXISTS", hand.key("inbox:"), hand.key(f"watchers:{grant.id}"))


def test_the_client_is_told_of_each_page_and_of_the_end(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=2, client="c1")
    run_all(hand, worker)

    told = [
        (e[1][3], e[1][5], e[1][7])
        for e in hand.link.call("XRANGE", hand.key("done:c1"), "-", "+")
        if e[1][1] == array.encode()
    ]
    assert told == [(b"items", b"0 1", b"0-1"), (b"items", b"1 2", b"1-2"), (b"succeeded", b"fetch", b"")]


def test_an_array_of_which_more_is_left_wakes_the_next_worker(hand: Hand, worker: Machine) -> None:
    other = hand.machine("w2", {CPU: ()}, slots=1)
    for idle in (worker, other):
        hand.claim(idle)
    hand.submit(CPU, count=3)
    (first,) = hand.rung()
    machines = {"w1": worker, "w2": other}

    hand.claim(machines[first], 1)

    assert hand.rung() == set(machines) - {first}


def test_a_range_that_comes_back_wakes_a_worker(hand: Hand, worker: Machine) -> None:
    hand.submit(CPU, count=1)
    (grant,) = hand.claim(worker, 1)
    assert hand.claim(hand.machine("w2", {CPU: ()}, slots=1)) == ()

    hand.run(fn.release(grant.id, grant.token, "returned"))

    assert hand.mail("w2") == ["work"]


def test_what_a_client_that_left_was_told_of_an_array_goes_before_the_array_does(
    hand: Hand, worker: Machine
) -> None:
    hand.submit(CPU, count=2, client="c1")
    (grant,) = hand.claim(worker, 1)
    end(hand, grant)

    assert 0 < hand.link.call("TTL", hand.key("done:c1")) <= 3600


def test_an_expired_lease_of_a_chunk_gives_its_range_to_another(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=1)
    (grant,) = hand.claim(worker, 1)
    other = hand.machine("w2", {CPU: ()}, slots=1)
    hand.tick()
    hand.link.call("ZADD", hand.key("leases"), 1, grant.id)
    hand.tick()

    (again,) = hand.claim(other, 1)

    assert (again.start, again.stop, again.losses) == (0, 1, 1)
    assert end(hand, grant) == "stale"
    assert end(hand, again) == "ok"
    assert hand.state(array) == "succeeded"


def test_a_forged_id_cannot_pass_for_a_chunk(hand: Hand) -> None:
    with pytest.raises(ReplyError, match="slash"):
        hand.run(fn.submit(Submission("j_1/2", CPU, b"")))


def test_who_watches_an_array_is_told_of_its_pages_too(hand: Hand, worker: Machine) -> None:
    array = hand.submit(CPU, count=2, client="c1")
    hand.run(fn.watch("c2", [array]))
    hand.run(fn.watch("c1", [array]))
    run_all(hand, worker)

    for client in ("c1", "c2"):
        entries = hand.link.call("XRANGE", hand.key(f"done:{client}"), "-", "+")
        assert [entry[1][3] for entry in entries] == [b"items", b"items", b"succeeded"]


def test_pages_are_read_but_those_that_are_known(hand: Hand, worker: Machine, namespace: str) -> None:
    array = hand.submit(CPU, count=120)
    run_all(hand, worker)
    queue = Queue(hand.link, namespace)

    assert queue.pages(array) == {n: f"{n}-{n + 1}".encode() for n in range(120)}
    assert set(queue.pages(array, range(1, 119))) == {0, 119}
    assert queue.record(array).count == 120
