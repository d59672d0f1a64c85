"""Damaged records and arguments, and a full memory: refused or set aside with a reason, and the queue goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link, ReplyError
from gpulayer_broker.errors import ServerOutOfMemory
from gpulayer_broker.functions import Ending, Submission
from tests import snapshot
from tests.checker import violations
from tests.queueing import HEARTBEAT_MS, NO_RETENTION, Hand, signature
from tests.servers import QueueServer
from tests.virtual import virtual_library

CPU = signature()
ROOT = "gpulayer:{t}:"


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    hand = Hand(link, root)
    hand.introduce(CPU, {})
    return hand


def check(hand: Hand) -> None:
    assert violations(snapshot.read(hand.link, hand.root)) == []


# Damaged records ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["seq", "attempt", "state"])
@pytest.mark.parametrize("value", [None, b"", b"\xff\x00", b"1e"])
def test_a_damaged_record_ends_as_undecodable_and_the_next_job_is_granted(
    hand: Hand, field: str, value: bytes | None
) -> None:
    damaged, sound = hand.submit(CPU), hand.submit(CPU)
    _write(hand, damaged, field, value)

    grants = hand.claim(hand.machine("w1", {CPU: ()}))

    assert [g.id for g in grants] == [sound]
    if value is None or field != "state":
        assert (hand.state(damaged), hand.get(damaged, "end_reason")) == ("failed", "undecodable")
        check(hand)
    else:
        hand.link.call("DEL", hand.key(f"job:{damaged}"))
        hand.link.call("ZREM", hand.key("jobs:queued"), damaged)


@pytest.mark.parametrize("field", ["losses", "queued_ms"])
@pytest.mark.parametrize("value", [b"", b"x", b"1e5", b"0x10"])
def test_a_number_that_is_none_counts_as_nothing_and_stops_nobody(
    hand: Hand, field: str, value: bytes
) -> None:
    damaged, sound = hand.submit(CPU), hand.submit(CPU)
    _write(hand, damaged, field, value)
    machine = hand.machine("w1", {CPU: ()})

    grants = hand.claim(machine)

    assert [g.id for g in grants] == [damaged, sound]
    assert (grants[0].losses if field == "losses" else grants[0].queued_ms) == 0
    _write(hand, damaged, field, value)
    for grant in grants:
        assert hand.run(fn.release(grant.id, grant.token, "lost")) == "ok"
    assert [hand.get(job, "losses") for job in (damaged, sound)] == ["1", "1"]
    check(hand)


@pytest.mark.parametrize(
    ("key", "named"), [("seq", "the counter gpulayer:{"), ("jobs:queued", "a key below gpulayer:{")]
)
def test_a_key_that_somebody_else_wrote_is_told_in_one_line(hand: Hand, key: str, named: str) -> None:
    hand.link.call("SET", hand.key(key), "rubbish")

    with pytest.raises(ReplyError) as caught:
        hand.submit(CPU)
    hand.link.call("DEL", hand.key(key))

    assert str(caught.value).startswith(f"GPULAYER damaged {named}")
    assert "user_function" not in str(caught.value)
    assert "\n" not in str(caught.value)


def _write(hand: Hand, job: str, field: str, value: bytes | None) -> None:
    command = ("HDEL", hand.key(f"job:{job}"), field)
    hand.link.call(*command) if value is None else hand.link.call("HSET", *command[1:], value)


@pytest.mark.parametrize("other", ["SET", None])
def test_an_entry_whose_record_is_gone_or_no_record_leaves_its_stream(hand: Hand, other: str | None) -> None:
    gone, sound = hand.submit(CPU), hand.submit(CPU)
    key = hand.key(f"job:{gone}")
    hand.link.call("DEL", key)
    if other:
        hand.link.call("SET", key, "not a record")

    grants = hand.claim(hand.machine("w1", {CPU: ()}))

    assert [g.id for g in grants] == [sound]
    stream = snapshot.read(hand.link, hand.root).streams[f"queue:{CPU}:local:2"]
    assert [fields["j"] for fields in stream.entries.values()] == [sound]
    assert len(stream.pending) == 1
    hand.link.call("DEL", key)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(fields=st.dictionaries(st.binary(max_size=9), st.binary(max_size=99), min_size=1, max_size=3))
def test_any_bytes_in_a_stream_are_dropped(hand: Hand, fields: dict[bytes, bytes]) -> None:
    machine = hand.machine("w1", {CPU: ()}, slots=1)
    sound = hand.submit(CPU)
    stream = hand.key(f"queue:{CPU}:local:2")
    foreign = [part for pair in fields.items() for part in pair]
    hand.link.call("XADD", stream, f"{hand.link.call('INCR', hand.key('seq'))}-0", *foreign)
    last = hand.submit(CPU)

    for expected in (sound, last):
        (grant,) = hand.claim(machine, 1)
        assert grant.id == expected
        hand.commit(machine, grant)
    assert hand.claim(machine) == ()
    assert hand.link.call("EXISTS", stream) == 0


@pytest.mark.parametrize("damage", ["DEL", "SET"])
def test_a_running_record_that_is_gone_stops_neither_heartbeat_nor_tick_nor_return(
    hand: Hand, damage: str
) -> None:
    with virtual_library(hand.link) as clock:
        lost, kept = hand.submit(CPU), hand.submit(CPU)
        machine = hand.machine("w1", {CPU: ()})
        hand.claim(machine)
        hand.link.call("DEL", hand.key(f"job:{lost}"))
        if damage == "SET":
            hand.link.call("SET", hand.key(f"job:{lost}"), "not a record")
        clock.advance(HEARTBEAT_MS + 1)

        assert hand.renew(machine).stale == (lost,)
        machine.held.pop(lost)
        assert hand.renew(machine).stale == ()
        hand.expire(lost)
        assert hand.tick().reaped == 0
        machine.incarnation = "i2"
        hand.register(machine)

        assert hand.state(kept) == "queued"
        assert hand.link.call("EXISTS", hand.key("leases")) == 0
        hand.link.call("DEL", hand.key(f"job:{lost}"))
        hand.link.call("ZREM", hand.key("jobs:running"), lost)


def test_a_signature_that_cannot_be_read_is_refused_and_one_in_the_heads_is_passed_over(hand: Hand) -> None:
    version = (hand.link.call("GET", hand.key("classes_version")) or b"0").decode()
    with pytest.raises(ReplyError, match="signature"):
        hand.run(fn.introduce("nonsense", b"{}", version, {}))
    hand.link.call("ZADD", hand.key("heads:2:local"), 0, "nonsense")
    hand.link.call("SADD", hand.key("waiting:2"), "local")
    job = hand.submit(CPU)

    assert [g.id for g in hand.claim(hand.machine("w1", {CPU: ()}))] == [job]


# Arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        {"priority": 5},
        {"priority": -1},
        {"owner": "a:b"},
        {"owner": ""},
        {"queue": "a b"},
        {"client": "a:b"},
        {"delay_ms": -1},
        {"id": "j:1"},
    ],
)
def test_a_submit_that_no_worker_could_ever_claim_is_refused(hand: Hand, facts: dict[str, object]) -> None:
    before = snapshot.read(hand.link, hand.root)
    with pytest.raises(ReplyError, match="submit"):
        hand.submit(CPU, **facts)
    assert snapshot.read(hand.link, hand.root) == before


def test_an_unknown_word_changes_nothing(hand: Hand) -> None:
    job = hand.submit(CPU)
    machine = hand.machine("w1", {CPU: ()})
    (grant,) = hand.claim(machine)
    before = snapshot.read(hand.link, hand.root)

    bad = Submission("j_2", CPU, b"", priority=9)
    calls: tuple[fn.Call[Any], ...] = (
        fn.commit(Ending(job, grant.token, "done")),
        fn.commit(Ending(job, grant.token, "succeeded", outbox=[bad])),
        fn.release(job, grant.token, "dropped"),
        fn.drain("w1", "asleep"),
    )
    for call in calls:
        with pytest.raises(ReplyError):
            hand.run(call)
    assert snapshot.read(hand.link, hand.root) == before


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(queue_server: Callable[..., QueueServer]) -> Iterator[Hand]:
    """A queue with work in flight whose memory is used up."""
    with Link(queue_server().endpoint) as link:
        hand = Hand(link, ROOT)
        hand.introduce(CPU, {})
        yield hand


def _fill(hand: Hand) -> None:
    hand.link.call("CONFIG", "SET", "maxmemory", 1_000_000)


def test_without_memory_a_submit_is_refused_and_what_runs_ends(full: Hand) -> None:
    jobs = [full.submit(CPU) for _ in range(8)]
    machine = full.machine("w1", {CPU: ()}, slots=6)
    grants = full.claim(machine, 5)
    _fill(full)

    with pytest.raises(ServerOutOfMemory):
        full.submit(CPU)
    assert full.renew(machine).stale == ()
    assert full.commit(machine, grants[0], fields={"result": b"1"}).verdict == "ok"
    assert full.commit(machine, grants[1], "failed", reason="user_error", claim_next=True).verdict == "ok"
    assert full.run(fn.release(jobs[2], grants[2].token, "returned")) == "ok"
    assert full.run(fn.cancel(jobs[3])) == ("asked", "")
    assert full.run(fn.cancel(jobs[7])) == ("cancelled", "")
    assert full.run(fn.checkpoint(jobs[4], grants[4].token, "d")) == "ok"
    assert full.run(fn.drain("w1", "draining")) == "ok"
    check(full)


def test_without_memory_waiting_jobs_still_run_and_old_ones_still_leave(full: Hand) -> None:
    """Else a queue that filled up would stay full for ever."""
    job = full.submit(CPU)
    machine = full.machine("w1", {CPU: ()}, slots=1)
    _fill(full)

    machine.incarnation = "i2"
    full.register(machine)
    (grant,) = full.claim(machine)
    full.commit(machine, grant)
    ticked = full.run(fn.tick(older_than_ms=-1, results_older_than_ms=NO_RETENTION))

    assert (grant.id, ticked.purged) == (job, 1)
    check(full)
