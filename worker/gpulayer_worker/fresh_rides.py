"""Runs of rides whose calls have a process each: one after another in one slot, with all that a run of its own has.

Nothing is shared but the slot. What is spared is the way to the queue and back between two calls, and, where there is a
fork server, the way to the worker: the next call is prepared while one runs, and begins when nothing of that is left. A
call that takes its time keeps nobody: those behind it go back to the queue. A fault of one call's run is that call's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from gpulayer_broker import spec as specs
from gpulayer_broker.attempts import Attempt
from gpulayer_broker.consumer import Outcome
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Payload, Spec
from gpulayer_worker.lanes import without_arguments
from gpulayer_worker.outcomes import failed
from gpulayer_worker.processes.job import Ending, JobHandle
from gpulayer_worker.running import Run
from gpulayer_worker.scratch import Scratch
from gpulayer_worker.tally import Tally, Teller, told_alone
from gpulayer_worker.workshop import Workshop

log = logging.getLogger("gpulayer")

# A report costs about as much as a call: a ride is told of as a whole, unless it takes longer than it should.
TELL_EVERY_S = 0.02
PAUSE_S = 0.05
RECALL_S = 5.0
LOOK_EVERY_S = 1.0
NOT_HERE = Outcome("released", "returned")
LOST = Outcome("released", "lost")


class SingleFresh(Run):
    """A call of a lane that rides with no other."""

    has_run = False

    def outcome(self) -> Outcome:
        begun_s = time.monotonic()
        outcome = super().outcome()
        return told_alone(self.attempt, outcome, _us_since(begun_s) if self.has_run else None)

    def _judge(self, ending: Ending) -> Outcome:
        self.has_run = ending.exit is not None
        return super()._judge(ending)


class _Passenger(Run):
    """One of a ride's calls."""

    handle: JobHandle
    is_recalled = False
    is_quick = True

    def _start(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> JobHandle:
        self.handle = super()._start(scratch, needs, writers)
        return self.handle

    def recall(self) -> None:
        """Takes it back, if it has not begun."""
        self.is_recalled = True
        self.handle.recall()

    def is_back(self) -> bool:
        """Whether it was taken back, or has not begun for another reason, and will not."""
        # One that has begun after all is not waited for.
        try:
            self.handle.started.result(RECALL_S)
            return False
        except TimeoutError:
            return False
        except RuntimeError:
            return self.handle.gone.waits(RECALL_S)

    def runs_on(self, seconds: float) -> bool:
        """Whether it still runs after so long, or when its own time is over."""
        return not self.handle.gone.waits(min(seconds, self.left_s()))

    def left_s(self) -> float:
        """What is left of its own time."""
        if self.spec.timeout_s is None:
            return math.inf
        return max(0.0, self.started_s + self.spec.timeout_s - time.monotonic())

    def wait(self) -> None:
        """Until its process is gone, or its time is over."""
        self.handle.gone.waits(self.left_s())

    @property
    def has_run(self) -> bool:
        """Whether anything can be learnt from how long it took."""
        return self.handle.gone.done() and self.handle.gone.result().exit is not None

    def break_off(self) -> None:
        """Waits for its end, of which nobody will hear."""
        self.handle.wait()
        self._left.close()

    def _judge(self, ending: Ending) -> Outcome:
        if self.is_recalled and ending.refused is not None and not self.attempt.stopped.is_set():
            return NOT_HERE
        return super()._judge(ending)


class FreshRide:
    """The calls that were granted together; `outcome` has what was not told before the last of them ended."""

    def __init__(self, shop: Workshop, attempt: Attempt, spec: Spec, teller: Teller) -> None:
        self.shop, self.spec = shop, spec
        self.tally = Tally(teller, TELL_EVERY_S)
        self.everybody = (attempt, *attempt.riders)
        self.waiting = list(self.everybody)
        # The one that runs, and at most one that begins when it is gone.
        self.begun: list[_Passenger] = []
        self.free_s = time.monotonic()

    def outcome(self) -> Outcome:
        try:
            self._run_all()
        except Exception:
            # What has ended is told all the same, and what has not goes back.
            log.exception("a ride broke off")
        finally:
            self._break_off()
        return self.tally.outcome(self.everybody)

    def _run_all(self) -> None:
        while self.begun or self._begin():
            if self.shop.pool.can_line_up:
                self._begin()
            self.tally.tell_some()
            if self.begun[0].runs_on(PAUSE_S):
                self._let_go()
                self._stay()
            self._end()

    def _break_off(self) -> None:
        """What still runs is ended: nobody will hear of it."""
        for run in self.begun:
            run.handle.kill()
        for run in self.begun:
            run.break_off()

    # --- before ---

    def _begin(self) -> bool:
        """Starts the next call that can be, after the one that runs; whether there was one."""
        while self.waiting:
            attempt = self.waiting.pop(0)
            if not self.tally.add_unbegun(attempt) and self._start(attempt):
                return True
        return False

    def _start(self, attempt: Attempt) -> bool:
        spec = self._spec(attempt)
        early = self._started(attempt, spec) if isinstance(spec, Spec) else spec
        if early is not None:
            self.tally.add(attempt, early, None)
        return early is None

    def _spec(self, attempt: Attempt) -> Spec | Outcome:
        """What the first is but for its arguments; what is another has no place here and goes back."""
        if attempt is self.everybody[0]:
            return self.spec
        # A worker whose disk is full claims nothing either.
        if self.spec.call is None or not self.shop.hardware.has_room():
            return NOT_HERE
        try:
            raw = specs.job_of(attempt.grant.spec)
            if without_arguments(raw) != self._first:
                return NOT_HERE
            arguments = Payload.decode(raw["call"]["arguments"])
        except Exception as error:  # noqa: BLE001 - a decoder meets any bytes and may raise anything
            return failed("undecodable", type(error).__name__, str(error))
        return replace(self.spec, call=replace(self.spec.call, arguments=arguments))

    @cached_property
    def _first(self) -> Mapping[str, Any]:
        return without_arguments(specs.job_of(self.everybody[0].grant.spec))

    def _started(self, attempt: Attempt, spec: Spec) -> Outcome | None:
        """Starts its run; what it came to, where it did not begin."""
        run = _Passenger(self.shop, attempt, spec)
        run.after = self.begun[0].handle if self.begun else None
        try:
            early = run.begin()
        except Exception:
            log.exception("job %s could not be started", attempt.id)
            return LOST
        if early is None:
            self.begun.append(run)
        return early

    # --- while one runs ---

    def _let_go(self) -> None:
        """The call that runs takes its time: those behind it go back."""
        lined_up = self.begun[1:]
        for run in lined_up:
            run.recall()
        behind, self.waiting = self.waiting, []
        self.tally.hand_back(behind, "returned")
        for run in lined_up:
            if run.is_back():
                self.begun.remove(run)
                self.tally.add(run.attempt, self._outcome(run), None)
        self.tally.tell_some()

    def _stay(self) -> None:
        """What the queue could not hear of yet does not wait for the end of a call that takes its time."""
        run = self.begun[0]
        while self.tally.is_behind and run.left_s() and run.runs_on(LOOK_EVERY_S):
            self.tally.tell_some()

    # --- after ---

    def _end(self) -> None:
        """Waits for the call that runs; whoever is lined up behind it runs now."""
        run = self.begun[0]
        run.wait()
        # The next one's time counts from now on, whatever is still to be done for this one.
        is_gone = run.handle.gone.done()
        took_us = self._turn() if is_gone else 0
        outcome = self._outcome(run)
        if not is_gone:
            took_us = self._turn()
        del self.begun[0]
        self.tally.add(run.attempt, outcome, took_us if run.has_run else None)

    def _turn(self) -> int:
        """Whoever is lined up behind the one that ran runs now; how many microseconds that one had the slot."""
        took_us, self.free_s = _us_since(self.free_s), time.monotonic()
        for behind in self.begun[1:]:
            behind.started_s = self.free_s
        return took_us

    def _outcome(self, run: _Passenger) -> Outcome:
        try:
            return run.end()
        except Exception:
            log.exception("what became of job %s cannot be told", run.attempt.id)
            return LOST


def _us_since(begun_s: float) -> int:
    return int((time.monotonic() - begun_s) * 1e6)
