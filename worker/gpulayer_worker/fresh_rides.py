"""Runs of rides whose calls have a process each: one after another in one slot, with all that a run of its own has.

Nothing is shared but the slot. What is spared is the way to the queue and back between two calls, and, where there is a
fork server, the way to the worker: the next call is prepared while one runs, and begins when nothing of that is left. A
call that takes its time keeps nobody: those behind it go back to the queue.
"""

from __future__ import annotations

import logging
import time

from gpulayer_broker import spec as specs
from gpulayer_broker.attempts import Attempt
from gpulayer_broker.consumer import Outcome
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Spec
from gpulayer_worker.outcomes import failed
from gpulayer_worker.processes.job import Ending, JobHandle
from gpulayer_worker.running import Run, Workshop, spec_of
from gpulayer_worker.scratch import Scratch
from gpulayer_worker.tally import Tally, Teller, told_alone

log = logging.getLogger("gpulayer")

# A report costs about as much as a call: a ride is told of as a whole, unless it takes longer than it should.
TELL_EVERY_S = 0.02
PAUSE_S = 0.05
RECALL_S = 5.0


class SingleFresh(Run):
    """A call of a lane that rides with no other."""

    def outcome(self) -> Outcome:
        begun_s = time.monotonic()
        return told_alone(self.attempt, super().outcome(), _us_since(begun_s))


class _Passenger(Run):
    """One of a ride's calls."""

    handle: JobHandle
    is_recalled = False
    is_quick = True

    def _start(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> JobHandle:
        self.handle = super()._start(scratch, needs, writers)
        return self.handle

    def recall(self) -> bool:
        """Takes it back, if it has not begun; whether that is so."""
        self.is_recalled = True
        self.handle.recall()
        return self.handle.gone.waits(RECALL_S) and self.handle.gone.result().exit is None

    def break_off(self) -> None:
        """Ends it, whose outcome nobody will hear of."""
        self.handle.kill()
        self.end()

    def _judge(self, ending: Ending) -> Outcome:
        if self.is_recalled and ending.refused is not None:
            return Outcome("released", "returned")
        return super()._judge(ending)


class FreshRide:
    """The calls that were granted together; `outcome` has what was not told before the last of them ended."""

    def __init__(self, shop: Workshop, attempt: Attempt, spec: Spec, teller: Teller) -> None:
        self.shop, self.spec = shop, spec
        self.teller, self.tally = teller, Tally(teller, TELL_EVERY_S)
        self.everybody = (attempt, *attempt.riders)
        self.waiting = list(self.everybody)
        self.begun: list[_Passenger] = []
        self.free_s = time.monotonic()

    def outcome(self) -> Outcome:
        try:
            self._run_all()
        except Exception:
            # What has ended is told all the same, and what has not goes back.
            log.exception("a ride broke off")
        finally:
            for run in self.begun:
                run.break_off()
        return self.tally.outcome(self.everybody)

    def _run_all(self) -> None:
        while self.begun or self._begin():
            if self.shop.pool.can_line_up:
                self._begin()
            self.tally.tell_some()
            if not self.begun[0].handle.gone.waits(PAUSE_S):
                self._let_go()
            self._end()

    def _begin(self) -> bool:
        """Starts the next call that can be, after the one that runs; whether there was one."""
        while self.waiting:
            attempt = self.waiting.pop(0)
            if not self.tally.add_unbegun(attempt) and self._start(attempt):
                return True
        return False

    def _start(self, attempt: Attempt) -> bool:
        try:
            spec = self.spec if attempt is self.everybody[0] else spec_of(specs.job_of(attempt.grant.spec))
        except (GpulayerError, KeyError, TypeError) as error:
            self.tally.add(attempt, failed("undecodable", type(error).__name__, str(error)), None)
            return False
        run = _Passenger(self.shop, attempt, spec)
        run.after = self.begun[0].handle.id if self.begun else ""
        early = run.begin()
        if early is not None:
            self.tally.add(attempt, early, None)
            return False
        self.begun.append(run)
        return True

    def _end(self) -> None:
        """Waits for the call that runs; whoever is lined up behind it runs now."""
        run = self.begun[0]
        outcome = run.end()
        del self.begun[0]
        took_us, self.free_s = _us_since(self.free_s), time.monotonic()
        for behind in self.begun:
            behind.started_s = self.free_s
        self.tally.add(run.attempt, outcome, took_us)

    def _let_go(self) -> None:
        """The call that runs takes its time: those behind it go back."""
        for run in self.begun[1:]:
            if run.recall():
                self.begun.remove(run)
                self.tally.add(run.attempt, run.end(), None)
        behind, self.waiting = self.waiting, []
        self.teller.release(behind, "returned")
        self.tally.tell_some()


def _us_since(begun_s: float) -> int:
    return int((time.monotonic() - begun_s) * 1e6)
