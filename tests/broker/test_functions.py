"""The functions one by one: what each changes, and what it answers."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link, ReplyError
from gpulayer_broker.functions import DeviceLot, Ending, Running, Submission
from gpulayer_broker.job import RECORD_FIELDS, decode_record, new_job_id
from tests.queueing import Hand, signature

CPU = signature()


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    hand = Hand(link, root)
    hand.introduce(CPU, {"k1": ()})
    return hand


def fits(*signatures: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(signatures, ())


def test_a_submitted_job_is_queued_and_counted(hand: Hand) -> None:
    job = hand.submit(CPU, name="first")

    assert (hand.state(job), hand.get(job, "phase"), hand.get(job, "name")) == ("queued", "ready", "first")
    assert hand.link.call("HGET", hand.key("sigjobs"), CPU) == b"1"


def server_ms(hand: Hand) -> int:
    seconds, microseconds = hand.link.call("TIME")
    return int(seconds) * 1000 + int(microseconds) // 1000


def test_a_job_enters_at_the_time_of_the_servers_clock(hand: Hand) -> None:
    before_ms = server_ms(hand)
    job = hand.submit(CPU)

    assert before_ms <= int(hand.get(job, "created_ms")) == int(hand.get(job, "queued_ms")) <= server_ms(hand)


def test_a_clock_that_was_ahead_once_does_not_date_what_comes_later(hand: Hand) -> None:
    later_ms = server_ms(hand) + 3_600_000
    hand.link.call("XADD", hand.key("events"), f"{later_ms}-0", "job", "j_before", "state", "queued")
    before_ms = server_ms(hand)
    jobs = [hand.submit(CPU) for _ in range(3)]

    assert all(before_ms <= int(hand.get(job, "created_ms")) <= server_ms(hand) for job in jobs)


def test_a_clock_that_is_put_back_makes_no_wait_shorter_than_none(hand: Hand) -> None:
    job = hand.submit(CPU)
    hand.link.call("HSET", hand.key(f"job:{job}"), "queued_ms", server_ms(hand) + 3_600_000)
    hand.claim(hand.machine("w1", fits(CPU)), 1)
    values = hand.link.call("HMGET", hand.key(f"job:{job}"), *RECORD_FIELDS)
    record = decode_record(job, dict(zip(RECORD_FIELDS, values, strict=True)))

    assert record is not None
    assert record.queue_wait_s == 0


def test_a_signature_of_the_spec_is_kept_with_it(hand: Hand) -> None:
    signed, plain = hand.submit(CPU, signed=b"\x00signature"), hand.submit(CPU)

    assert hand.link.call("HGET", hand.key(f"job:{signed}"), "signed") == b"\x00signature"
    assert not hand.link.call("HEXISTS", hand.key(f"job:{plain}"), "signed")


def test_a_job_that_cannot_be_told_of_is_not_counted(hand: Hand) -> None:
    hand.link.call("SET", hand.key("events"), "somebody else's")
    with pytest.raises(ReplyError, match="does not hold what the queue wrote"):
        hand.submit(CPU)

    assert hand.link.call("EXISTS", hand.key("sigjobs"), hand.key("jobs:queued")) == 0
    hand.link.call("DEL", hand.key("events"))


def test_namespaces_that_take_turns_keep_each_its_events_below_the_bound(hand: Hand) -> None:
    other = Hand(hand.link, hand.root.replace("}", "-other}"))
    other.introduce(CPU, {"k1": ()})
    for _ in range(110):
        jobs = [(each, Submission(new_job_id(), CPU, b"spec")) for _ in range(100) for each in (hand, other)]
        hand.link.pipeline([fn.submit(job).command(each.root) for each, job in jobs])
    lengths = [hand.link.call("XLEN", each.key("events")) for each in (hand, other)]
    hand.link.call("DEL", *hand.link.call("KEYS", f"{other.root}*"))

    assert all(10_000 <= length < 10_300 for length in lengths)


def test_an_unknown_signature_is_asked_to_be_introduced_and_changes_nothing(hand: Hand) -> None:
    answer = hand.run(fn.submit(Submission("j_1", signature(tag="new"), b"spec")))

    assert (answer.outcome, answer.id) == ("introduce", signature(tag="new"))
    assert hand.state("j_1") == ""
    assert hand.link.call("EXISTS", hand.key("sigjobs")) == 0


def test_the_oldest_job_is_granted_and_its_spec_comes_back_verbatim(hand: Hand) -> None:
    spec = bytes(range(256))
    first, second = hand.submit(CPU, spec=spec), hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))

    grants = hand.claim(worker, 1)

    assert [g.id for g in grants] == [first]
    assert grants[0].spec == spec
    assert (hand.state(first), hand.state(second)) == ("running", "queued")


def test_a_worker_takes_no_more_than_its_slots(hand: Hand) -> None:
    for _ in range(3):
        hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=2)

    assert len(hand.claim(worker)) == 2
    assert hand.claim(worker) == ()


def test_two_workers_on_one_node_share_its_cores_and_memory(hand: Hand) -> None:
    big = signature(cpus=3, memory=5000, tag="big")
    hand.introduce(big, {"k1": ()})
    hand.submit(big)
    hand.submit(big)
    one = hand.machine("w1", node="n", slots=4, node_cpus=4, memory_mib=8000, fits=fits(CPU, big))
    two = hand.machine("w2", node="n", slots=4, node_cpus=4, memory_mib=8000)

    assert len(hand.claim(one)) == 1
    assert hand.claim(two) == ()


def test_a_repeated_nonce_answers_with_the_same_grants(hand: Hand) -> None:
    hand.submit(CPU)
    hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=2)

    first = hand.claim(worker, 1, nonce="a" * 32)
    again = hand.claim(worker, 1, nonce="a" * 32)

    assert first == again
    assert hand.link.call("SCARD", hand.key("running:w1")) == 1


def test_a_commit_ends_the_job_frees_its_slot_and_claims_the_next(hand: Hand) -> None:
    first, second = hand.submit(CPU), hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=1)
    (grant,) = hand.claim(worker)

    answer = hand.commit(worker, grant, fields={"result": b"42", "result_kind": "json"}, claim_next=True)

    assert answer.verdict == "ok"
    assert [g.id for g in answer.claimed.grants] == [second]
    assert (hand.state(first), hand.get(first, "result")) == ("succeeded", "42")


def test_a_commit_sent_again_answers_already_and_a_strange_one_stale(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    hand.commit(worker, grant)

    assert hand.run(fn.commit(Ending(job, grant.token, "failed"))).verdict == "already"
    assert hand.run(fn.commit(Ending(job, "1:other", "failed"))).verdict == "stale"
    assert hand.run(fn.commit(Ending("j_none", grant.token, "failed"))).verdict == "stale"
    assert hand.state(job) == "succeeded"


def test_a_commit_writes_no_field_that_is_the_queues_own(hand: Hand) -> None:
    hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)

    with pytest.raises(ReplyError, match="does not write token"):
        hand.commit(worker, grant, fields={"token": "x"})
    assert hand.state(grant.id) == "running"


def test_an_outbox_enters_the_queue_with_the_commit(hand: Hand) -> None:
    hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=1)
    (grant,) = hand.claim(worker)

    answer = hand.commit(worker, grant, outbox=[Submission("j_next", CPU, b"next")], claim_next=True)

    assert [g.id for g in answer.claimed.grants] == ["j_next"]


def test_an_outbox_with_an_unknown_signature_changes_nothing(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    new = signature(tag="later")

    assert (
        hand.run(
            fn.commit(Ending(job, grant.token, "succeeded", outbox=[Submission("j_n", new, b"")]))
        ).verdict
        == "introduce"
    )
    assert (hand.state(job), hand.state("j_n")) == ("running", "")


def test_a_retry_waits_for_its_delay_and_keeps_its_options(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)

    hand.commit(worker, grant, "retry", delay_ms=1, fields={"options": b'{"retries":1}'})
    assert (hand.state(job), hand.get(job, "phase")) == ("queued", "retrying")

    while not (again := hand.claim(worker)):
        hand.tick()
    assert (again[0].id, again[0].options, again[0].attempt) == (job, b'{"retries":1}', 2)


def test_a_release_puts_the_job_back_at_its_age(hand: Hand) -> None:
    first, second = hand.submit(CPU), hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=1)
    (grant,) = hand.claim(worker)

    assert hand.run(fn.release(first, grant.token, "returned")) == "ok"

    assert [g.id for g in hand.claim(worker)] == [first]
    assert hand.state(second) == "queued"


def test_an_unfit_job_is_not_offered_to_that_class_again(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)

    hand.run(fn.release(job, grant.token, "unfit"))

    assert hand.claim(worker) == ()


def test_cancel_ends_a_queued_job_at_once_and_asks_the_holder_of_a_running_one(hand: Hand) -> None:
    running, queued = hand.submit(CPU), hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=1)
    (grant,) = hand.claim(worker)

    assert hand.run(fn.cancel(queued)) == ("cancelled", "")
    assert hand.run(fn.cancel(running)) == ("asked", "")
    assert hand.mail("w1")[-1] == "cancel"
    assert hand.renew(worker).cancelled == (running,)
    assert hand.commit(worker, grant, "failed", reason="user_error").verdict == "cancelled"
    assert hand.state(running) == "cancelled"
    assert hand.run(fn.cancel(running)) == ("too_late", "cancelled")


def test_a_success_that_came_before_the_cancel_was_seen_stands(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    hand.run(fn.cancel(job))

    hand.commit(worker, grant)

    assert hand.state(job) == "succeeded"


def test_a_grant_that_needs_preparation_is_running_from_its_first_sign(hand: Hand) -> None:
    job = hand.submit(CPU, prepare=True)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    assert hand.state(job) == "scheduled"

    hand.run(fn.renew("w1", "i1", 1000, [Running(job, grant.token, started=False)]))
    assert hand.state(job) == "scheduled"
    hand.run(fn.renew("w1", "i1", 1000, [Running(job, grant.token, started=True)]))
    assert hand.state(job) == "running"


def test_a_log_is_taken_once_and_ends_with_its_marker(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)

    assert hand.run(fn.log(job, grant.token, 0, "out", 0, b"hello ")) == "ok"
    assert hand.run(fn.log(job, grant.token, 0, "out", 0, b"hello ")) == "already"
    assert hand.run(fn.log(job, grant.token, 0, "err", 6, b"there")) == "ok"
    hand.commit(worker, grant)
    assert hand.run(fn.log(job, grant.token, 0, "out", 11, b"late")) == "stale"

    entries = hand.link.call("XRANGE", hand.key(f"log:{job}:1:0"), "-", "+")
    assert [e[0] for e in entries] == [b"6-0", b"11-0", b"11-1"]
    assert entries[-1][1] == [b"end", b"1"]


def test_the_live_tail_of_a_log_stays_below_its_bound(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    for n in range(40):
        hand.run(fn.log(job, grant.token, 0, "out", n * 65536, b"x" * 65536))

    assert hand.link.call("XLEN", hand.key(f"log:{job}:1:0")) <= 17


def test_devices_are_granted_by_group_memory_and_share(hand: Hand) -> None:
    sig = signature(gpus=1, vram=10_000, tag="gpu")
    hand.introduce(sig, {"k1": (1,)})
    jobs = [hand.submit(sig) for _ in range(3)]
    lots = (
        DeviceLot("GPU-small", 0, 0, 16_000),
        DeviceLot("GPU-busy", 0, 1, 9_000),
        DeviceLot("GPU-big", 0, 1, 25_000),
        DeviceLot("GPU-big", 1, 1, 25_000),
        DeviceLot("GPU-big", 2, 1, 25_000),
    )
    worker = hand.machine("w1", {CPU: (), sig: (1,)}, lots=lots, slots=8)

    grants = hand.claim(worker)

    assert [g.lots for g in grants] == [(("GPU-big", 0),), (("GPU-big", 1),)]
    assert hand.state(jobs[2]) == "queued"


def test_a_device_is_one_whoever_offers_it(hand: Hand) -> None:
    sig = signature(gpus=1, tag="gpu")
    hand.introduce(sig, {"k1": (0,)})
    hand.submit(sig)
    hand.submit(sig)
    lots = (DeviceLot("GPU-1", 0, 0, 16_000),)
    one = hand.machine("w1", {CPU: (), sig: (0,)}, node="n1", lots=lots)
    two = hand.machine("w2", node="n2", lots=lots)

    assert len(hand.claim(one)) == 1
    assert hand.claim(two) == ()


def test_any_takes_a_gpu_if_one_is_free_and_else_none(hand: Hand) -> None:
    sig = signature(gpus=1, letter="a", tag="any")
    hand.introduce(sig, {"k1": (0,)})
    hand.submit(sig)
    hand.submit(sig)
    worker = hand.machine("w1", {CPU: (), sig: (0,)}, lots=(DeviceLot("GPU-1", 0, 0, 16_000),))

    assert [g.lots for g in hand.claim(worker)] == [(("GPU-1", 0),), ()]


def test_more_important_jobs_go_first(hand: Hand) -> None:
    normal, critical, idle = hand.submit(CPU), hand.submit(CPU, priority=0), hand.submit(CPU, priority=4)
    worker = hand.machine("w1", fits(CPU), slots=1)

    order = []
    for _ in range(3):
        (grant,) = hand.claim(worker)
        order.append(grant.id)
        hand.commit(worker, grant)
    assert order == [critical, normal, idle]


def test_submitters_share_fairly_within_a_priority(hand: Hand) -> None:
    for _ in range(4):
        hand.submit(CPU, owner="ann")
    bob = hand.submit(CPU, owner="bob")
    worker = hand.machine("w1", fits(CPU), slots=2)

    grants = hand.claim(worker)

    assert [g.owner for g in grants] == ["ann", "bob"]
    assert grants[1].id == bob


def test_a_watched_job_is_told_once_to_each_client(hand: Hand) -> None:
    job = hand.submit(CPU, client="c1")
    worker = hand.machine("w1", fits(CPU))
    assert hand.run(fn.watch("c2", [job, "j_none"])) == {"j_none": "missing"}
    (grant,) = hand.claim(worker)
    hand.commit(worker, grant, fields={"result": b"7", "result_kind": "json"})

    for client in ("c1", "c2"):
        ((entry, values),) = hand.link.call("XRANGE", hand.key(f"done:{client}"), "-", "+")
        assert entry == b"0-1"
        assert values == [b"job", job.encode(), b"state", b"succeeded", b"kind", b"json", b"result", b"7"]
    assert hand.run(fn.watch("c3", [job])) == {job: "succeeded"}


def test_a_draining_worker_takes_nothing_until_it_is_online_again(hand: Hand) -> None:
    hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))

    hand.run(fn.drain("w1", "draining"))
    assert hand.claim(worker) == ()
    hand.run(fn.drain("w1", "online"))
    assert len(hand.claim(worker)) == 1


def test_a_drain_outlives_a_change_of_the_machine_and_ends_with_a_new_start(hand: Hand) -> None:
    hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    hand.run(fn.drain("w1", "draining"))

    hand.register(worker, fits(CPU))
    assert hand.claim(worker) == ()
    assert len(hand.claim(hand.machine("w1", fits(CPU), incarnation="next"))) == 1


def test_a_full_queue_refuses(hand: Hand) -> None:
    hand.link.call("HSET", hand.key("config"), "max_queued", 1)
    hand.submit(CPU)

    assert hand.run(fn.submit(Submission("j_2", CPU, b""))).outcome == "full"


def test_an_idempotency_key_answers_with_its_job_and_refuses_another_request(hand: Hand) -> None:
    first = hand.submit(CPU, idempotency_key="k", digest="d1")

    assert hand.submit(CPU, idempotency_key="k", digest="d1") == first
    assert (
        hand.run(fn.submit(Submission("j_x", CPU, b"", idempotency_key="k", digest="d2"))).outcome
        == "conflict"
    )


def test_an_idempotency_key_is_its_owners_own(hand: Hand) -> None:
    first = hand.submit(CPU, owner="ann", idempotency_key="k", digest="d1")

    assert hand.submit(CPU, owner="bob", idempotency_key="k", digest="d2") != first


def test_the_third_loss_ends_a_job_and_an_announced_return_does_not_count(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    for _ in range(2):
        (grant,) = hand.claim(worker)
        hand.run(fn.release(job, grant.token, "returned"))
    for _ in range(3):
        (grant,) = hand.claim(worker)
        hand.run(fn.release(job, grant.token, "lost"))

    assert (hand.state(job), hand.get(job, "end_reason")) == ("failed", "worker_lost")


def test_the_next_incarnation_of_a_worker_frees_what_the_former_held(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU), slots=1)
    hand.claim(worker)

    worker.incarnation = "i2"
    hand.register(worker)

    assert [g.id for g in hand.claim(worker)] == [job]
    assert hand.get(job, "losses") == "1"


def test_an_old_incarnation_is_told_to_register(hand: Hand) -> None:
    worker = hand.machine("w1", fits(CPU))
    worker.incarnation = "i2"
    hand.register(worker)
    worker.incarnation = "i1"

    assert not hand.run(fn.claim(worker.offer())).known
    assert not hand.renew(worker).known


def test_signatures_make_room_only_when_no_open_job_needs_them(hand: Hand) -> None:
    used = signature(tag="used")
    hand.introduce(used, {})
    hand.submit(used)
    for n in range(1022):
        hand.introduce(signature(tag=f"s{n}"), {})

    hand.introduce(signature(tag="one-more"), {})

    known = hand.link.call("HKEYS", hand.key("signatures"))
    assert len(known) == 1024
    assert used.encode() in known


def test_signatures_make_room_however_many_older_ones_are_in_use(hand: Hand) -> None:
    for n in range(1023):
        hand.introduce(signature(tag=f"s{n}"), {})
        hand.submit(signature(tag=f"s{n}"), id=f"j{n}")
    hand.run(fn.cancel("j500"))
    hand.submit(CPU)

    version = (hand.link.call("GET", hand.key("classes_version")) or b"0").decode()
    assert hand.run(fn.introduce(signature(tag="one-more"), b"{}", version, {})).outcome == "ok"

    known = set(map(bytes.decode, hand.link.call("HKEYS", hand.key("signatures"))))
    assert signature(tag="s500") not in known
    assert {signature(tag="s0"), signature(tag="s1022"), signature(tag="one-more"), CPU} <= known


def test_too_many_live_signatures_are_refused(hand: Hand) -> None:
    for n in range(1023):
        hand.introduce(signature(tag=f"s{n}"), {})
        hand.submit(signature(tag=f"s{n}"))
    hand.submit(CPU)
    version = (hand.link.call("GET", hand.key("classes_version")) or b"0").decode()

    assert hand.run(fn.introduce(signature(tag="more"), b"{}", version, {})).outcome == "too_many"


def test_a_client_that_submits_and_watches_is_told_once(hand: Hand) -> None:
    job = hand.submit(CPU, client="c1")
    hand.run(fn.watch("c1", [job]))

    hand.run(fn.cancel(job))

    assert hand.link.call("XLEN", hand.key("done:c1")) == 1


def test_a_cancelled_attempt_keeps_its_logs_and_usage_but_no_result(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    hand.run(fn.cancel(job))

    hand.commit(worker, grant, "failed", fields={"logs": b"digest", "usage": b"{}", "error": b"{}"})

    assert [hand.get(job, name) for name in ("state", "logs", "usage", "error")] == [
        "cancelled",
        "digest",
        "{}",
        "",
    ]


def test_what_leaves_a_table_counts_as_a_new_version_of_it(hand: Hand) -> None:
    """Or a class that was judged against a signature now gone would write it down again."""
    for n in range(1023):
        hand.introduce(signature(tag=f"s{n}"), {})
    before = int(hand.link.call("GET", hand.key("signatures_version")))

    hand.introduce(signature(tag="one-more"), {})

    assert int(hand.link.call("GET", hand.key("signatures_version"))) == before + 2


def test_a_signature_judged_against_an_older_table_of_classes_is_refused(hand: Hand) -> None:
    hand.machine("w1", fits(CPU))
    answer = hand.run(fn.introduce(signature(tag="new"), b"{}", "0", {}))

    assert (answer.outcome, answer.version) == ("match", "1")
    assert not hand.link.call("HEXISTS", hand.key("signatures"), signature(tag="new"))


def test_a_class_judged_against_an_older_table_of_signatures_is_refused(hand: Hand) -> None:
    worker = fn.Registration("w1", "n1", "i1", "k1", 1, 1, 1, 1, 1, b"{}", b"{}")
    answer = hand.run(fn.register(worker, "0", {}))

    assert (answer.outcome, answer.version) == ("match", "1")
    assert not hand.link.call("EXISTS", hand.key("worker:w1"))


def test_the_tables_come_in_pages_with_their_version(hand: Hand) -> None:
    expected = {CPU: b"{}"} | {signature(tag=f"s{n}"): b"{}" for n in range(600)}
    for n in range(600):
        hand.introduce(signature(tag=f"s{n}"), {})
    rows: dict[str, bytes] = {}
    cursor, pages = "0", 0
    while pages == 0 or cursor != "0":
        page = hand.run(fn.match("signatures", cursor))
        assert page.version == "601"
        cursor, pages = page.cursor, pages + 1
        rows |= page.rows

    assert rows == expected
    assert pages > 1


def test_a_checkpoint_belongs_to_the_job_and_outlives_its_attempt(hand: Hand) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)

    assert hand.run(fn.checkpoint(job, grant.token, "digest")) == "ok"
    hand.run(fn.release(job, grant.token, "lost"))
    assert hand.get(job, "checkpoint") == "digest"


@pytest.mark.parametrize("way", ["lost", "returned", "register"])
def test_an_attempt_that_is_lost_or_given_back_after_a_cancel_does_not_run_again(
    hand: Hand, way: str
) -> None:
    job = hand.submit(CPU)
    worker = hand.machine("w1", fits(CPU))
    (grant,) = hand.claim(worker)
    hand.run(fn.cancel(job))

    if way == "register":
        worker.incarnation = "i2"
        hand.register(worker)
    else:
        hand.run(fn.release(job, grant.token, way))

    assert hand.state(job) == "cancelled"
