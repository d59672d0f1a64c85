"""The model's gates and barriers: predecessors, rates, permits; callbacks of a group that wait for all its children.

Said plainly: a job waits for all that it comes after; of one key no more hold a permit than its limit, and who came
first gets the next; of one rate no window has more admissions than its limit, counted over all that ever ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpulayer_broker.functions import Submission
from gpulayer_broker.job import ACTIVE, CANCELLED, QUEUED, SUCCEEDED
from tests.broker.model import Job, Model


@dataclass
class Barrier:
    """So many children, those that have succeeded, and when it is given up."""

    children: int
    ends_ms: int
    done: set[str] = field(default_factory=set)


class GatedModel(Model):
    """The queue with what stands before its streams."""

    def __init__(self, fits: dict[str, dict[str, tuple[int, ...]]]) -> None:
        super().__init__(fits)
        self.open: dict[str, set[str]] = {}
        self.permits: dict[str, set[str]] = {}
        self.waiting: dict[str, set[str]] = {}
        self.rates: dict[str, dict[str, int]] = {}
        self.rated: set[str] = set()
        self.barriers: dict[str, Barrier] = {}

    # Functions ------------------------------------------------------------------------------------------------------

    def submit(self, s: Submission) -> tuple[str, str]:
        known = s.id in self.jobs or (s.owner, s.idempotency_key) in self.idem
        unknown = [p for p in s.after if p not in self.jobs]
        if unknown and not known:
            return "missing", unknown[0]
        if not known:
            self._set_gates(s)
        return super().submit(s)

    def barrier(self, name: str, children: int, life_ms: int) -> str:
        self._give_up()
        if name in self.barriers:
            return "existing"
        self.barriers[name] = Barrier(children, self.now_ms + life_ms)
        return "ok"

    def called_back(self, name: str, job_id: str, verdict: str) -> bool:
        """Whether this end of a child is the one that lets the group's callbacks in."""
        self._give_up()
        group = self.barriers.get(name)
        if group is None or verdict != SUCCEEDED:
            return False
        group.done.add(job_id)
        if len(group.done) < group.children:
            return False
        del self.barriers[name]
        return True

    def commit(
        self,
        job_id: str,
        token: str,
        verdict: str,
        delay_ms: int,
        outbox: Iterable[Submission],
        barrier: tuple[str, int] = ("", 0),
    ) -> str:
        held = self.holds(job_id, token)
        answer = super().commit(job_id, token, verdict, delay_ms, ())
        if held:
            blocks, (name, callbacks) = list(outbox), barrier
            if name and not self.called_back(name, job_id, verdict):
                blocks = blocks[: len(blocks) - callbacks]
            for s in blocks:
                self.submit(s)
        return answer

    # Parts ----------------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        self.barriers = {name: b for name, b in self.barriers.items() if b.ends_ms > self.now_ms}

    def _set_gates(self, s: Submission) -> None:
        self.open[s.id] = {p for p in s.after if self.jobs[p].state in ACTIVE}

    def _failed_before(self, s: Submission) -> bool:
        ended = [self.jobs[p].state for p in s.after if self.jobs[p].state not in ACTIVE]
        return s.after_policy != "ended" and any(state != SUCCEEDED for state in ended)

    def _begin(self, j: Job) -> None:
        if self._failed_before(j.s):
            self._finish(j, CANCELLED)
        else:
            super()._begin(j)

    def _enter(self, j: Job) -> None:
        if self.open.get(j.s.id):
            j.phase = "blocked"
        elif j.s.rate and j.s.id not in self.rated and (at := self._reserve(j)) > self.now_ms:
            j.phase, j.due_ms = "limited", at
        elif j.s.permit and not self._permitted(j):
            j.phase = "limited"
        else:
            self._ready(j)

    def _reserve(self, j: Job) -> int:
        """The first time at which no window that ends with it holds more than the limit."""
        name, _, rate = j.s.rate.partition("=")
        limit, window_ms = (int(n) for n in rate.split("/"))
        times = self.rates.setdefault(name, {})
        before = sorted(times.values())[-limit:]
        at = max(self.now_ms, before[0] + window_ms) if len(before) == limit else self.now_ms
        times[j.s.id] = at
        self.rated.add(j.s.id)
        return at

    def _permitted(self, j: Job) -> bool:
        """Whether it has a permit, or gets one: not before those who have waited longer."""
        name, _, limit = j.s.permit.partition("=")
        holders, waiters = self.permits.setdefault(name, set()), self.waiting.setdefault(name, set())
        first = min([self.jobs[w].seq for w in waiters], default=j.seq) >= j.seq
        if j.s.id in holders or (first and len(holders) < int(limit)):
            holders.add(j.s.id)
            waiters.discard(j.s.id)
            return True
        waiters.add(j.s.id)
        return False

    def _give_permit_up(self, j: Job) -> None:
        """It goes to those who have waited longest."""
        name = j.s.permit.partition("=")[0]
        holders, waiters = self.permits.get(name, set()), self.waiting.get(name, set())
        waiters.discard(j.s.id)
        holders.discard(j.s.id)
        while waiters:
            nearest = min((self.jobs[w] for w in waiters), key=lambda w: w.seq)
            self._enter(nearest)
            if nearest.s.id in waiters:
                return

    def _later(self, j: Job, delay_ms: int) -> None:
        super()._later(j, delay_ms)
        self._give_permit_up(j)

    def _finish(self, j: Job, state: str) -> None:
        unused = j.state == QUEUED and j.attempt == 0
        super()._finish(j, state)
        self._leave_gates(j, unused)
        self._release(j)

    def _leave_gates(self, j: Job, unused: bool) -> None:
        self.open.pop(j.s.id, None)
        if j.s.rate and unused:  # its admission was of no use to it, and is another's
            self.rates.get(j.s.rate.partition("=")[0], {}).pop(j.s.id, None)
        if j.s.permit:
            self._give_permit_up(j)

    def _release(self, ended: Job) -> None:
        """What comes after it, oldest first, goes on or ends with it."""
        behind = [self.jobs[d] for d, open_ones in self.open.items() if ended.s.id in open_ones]
        for d in sorted(behind, key=lambda d: d.seq):
            if d.state != QUEUED:
                continue
            self.open[d.s.id].discard(ended.s.id)
            if ended.state != SUCCEEDED and d.s.after_policy != "ended":
                self._finish(d, CANCELLED)
            elif not self.open[d.s.id] and d.due_ms is None:
                self._enter(d)
