"""What a job waits for before its stream: predecessors, rates and permits, each kept by the queue itself."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link, ReplyError
from gpulayer_broker.functions import Submission
from tests import snapshot
from tests.checker import violations
from tests.queueing import Hand, Machine, signature
from tests.support import PATIENCE_S, wait_until
from tests.virtual import virtual_library

CPU = signature()


@pytest.fixture
def worker(hand: Hand) -> Machine:
    return hand.machine("w1", {CPU: ()}, slots=8)


def ids(hand: Hand, worker: Machine) -> list[str]:
    return [grant.id for grant in hand.claim(worker)]


def finish(hand: Hand, worker: Machine, job: str, verdict: str = "succeeded") -> None:
    hand.commit(worker, worker.held[job], verdict)


def check_of(hand: Hand) -> list[str]:
    return violations(snapshot.read(hand.link, hand.root))


# Predecessors ------------------------------------------------------------------------------------------------------


def test_a_job_waits_for_all_that_it_comes_after(hand: Hand, worker: Machine) -> None:
    first, second = hand.submit(CPU), hand.submit(CPU)
    third = hand.submit(CPU, after=(first, second))
    assert (hand.state(third), hand.get(third, "phase")) == ("queued", "blocked")

    assert ids(hand, worker) == [first, second]
    finish(hand, worker, first)
    assert ids(hand, worker) == []
    finish(hand, worker, second)
    assert ids(hand, worker) == [third]


def test_a_predecessor_that_has_succeeded_is_no_wait(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    ids(hand, worker)
    finish(hand, worker, first)

    second = hand.submit(CPU, after=(first,))

    assert ids(hand, worker) == [second]


@pytest.mark.parametrize("verdict", ["failed", "timed_out", "cancelled"])
def test_a_failed_predecessor_takes_all_behind_it_along(hand: Hand, worker: Machine, verdict: str) -> None:
    first = hand.submit(CPU)
    second = hand.submit(CPU, after=(first,))
    third = hand.submit(CPU, after=(second,), client="c")
    ids(hand, worker)

    finish(hand, worker, first, verdict)

    for job in (second, third):
        assert (hand.state(job), hand.get(job, "end_reason")) == ("cancelled", "predecessor_failed")
    assert hand.link.call("XLEN", hand.key("done:c")) == 1
    late = hand.submit(CPU, after=(first,))
    assert hand.get(late, "end_reason") == "predecessor_failed"


def test_policy_ended_runs_whatever_became_of_the_predecessor(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    second = hand.submit(CPU, after=(first,), after_policy="ended")
    ids(hand, worker)

    finish(hand, worker, first, "failed")

    assert ids(hand, worker) == [second]


def test_an_unknown_predecessor_is_named_and_nothing_is_submitted(hand: Hand) -> None:
    answer = hand.run(fn.submit(Submission("j_b", CPU, b"", after=("j_none",))))

    assert (answer.outcome, answer.id) == ("missing", "j_none")
    assert hand.state("j_b") == ""


def test_what_a_commit_enqueues_after_an_unknown_job_ends_where_it_can_be_seen(
    hand: Hand, worker: Machine
) -> None:
    first = hand.submit(CPU)
    ids(hand, worker)

    outbox = [Submission("j_next", CPU, b"", after=("j_none",))]
    hand.commit(worker, worker.held[first], outbox=outbox)

    assert (hand.state("j_next"), hand.get("j_next", "end_reason")) == ("cancelled", "predecessor_failed")


def test_a_cancelled_dependent_leaves_its_predecessor_alone(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    second = hand.submit(CPU, after=(first,))

    assert hand.run(fn.cancel(second)) == ("cancelled", "")

    assert not hand.link.call("EXISTS", hand.key(f"after:{first}"))
    assert ids(hand, worker) == [first]


def test_a_thousand_dependents_are_released_a_batch_at_a_time(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    behind = [hand.submit(CPU, after=(first,)) for _ in range(1000)]
    ids(hand, worker)
    finish(hand, worker, first)
    ready = sum(hand.get(job, "phase") == "ready" for job in behind)
    assert 0 < ready <= 256

    wait_until(lambda: hand.tick().next_ms > 0, PATIENCE_S, "all are released")

    assert all(hand.get(job, "phase") == "ready" for job in behind)


def test_a_long_chain_ends_though_no_call_is_that_deep(hand: Hand, worker: Machine) -> None:
    first = last = hand.submit(CPU)
    for _ in range(100):
        last = hand.submit(CPU, after=(last,))
    ids(hand, worker)

    finish(hand, worker, first, "failed")
    wait_until(lambda: hand.tick().next_ms > 0, PATIENCE_S, "all are released")

    assert hand.state(last) == "cancelled"


def test_a_predecessor_that_is_named_twice_is_waited_for_once(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    second = hand.submit(CPU, after=(first, first))
    ids(hand, worker)

    finish(hand, worker, first)

    assert ids(hand, worker) == [second]


def test_what_comes_after_a_job_is_released_in_the_order_of_its_age(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    behind = [hand.submit(CPU, after=(first,), permit="db=1") for _ in range(8)]
    ids(hand, worker)
    finish(hand, worker, first)

    for job in behind:
        assert ids(hand, worker) == [job]
        finish(hand, worker, job)


def test_a_retry_does_not_release_what_comes_after(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    second = hand.submit(CPU, after=(first,))
    ids(hand, worker)

    hand.commit(worker, worker.held[first], "retry", delay_ms=0)
    hand.tick()

    assert ids(hand, worker) == [first]
    assert hand.get(second, "phase") == "blocked"


# Permits -----------------------------------------------------------------------------------------------------------


def test_no_more_run_under_a_key_than_its_limit_and_the_oldest_goes_next(hand: Hand, worker: Machine) -> None:
    jobs = [hand.submit(CPU, permit="db=2") for _ in range(4)]
    assert [hand.get(job, "phase") for job in jobs] == ["ready", "ready", "limited", "limited"]

    assert ids(hand, worker) == jobs[:2]
    finish(hand, worker, jobs[1])
    assert ids(hand, worker) == [jobs[2]]
    finish(hand, worker, jobs[0], "failed")
    assert ids(hand, worker) == [jobs[3]]
    for job in jobs[2:]:
        finish(hand, worker, job)
    assert not hand.link.call("EXISTS", hand.key("permits:db"), hand.key("key:db"))


def test_a_cancelled_waiter_gives_its_place_up_and_a_cancelled_holder_its_permit(
    hand: Hand, worker: Machine
) -> None:
    holder, waiter, last = (hand.submit(CPU, permit="db=1") for _ in range(3))

    hand.run(fn.cancel(waiter))
    hand.run(fn.cancel(holder))

    assert ids(hand, worker) == [last]


def test_a_lost_worker_keeps_its_jobs_permit_and_a_retry_with_a_delay_gives_it_up(
    hand: Hand, worker: Machine
) -> None:
    first, second = hand.submit(CPU, permit="db=1"), hand.submit(CPU, permit="db=1")
    ids(hand, worker)
    hand.run(fn.release(first, worker.held[first].token, "lost"))
    assert ids(hand, worker) == [first]

    hand.commit(worker, worker.held[first], "retry", delay_ms=60_000)

    assert ids(hand, worker) == [second]


def test_nobody_passes_a_waiter_by_naming_a_higher_limit(hand: Hand, worker: Machine) -> None:
    holder, waiter = hand.submit(CPU, permit="db=1"), hand.submit(CPU, permit="db=1")

    late = hand.submit(CPU, permit="db=2")

    assert ids(hand, worker) == [holder]
    finish(hand, worker, holder)
    assert ids(hand, worker) == [waiter, late]


def test_one_permit_that_comes_free_lets_all_in_whom_their_limits_allow(hand: Hand, worker: Machine) -> None:
    holder, narrow = hand.submit(CPU, permit="db=1"), hand.submit(CPU, permit="db=1")
    wide = [hand.submit(CPU, permit="db=3") for _ in range(3)]
    ids(hand, worker)

    hand.run(fn.cancel(narrow))

    assert ids(hand, worker) == wide[:2]
    finish(hand, worker, holder)
    assert ids(hand, worker) == wide[2:]


# Rates -------------------------------------------------------------------------------------------------------------


def test_no_more_are_admitted_in_a_window_than_the_rate_allows(hand: Hand, worker: Machine) -> None:
    jobs = [hand.submit(CPU, rate="api=2/60000") for _ in range(5)]

    assert ids(hand, worker) == jobs[:2]
    times = hand.link.call("ZRANGE", hand.key("delayed"), 0, -1, "WITHSCORES")
    assert {job.decode() for job in times[::2]} == set(jobs[2:])
    second, third, fourth = (int(at) for at in times[1::2])
    assert third - second < 1000
    assert 59_000 < fourth - third <= 60_000
    for job in jobs[2:]:
        hand.run(fn.cancel(job))
    for job in jobs[:2]:
        finish(hand, worker, job)


def test_an_end_moves_no_more_in_one_call_than_256_however_wide_and_deep_what_follows_is(
    hand: Hand, worker: Machine
) -> None:
    first = hand.submit(CPU)
    behind = [hand.submit(CPU, after=(first,)) for _ in range(30)]
    behind += [hand.submit(CPU, after=(job,)) for job in behind for _ in range(30)]
    ids(hand, worker)

    finish(hand, worker, first, "failed")
    ended = sum(hand.state(job) == "cancelled" for job in behind)
    assert 0 < ended <= 256
    assert check_of(hand) == []

    wait_until(lambda: hand.tick().next_ms > 0, PATIENCE_S, "all have ended")

    assert {hand.state(job) for job in behind} == {"cancelled"}


def test_permits_that_come_free_let_in_no_more_in_one_call_than_256(hand: Hand, worker: Machine) -> None:
    holder, blocker = hand.submit(CPU, permit="db=1"), hand.submit(CPU, permit="db=1")
    crowd = [hand.submit(CPU, permit="db=1000") for _ in range(400)]
    assert ids(hand, worker) == [holder]

    finish(hand, worker, holder)
    assert sum(hand.get(job, "phase") == "ready" for job in (blocker, *crowd)) <= 256
    assert check_of(hand) == []

    wait_until(lambda: hand.tick().next_ms > 0, PATIENCE_S, "all are let in")

    assert all(hand.get(job, "phase") == "ready" for job in (blocker, *crowd))


def test_a_job_leaves_only_when_those_behind_it_were_told_how_it_ended(hand: Hand, worker: Machine) -> None:
    first = hand.submit(CPU)
    behind = [hand.submit(CPU, after=(first,)) for _ in range(600)]
    ids(hand, worker)
    finish(hand, worker, first)

    def all_told() -> bool:
        return hand.run(fn.tick(older_than_ms=-1, results_older_than_ms=-1)).next_ms > 0

    wait_until(all_told, PATIENCE_S, "all are released")

    assert {hand.state(job) for job in behind} == {"queued"}
    assert hand.state(first) == ""


def test_a_job_that_has_run_has_used_its_admission_even_if_it_is_cancelled(
    hand: Hand, worker: Machine
) -> None:
    first = hand.submit(CPU, rate="api=1/60000")
    ids(hand, worker)
    hand.commit(worker, worker.held[first], "retry", delay_ms=60_000)

    hand.run(fn.cancel(first))

    late = hand.submit(CPU, rate="api=1/60000")
    assert hand.get(late, "phase") == "limited"
    hand.run(fn.cancel(late))


def test_admissions_are_remembered_for_a_window_after_the_last(hand: Hand) -> None:
    jobs = [hand.submit(CPU, rate="api=2/60000") for _ in range(5)]
    for job in jobs[2:4]:
        hand.run(fn.cancel(job))

    hand.submit(CPU, rate="api=2/60000", id="j_between")

    assert hand.link.call("PTTL", hand.key("rate:api")) > 150_000
    for job in (*jobs, "j_between"):
        hand.run(fn.cancel(job))


def test_admissions_of_windows_that_have_passed_are_forgotten_while_the_key_is_in_use(
    link: Link, hand: Hand, worker: Machine
) -> None:
    with virtual_library(link) as clock:
        for _ in range(40):
            hand.submit(CPU, rate="api=9/1000")
            (grant,) = hand.claim(worker, 1)
            hand.commit(worker, grant)
            clock.advance(500)

        assert hand.link.call("ZCARD", hand.key("rate:api")) <= 3
        link.call("DEL", hand.key("rate:api"), hand.key("window:api"))


def test_jobs_of_one_key_may_name_different_windows(link: Link, hand: Hand) -> None:
    with virtual_library(link) as clock:
        jobs = [hand.submit(CPU, rate="api=1/60000")]
        clock.advance(1000)
        jobs.append(hand.submit(CPU, rate="api=9/10"))
        clock.advance(1000)
        jobs.append(hand.submit(CPU, rate="api=2/60000"))
        phases = [hand.get(job, "phase") for job in jobs]
        for job in jobs:
            hand.run(fn.cancel(job))
        link.call("DEL", hand.key("window:api"))

    assert phases == ["ready", "ready", "limited"]


def test_a_rated_job_runs_when_its_time_has_come(hand: Hand, worker: Machine) -> None:
    first, second = hand.submit(CPU, rate="api=1/50"), hand.submit(CPU, rate="api=1/50")
    assert ids(hand, worker) == [first]

    def promoted() -> list[str]:
        hand.tick()
        return ids(hand, worker)

    assert wait_until(promoted, PATIENCE_S, "the second is admitted") == [second]


@pytest.mark.parametrize(
    "wrong",
    [{"permit": "db"}, {"permit": "db=0"}, {"rate": "api=1"}, {"rate": "a b=1/1"}, {"after_policy": "never"}],
)
def test_gates_that_make_no_sense_are_refused(hand: Hand, wrong: dict[str, str]) -> None:
    after = {"after": (hand.submit(CPU),)} if "after_policy" in wrong else {}

    with pytest.raises(ReplyError):
        hand.run(fn.submit(Submission("j_x", CPU, b"", **wrong, **after)))  # type: ignore[arg-type]
