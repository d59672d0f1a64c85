"""Random histories of arrays, gates and barriers among plain jobs, beside the model of them.

On top of what `test_queue_model.py` compares after each step: where each item of each array is, who holds and who
waits for which permit, admissions of each rate, and the children of each group.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, invariant, precondition, rule

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link, ReplyError
from gpulayer_broker.functions import Ending, ItemsEnding, Offer, Submission
from tests import snapshot
from tests.broker.model_arrays import ArrayModel
from tests.broker.test_queue_model import (
    FITS,
    GPU,
    OUTCOMES,
    PICK,
    SMALL,
    QueueMachine,
    run_histories,
)
from tests.snapshot import Snapshot, under
from tests.virtual import Clock

PERMITS = ("", "", "k=1", "k=1", "k=2", "l=1")
RATES = ("", "", "", "r=1/20000", "q=2/5000")
COUNTS = (0, 0, 0, 1, 3, 200)
GROUPS = ("g1", "g2")
# How long an item takes: ranges of one, of a few, of more than an array takes in one turn.
EACH_US = (30_000, 8_000, 300)


def _wanted(
    sig: str, owner: str, count: int, prepare: bool, permit: str, rate: str, policy: str, client: str
) -> Submission:
    return Submission(
        "",
        sig,
        b"spec",
        owner=owner,
        client=client,
        prepare=prepare and not count,
        on_outage="keep" if rate and prepare else "",
        count=count,
        permit=permit,
        rate=rate,
        after_policy=policy,
    )


WANTED = st.builds(
    _wanted,
    st.sampled_from((SMALL, SMALL, SMALL, GPU)),
    st.sampled_from(("ann", "ann", "bob")),
    st.sampled_from(COUNTS),
    st.booleans(),
    st.sampled_from(PERMITS),
    st.sampled_from(RATES),
    st.sampled_from(("succeeded", "succeeded", "ended")),
    st.sampled_from(("", "c1")),
)


class GatedMachine(QueueMachine):
    """Arrays, gates and barriers in the same world."""

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(link, clock)
        self.arrays = self.model = ArrayModel(FITS)

    # What clients do ------------------------------------------------------------------------------------------------

    @initialize(waiting=st.lists(WANTED, min_size=2, max_size=6))
    def set_up(self, waiting: list[Submission]) -> None:
        super().set_up([])
        self.model.now_ms = self.clock.now_ms
        for wanted in waiting:
            self.submit(wanted, [], 0)

    @rule(wanted=WANTED, after=st.lists(PICK, max_size=2), delay_ms=st.sampled_from([0, 0, 0, 1000]))
    def submit(self, wanted: Submission, after: list[int], delay_ms: int) -> None:
        before = tuple(self._any_job(n).s.id for n in after) if self.model.jobs else ()
        job = replace(wanted, id=f"j{len(self.model.jobs)}", after=before, delay_ms=delay_ms)
        answer = self.hand.run(fn.submit(job))
        assert (answer.outcome, answer.id or job.id) == self.model.submit(job)

    @rule(name=st.sampled_from(GROUPS), children=st.integers(1, 3), life_ms=st.sampled_from([3000, 10**6]))
    def barrier(self, name: str, children: int, life_ms: int) -> None:
        self.model.now_ms = self.clock.now_ms
        answer = self.hand.run(fn.barrier(name, children, life_ms))
        assert answer == self.arrays.barrier(name, children, life_ms)

    # What workers do ------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(c.runs for c in self.arrays.chunks.values()))
    @rule(
        pick=PICK,
        part=st.sampled_from([0, 1, 2, 2, 2]),
        failed=st.integers(0, 3),
        each_us=st.sampled_from(EACH_US),
        most=st.integers(0, 3),
    )
    def commit_items(self, pick: int, part: int, failed: int, each_us: int, most: int) -> None:
        """Nothing of the range, half of it, or all."""
        out = [c for c in self.arrays.chunks.values() if c.runs]
        c = out[pick % len(out)]
        upto = c.start + (c.stop - c.start) * part // 2
        bad = max(0, failed - 2) if upto > c.start else 0
        self._items(c.s.id, c.token, upto, bad, each_us * (upto - c.start), most, c.worker)

    @precondition(lambda self: self.arrays.chunks)
    @rule(pick=PICK)
    def commit_items_again(self, pick: int) -> None:
        chunks = list(self.arrays.chunks.values())
        c = chunks[pick % len(chunks)]
        tokens = [token for job, token in self.tokens if job == c.s.id]
        self._items(c.s.id, tokens[0], c.stop, 0, 1000, 0, c.worker)

    def _items(
        self, chunk: str, token: str, upto: int, failed: int, took_us: int, most: int, worker: str
    ) -> None:
        start = self.arrays.chunks[chunk].start
        ending = ItemsEnding(chunk, token, upto, failed, took_us, f"{start}-{upto}".encode())
        offer = self.machines[worker].offer(most) if most else None
        answer = self.hand.run(fn.commit_items(ending, offer))
        assert answer.verdict == self.arrays.commit_items(
            chunk, token, upto, failed, took_us, f"{start}-{upto}"
        )
        self._claimed_next(answer, offer)

    @precondition(lambda self: self.model.running())
    @rule(pick=PICK, group=st.sampled_from(GROUPS), verdict=OUTCOMES, callbacks=st.integers(0, 2))
    def commit_a_child(self, pick: int, group: str, verdict: str, callbacks: int) -> None:
        """One block goes in whatever happens, the callbacks with the last child."""
        j = self._running(pick)
        self._commit_child(j.s.id, j.token, group, verdict, callbacks)

    @precondition(lambda self: self.tokens)
    @rule(pick=PICK, group=st.sampled_from(GROUPS))
    def commit_a_child_again(self, pick: int, group: str) -> None:
        job, token = self.tokens[pick % len(self.tokens)]
        self._commit_child(job, token, group, "succeeded", 1)

    def _commit_child(self, job: str, token: str, group: str, verdict: str, callbacks: int) -> None:
        if job in self.arrays.chunks:
            return
        first = f"j{len(self.model.jobs)}"
        blocks = [replace(self._submission(0, SMALL), id=f"{first}-{n}") for n in range(callbacks + 1)]
        ending = Ending(job, token, verdict, "user_error", 0, {"barrier": f"{group} {callbacks}"}, blocks)
        answer = self.hand.run(fn.commit(ending))
        expected = self.arrays.commit(job, token, verdict, 0, blocks, (group, callbacks))
        assert answer.verdict == expected

    def _commit(
        self, job: str, token: str, verdict: str, delay_ms: int, outbox: int, next_claim: Offer | None
    ) -> None:
        """A range has its items to report: it cannot succeed without them."""
        if verdict == "succeeded" and job in self.arrays.chunks and job in self.model.attempts():
            with pytest.raises(ReplyError, match="items"):
                self.hand.run(fn.commit(Ending(job, token, verdict)))
            return
        super()._commit(job, token, verdict, delay_ms, outbox, next_claim)

    @precondition(lambda self: self.arrays.chunks)
    @rule(pick=PICK)
    def ask_for_a_range_as_if_it_were_a_job(self, pick: int) -> None:
        chunk = list(self.arrays.chunks)[pick % len(self.arrays.chunks)]
        assert self.hand.run(fn.cancel(chunk))[0] == self.model.cancel(chunk) == "missing"
        assert self.hand.run(fn.watch("c1", [chunk])) == self.model.watch("c1", chunk)

    # What holds -----------------------------------------------------------------------------------------------------

    @invariant()
    def items_permits_and_groups_agree(self) -> None:
        seen = snapshot.read(self.hand.link, self.hand.root)
        self._items_agree(seen)
        self._gates_agree(seen)
        self.arrays._give_up()
        groups = {
            name: {n.removeprefix("done:") for n in facts if n != "children"}
            for name, facts in under(seen.hashes, "barrier:")
            if name in self.arrays.barriers
        }
        assert groups == {name: b.done for name, b in self.arrays.barriers.items()}

    def _items_agree(self, seen: Snapshot) -> None:
        out = {c.s.id: c for c in self.arrays.chunks.values() if c.runs}
        assert {id_: _chunk_record(c) for id_, c in seen.chunks.items()} == {
            id_: (c.parent, c.start, c.stop, c.losses, c.token, c.worker, c.cancel) for id_, c in out.items()
        }
        for array, items in self.arrays.items.items():
            facts = seen.hashes[f"array:{array}"]
            back = [tuple(map(int, r.split())) for r in seen.lists.get(f"ranges:{array}", [])]
            assert (back, int(facts["cursor"])) == (items.back, items.cursor)
            counted = [int(facts.get(name, 0)) for name in ("done", "failed", "since")]
            assert counted == [items.done, items.failed, items.since]
            pages = seen.hashes.get(f"pages:{array}", {})
            assert {int(n): p.split(" ")[0] for n, p in pages.items()} == {
                n: page for n, (_, page) in items.pages.items()
            }

    def _gates_agree(self, seen: Snapshot) -> None:
        holders = {name: jobs for name, jobs in self.arrays.permits.items() if jobs}
        waiters = {name: jobs for name, jobs in self.arrays.waiting.items() if jobs}
        assert dict(under(seen.sets, "permits:")) == holders
        assert {name: set(jobs) for name, jobs in under(seen.zsets, "key:")} == waiters


def _chunk_record(c: dict[str, str]) -> tuple[object, ...]:
    return (
        c["parent"],
        int(c["from"]),
        int(c["to"]),
        int(c["losses"]),
        c["token"],
        c["worker"],
        bool(c.get("cancel")),
    )


def test_every_history_of_arrays_gates_and_groups_goes_as_the_model_says(link: Link) -> None:
    run_histories(link, GatedMachine)
