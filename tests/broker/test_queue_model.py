"""Random histories of every function on a real server, beside a plain model that predicts each of them.

After each step the whole namespace is read: states, grants, order, ledgers, leases, counters, heads, streams, events
and notices equal the model's. GPULAYER_EXAMPLES sets the number of histories (250 if unset).
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from dataclasses import replace
from typing import cast

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Committed, Grant
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import DeviceLot, Ending, Offer, Running, Submission
from gpulayer_broker.job import FAILED, MESSAGE, RUNNING
from tests import snapshot
from tests.broker.model import Job, Model
from tests.broker.model_earmarks import EarmarkModel, Kept
from tests.checker import lots_of, violations
from tests.queueing import HEARTBEAT_MS, LEASE_MS, NO_RETENTION, Hand, Machine, signature
from tests.snapshot import Snapshot
from tests.virtual import Clock, virtual_library

EXAMPLES = int(os.environ.get("GPULAYER_EXAMPLES", "250"))
STEPS = 40
# Whoever only wants to know whether it fails, as the mutants do, spares the search for the smallest history.
PHASES = [Phase.generate] if os.environ.get("GPULAYER_NO_SHRINK") else [Phase.generate, Phase.shrink]

SMALL, WIDE = signature(), signature(cpus=2, memory=3000, tag="wide")
GPU, PAIR = signature(gpus=1, vram=4000, tag="gpu"), signature(gpus=2, vram=6000, tag="pair")
ANY = signature(gpus=1, vram=1000, letter="a", tag="any")
SIGNATURES = (SMALL, WIDE, GPU, PAIR, ANY)
FITS: dict[str, dict[str, tuple[int, ...]]] = {
    "k1": {SMALL: (), GPU: (0, 1), ANY: (0,), PAIR: (0,)},
    "k2": {SMALL: (), WIDE: (), GPU: (0,)},
    "k3": {SMALL: (), WIDE: (), ANY: (1,), GPU: (1,)},
}
SHARED = (DeviceLot("G1", 0, 0, 9000), DeviceLot("G1", 1, 0, 9000), DeviceLot("G2", 0, 0, 9000))
MACHINES = (
    Machine("w1", "i0", "k1", "n1", slots=3, node_cpus=4, memory_mib=4000, lots=SHARED),
    Machine("w2", "i0", "k2", "n1", slots=2, node_cpus=4, memory_mib=4000, lots=SHARED),
    Machine(
        "w3", "i0", "k3", "n2", slots=4, node_cpus=4, memory_mib=8000, lots=(DeviceLot("G3", 0, 1, 5000),)
    ),
)
PICK = st.integers(0, 1000)
WORKER = st.sampled_from([m.id for m in MACHINES])
OUTCOMES = st.sampled_from(["succeeded", "failed", "timed_out", "cancelled", "retry"])


class QueueMachine(RuleBasedStateMachine):
    """One namespace, three workers, and the model of both."""

    model: Model
    earmark_ms = 0

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.hand = Hand(link, f"gpulayer:{{m{secrets.token_hex(6)}}}:")
        self.machines = {m.id: replace(m) for m in MACHINES}
        self.model = Model(FITS)
        self.tokens: list[tuple[str, str]] = []
        self.offers: dict[str, Offer] = {}
        self.seen_events = 0

    @initialize(waiting=st.lists(st.sampled_from(SIGNATURES), min_size=1, max_size=5))
    def set_up(self, waiting: list[str]) -> None:
        """Everybody has registered, and there is something to do."""
        self._register_all()
        for n, sig in enumerate(waiting):
            job = self._submission(n, sig)
            assert self.hand.run(fn.submit(job)).outcome == self.model.submit(job)[0]

    def _register_all(self) -> None:
        self.hand.link.call("HSET", self.hand.key("config"), "earmark_ms", self.earmark_ms)
        for sig in SIGNATURES:
            self.hand.introduce(sig, {})
        for machine in self.machines.values():
            self.hand.register(machine, FITS[machine.class_id])
            self.model.register(replace(machine))

    def teardown(self) -> None:
        keys = self.hand.link.call("KEYS", self.hand.key("*"))
        if keys:
            self.hand.link.call("UNLINK", *keys)

    # What clients do ------------------------------------------------------------------------------------------------

    def _submission(
        self, pick: int, sig: str, prepare: bool = False, delay_ms: int = 0, client: str = ""
    ) -> Submission:
        return Submission(
            f"j{self.model.seq}",
            sig,
            b"spec",
            owner=("ann", "ann", "ann", "bob")[pick % 4],
            priority=(2, 2, 2, 1)[pick // 4 % 4],
            queue=("gpulayer", "other")[pick // 16 % 2],
            on_outage=("", "", "keep")[pick // 32 % 3],
            client=client,
            delay_ms=delay_ms,
            prepare=prepare,
        )

    @rule(
        pick=PICK,
        sig=st.sampled_from(SIGNATURES),
        prepare=st.booleans(),
        delay_ms=st.sampled_from([0, 0, 0, 1, 20_000]),
        client=st.sampled_from(["", "c1"]),
        key=st.sampled_from(["", "", "", "k1", "k2"]),
        digest=st.sampled_from(["d1", "d1", "d2"]),
    )
    def submit(
        self, pick: int, sig: str, prepare: bool, delay_ms: int, client: str, key: str, digest: str
    ) -> None:
        job = replace(
            self._submission(pick, sig, prepare, delay_ms, client),
            idempotency_key=key,
            digest=digest if key else "",
        )
        answer = self.hand.run(fn.submit(job))
        assert (answer.outcome, answer.id or job.id) == self.model.submit(job)

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        job = self._any_job(pick).s.id
        assert self.hand.run(fn.cancel(job))[0] == self.model.cancel(job)

    # What workers do ------------------------------------------------------------------------------------------------

    @rule(worker=WORKER, most=st.integers(1, 4))
    def claim(self, worker: str, most: int) -> None:
        self._claim(self.machines[worker].offer(most))

    def _claim(self, offer: Offer) -> None:
        self.offers[offer.worker] = offer
        answer = self.hand.run(fn.claim(offer))
        expected = self.model.claim(offer)
        assert answer.known == (expected is not None)
        self._granted(answer.grants, expected or [])

    def _granted(
        self, grants: tuple[Grant, ...], expected: list[tuple[str, str, tuple[tuple[str, int], ...]]]
    ) -> None:
        assert [(g.id, g.token, g.lots) for g in grants] == expected
        for g in grants:
            j = self.model.attempts()[g.id]
            assert (g.attempt, g.losses, g.state, g.cancelled) == (j.attempt, j.losses, j.state, j.cancel)
            self.tokens.append((g.id, g.token))

    @precondition(lambda self: self.model.running())
    @rule(
        pick=PICK,
        verdict=OUTCOMES,
        delay_ms=st.sampled_from([0, 5000]),
        outbox=st.integers(0, 2),
        most=st.integers(0, 3),
    )
    def commit(self, pick: int, verdict: str, delay_ms: int, outbox: int, most: int) -> None:
        j = self._running(pick)
        self._commit(
            j.s.id, j.token, verdict, delay_ms, outbox, self.machines[j.worker].offer(most) if most else None
        )

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, verdict=OUTCOMES, outbox=st.integers(0, 1))
    def commit_with_any_token_there_was(self, pick: int, verdict: str, outbox: int) -> None:
        job, token = self.tokens[pick % len(self.tokens)]
        self._commit(job, token, verdict, 0, outbox, None)

    def _commit(
        self, job: str, token: str, verdict: str, delay_ms: int, outbox: int, next_claim: Offer | None
    ) -> None:
        blocks = [replace(self._submission(n * 7, SMALL), id=f"j{self.model.seq}-{n}") for n in range(outbox)]
        ending = Ending(job, token, verdict, "user_error", delay_ms, {"result": b"r"}, blocks)
        answer = self.hand.run(fn.commit(ending, next_claim))
        assert answer.verdict == self.model.commit(job, token, verdict, delay_ms, blocks)
        self._claimed_next(answer, next_claim)

    def _claimed_next(self, answer: Committed, next_claim: Offer | None) -> None:
        if next_claim:
            self.offers[next_claim.worker] = next_claim
            expected = self.model.claim(next_claim)
            assert answer.claimed.known == (expected is not None)
            self._granted(answer.claimed.grants, expected or [])

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, how=st.sampled_from(["returned", "lost", "unfit"]), current=st.booleans())
    def release(self, pick: int, how: str, current: bool) -> None:
        job, token = self._token(pick, current)
        assert self.hand.run(fn.release(job, token, how)) == self.model.release(job, token, how)

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, current=st.booleans())
    def log(self, pick: int, current: bool) -> None:
        job, token = self._token(pick, current)
        length = self.hand.link.call("XLEN", self.hand.key(f"log:{job}:{token.partition(':')[0]}:0"))
        expected = self.model.log(job, token)
        assert self.hand.run(fn.log(job, token, 0, "out", length, b"x")) == expected

    @rule(
        worker=WORKER,
        left_out=st.integers(0, 7),
        started=st.booleans(),
        pick=PICK,
        after_ms=st.sampled_from([0, 5000, HEARTBEAT_MS + 1]),
    )
    def renew(self, worker: str, left_out: int, started: bool, pick: int, after_ms: int) -> None:
        self.clock.advance(after_ms)
        self.model.now_ms = self.clock.now_ms
        mine = self.model.running(worker)
        listed = {j.s.id: (j.token, started) for n, j in enumerate(mine) if not left_out >> n & 1}
        if self.tokens:
            job, token = self.tokens[pick % len(self.tokens)]
            listed.setdefault(job, (token, started))
        attempts = [Running(job, token, run) for job, (token, run) in listed.items()]
        incarnation = self.machines[worker].incarnation
        answer = self.hand.run(fn.renew(worker, incarnation, LEASE_MS, attempts))
        stale, cancelled = self.model.renew(worker, listed)
        assert (list(answer.stale), list(answer.cancelled)) == (stale, cancelled)
        assert answer.state == self.model.workers[worker].state

    @rule(worker=WORKER, new=st.booleans())
    def register(self, worker: str, new: bool) -> None:
        machine = self.machines[worker]
        if new:
            machine.incarnation = f"i{int(machine.incarnation[1:]) + 1}"
        self.hand.register(machine)
        self.model.register(replace(machine))

    # What time does -------------------------------------------------------------------------------------------------

    @rule(by_ms=st.sampled_from([1, 600, 5000, HEARTBEAT_MS + 1, 20_000, LEASE_MS // 2, LEASE_MS * 2]))
    def time_passes(self, by_ms: int) -> None:
        self.clock.advance(by_ms)

    @rule(steps=st.integers(1, 6))
    def tick(self, steps: int) -> None:
        """Ticks a third of a lease apart: leases run out only while somebody looks."""
        for step in range(steps):
            self.clock.advance(LEASE_MS // 3 if step else 0)
            self.model.now_ms = self.clock.now_ms
            ticked = self.hand.run(fn.tick())
            assert ticked.reaped == self.model.tick()[1]
            self._ticked()

    def _ticked(self) -> None:
        """Looks at what a tick may decide as it likes."""

    # What holds -----------------------------------------------------------------------------------------------------

    @invariant()
    def server_and_model_agree(self) -> None:
        self.model.now_ms = self.clock.now_ms
        self._forget_what_has_left()
        seen = snapshot.read(self.hand.link, self.hand.root)
        assert violations(seen) == []
        assert {job: _record(seen, job) for job in seen.jobs} == {
            id_: _expected(j) for id_, j in self.model.jobs.items()
        }
        leases = {j.s.id: float(j.lease_ms) for j in self.model.running()}
        assert seen.zsets.get("leases", {}) == leases
        delayed = {j.s.id: float(j.due_ms) for j in self.model.jobs.values() if j.due_ms is not None}
        assert seen.zsets.get("delayed", {}) == delayed
        self._events_agree(seen)
        self._notices_agree(seen)
        for worker in self.machines:
            self.model.adopt_deaths(worker, seen.sets.get(f"deaths:{worker}", set()))
            until = int(seen.hashes.get(f"worker:{worker}", {}).get("quarantined_until", 0))
            if worker in self.model.workers:
                assert until == self.model.workers[worker].quarantined_until_ms

    def _forget_what_has_left(self) -> None:
        """A name that comes again is another job: notices of the former one are read, as by a client, and gone."""
        left = set(self.model.purged)
        for client in ("c1", "c2") if left else ():
            key = self.hand.key(f"done:{client}")
            for entry, told in self.hand.link.call("XRANGE", key, "-", "+"):
                if dict(zip(told[::2], told[1::2], strict=True))[b"job"].decode() in left:
                    self.hand.link.call("XDEL", key, entry)
        self.model.told = [notice for notice in self.model.told if notice[1] not in left]
        self.model.purged.clear()

    def _events_agree(self, seen: Snapshot) -> None:
        """One event a transition, no more and no fewer, since the last step."""
        stream = seen.streams.get("events")
        events = [(e["job"], e["state"]) for e in stream.entries.values()] if stream else []
        new = events[self.seen_events :]
        self.seen_events = len(events)
        assert Counter(new) == Counter(self.model.events)
        self.model.events.clear()

    def _notices_agree(self, seen: Snapshot) -> None:
        told = [
            (name, e["job"], e["state"])
            for name, stream in snapshot.under(seen.streams, "done:")
            for e in stream.entries.values()
        ]
        assert Counter(told) == Counter(self.model.told)

    # Choosing -------------------------------------------------------------------------------------------------------

    def _any_job(self, pick: int) -> Job:
        return list(self.model.jobs.values())[pick % len(self.model.jobs)]

    def _running(self, pick: int) -> Job:
        alive = self.model.running()
        return alive[pick % len(alive)]

    def _token(self, pick: int, current: bool) -> tuple[str, str]:
        """A token that is, or any that there was."""
        if current and self.model.running():
            j = self._running(pick)
            return j.s.id, j.token
        return self.tokens[pick % len(self.tokens)]


class WholeMachine(QueueMachine):
    """With machines that are kept for a job, and with what changes little, and must change nothing else."""

    earmark_ms = 1000
    made = 0

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(link, clock)
        self.earmarks = self.model = EarmarkModel(FITS)

    def teardown(self) -> None:
        WholeMachine.made += self.earmarks.made
        super().teardown()

    def _ticked(self) -> None:
        self.earmarks.adopt(self._kept(), self.earmark_ms)

    def _kept(self) -> dict[str, Kept]:
        found = {}
        for node in {machine.node for machine in self.machines.values()}:
            if text := self.hand.link.call("HGET", self.hand.key(f"held:{node}"), "earmark"):
                _, job, _, _, _, worker, _, devices = text.decode().split(" ")
                found[node] = Kept(job, worker, tuple(filter(None, devices.split(","))))
        return found

    @rule(worker=WORKER, pick=PICK, sig=st.sampled_from([WIDE, PAIR]))
    def a_large_job_comes_late(self, worker: str, pick: int, sig: str) -> None:
        for _ in range(4):
            self.submit(pick, SMALL, False, 0, "", "", "")
        self.claim(worker, 4)
        self.submit(pick, sig, False, 0, "", "", "")

    @rule(looks=st.integers(1, 3))
    def a_quiet_while(self, looks: int) -> None:
        """Every heart beats, and somebody looks."""
        for _ in range(looks):
            self.time_passes(2 * self.earmark_ms)
            self.model.now_ms = self.clock.now_ms
            for worker in self.machines:
                self.renew(worker, 0, True, 0, 0)
            self.tick(1)

    @invariant()
    def server_and_model_keep_the_same(self) -> None:
        assert self._kept() == self.earmarks.kept

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK)
    def submit_again(self, pick: int) -> None:
        job = self._any_job(pick).s
        answer = self.hand.run(fn.submit(job))
        assert (answer.outcome, answer.id or job.id) == self.model.submit(job)

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK, variant=st.integers(0, 2))
    def send_a_message_anew(self, pick: int, variant: int) -> None:
        known = self._any_job(pick).s
        anew = replace(known, kind=MESSAGE, spec=b"spec%d" % variant, idempotency_key="", digest="")
        answer = self.hand.run(fn.submit(anew))
        assert (answer.outcome, answer.id or anew.id) == self.model.submit(anew)

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK, dead=st.booleans())
    def requeue(self, pick: int, dead: bool) -> None:
        letters = [j for j in self.model.jobs.values() if j.state == FAILED]
        j = letters[pick % len(letters)] if dead and letters else self._any_job(pick)
        anew = replace(j.s, spec=b"requeued at %d" % self.model.seq, idempotency_key="", digest="")
        assert self.hand.run(fn.requeue(anew)).outcome == self.model.requeue(anew)

    @rule(age_ms=st.sampled_from([0, 600, 20_000]))
    def purge(self, age_ms: int) -> None:
        ticked = self.hand.run(fn.tick(older_than_ms=age_ms, results_older_than_ms=NO_RETENTION))
        before = len(self.model.jobs)
        reaped = self.model.tick()[1]
        self._ticked()
        self.model.purge(self.model.now_ms - age_ms)
        assert (ticked.reaped, ticked.purged) == (reaped, before - len(self.model.jobs))

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK)
    def interrupt(self, pick: int) -> None:
        j = self._any_job(pick)
        expected = ("asked", "") if j.state == RUNNING else ("not_running", j.state)
        assert self.hand.run(fn.interrupt(j.s.id)) == expected

    @precondition(lambda self: self.model.jobs)
    @rule(pick=PICK, client=st.sampled_from(["c1", "c2"]))
    def watch(self, pick: int, client: str) -> None:
        job = self._any_job(pick).s.id
        assert self.hand.run(fn.watch(client, [job])) == self.model.watch(client, job)

    @rule(worker=WORKER)
    def claim_with_the_same_nonce(self, worker: str) -> None:
        if worker in self.offers:
            self._claim(self.offers[worker])

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, current=st.booleans())
    def checkpoint(self, pick: int, current: bool) -> None:
        job, token = self._token(pick, current)
        expected = "ok" if self.model.holds(job, token) else "stale"
        assert self.hand.run(fn.checkpoint(job, token, "digest")) == expected

    @rule(worker=WORKER, state=st.sampled_from(["online", "online", "draining", "offline"]))
    def drain(self, worker: str, state: str) -> None:
        assert self.hand.run(fn.drain(worker, state)) == "ok"
        self.model.drain(worker, state)

    @rule(worker=WORKER)
    def claim_as_a_former_incarnation(self, worker: str) -> None:
        former = replace(self.machines[worker], incarnation="i-former")
        assert not self.hand.run(fn.claim(former.offer())).known
        assert not self.hand.run(fn.renew(worker, "i-former", LEASE_MS, [])).known


def _record(seen: Snapshot, job_id: str) -> dict[str, object]:
    """What the model knows of a job, from its record."""
    j = seen.job(job_id)
    running = j["state"] in ("scheduled", "running") and "count" not in j
    return {
        "state": j["state"],
        "phase": j.get("phase", ""),
        "seq": int(j["seq"]),
        "entry": int(j["entry"].split("-")[0])
        if j.get("entry") and j["state"] in ("queued", "scheduled", "running")
        else None,
        "attempt": int(j["attempt"]),
        "losses": int(j.get("losses", 0)),
        "token": j.get("token", ""),
        "cancel": bool(j.get("cancel")),
        "worker": j["worker"] if running else "",
        "lots": tuple((uuid, int(share)) for uuid, share in lots_of(j)) if running else (),
        "ride": j.get("ride", ""),
    }


def _expected(j: Job) -> dict[str, object]:
    return {
        "state": j.state,
        "phase": j.phase,
        "seq": j.seq,
        "entry": j.entry,
        "attempt": j.attempt,
        "losses": j.losses,
        "token": j.token,
        "cancel": j.cancel,
        "worker": j.worker if j.runs else "",
        "lots": j.lots if j.runs else (),
        "ride": j.ride,
    }


def run_histories(link: Link, machine: type[QueueMachine], patches: dict[str, str] | None = None) -> None:
    with virtual_library(link, patches) as clock:
        clock.draw_in_order()
        run_state_machine_as_test(
            cast(type[RuleBasedStateMachine], lambda: machine(link, clock)),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                phases=PHASES,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )


def test_every_history_goes_as_the_model_says(link: Link) -> None:
    WholeMachine.made = 0
    run_histories(link, WholeMachine)
    print(f"machines were kept for a job {WholeMachine.made} times")
    assert WholeMachine.made > EXAMPLES // 10
