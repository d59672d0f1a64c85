"""Runs of warm rides: calls of one lane that share a slot, one after another on one process, each ending by itself.

They share a folder as long as none of them leaves anything in it; the first that does is the last of that process'
batch, and what follows gets another folder. What they write goes to two files, of which each call has its part. A call
that takes its time keeps nobody: those behind it that have not begun go back to the queue.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson

from gpulayer_broker import spec as specs
from gpulayer_broker.attempts import CANCELLED, STALE, Attempt
from gpulayer_broker.consumer import Outcome, dumps
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.functions import Arg
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Payload, Spec
from gpulayer_worker.joblog import JobLog
from gpulayer_worker.lanes import without_arguments
from gpulayer_worker.last_words import with_last_words
from gpulayer_worker.outcomes import (
    NO_REPORT,
    cannot_start,
    out_of_memory,
    process_outcome,
    report_outcome,
    timed_out,
)
from gpulayer_worker.outputs import gather
from gpulayer_worker.processes.fork_server import ForkServerGone
from gpulayer_worker.processes.job import Usage
from gpulayer_worker.processes.warm import Answer, Batch, BatchEnd, Tokens, WarmKey, WarmProcess
from gpulayer_worker.scratch import FOLDERS, Scratch, folder_in
from gpulayer_worker.tally import Tally, Teller
from gpulayer_worker.usage import usage_record
from gpulayer_worker.warm_runs import TRIES, WarmRun
from gpulayer_worker.workshop import Workshop

log = logging.getLogger("gpulayer")

STREAMS = ("out", "err")
TELL_EVERY_S = 0.005
_numbers = itertools.count(1)
READ_BYTES = 1 << 18


@dataclass
class Call:
    """One of the ride. `data` are its pickled arguments."""

    attempt: Attempt
    data: bytes
    log: JobLog | None = None


class WarmRide(WarmRun):
    """The calls that were granted together; `outcome` has what was not told before the last of them ended."""

    def __init__(self, shop: Workshop, attempt: Attempt, spec: Spec, teller: Teller) -> None:
        super().__init__(shop, attempt, spec)
        self.tally = Tally(teller, TELL_EVERY_S)

    def outcome(self) -> Outcome:
        needs = self._needs()
        if isinstance(needs, Outcome):
            return needs
        try:
            self._run_all(needs)
        except Exception:
            # What has ended is told all the same, and what has not goes back.
            log.exception("a ride broke off")
        return self.tally.outcome((self.attempt, *self.attempt.riders))

    def _run_all(self, needs: Requirements) -> None:
        """Leg by leg, until all have ended, or no process can be had."""
        waiting, tries = self._calls(), TRIES
        while waiting and tries:
            left = self._leg(waiting, needs)
            tries = tries - 1 if len(left) == len(waiting) else TRIES
            waiting = [call for call in left if not self.tally.add_unbegun(call.attempt)]

    def _calls(self) -> list[Call]:
        """Those that are what the first is but for their arguments; others have no place here and go back."""
        first, out = without_arguments(specs.job_of(self.attempt.grant.spec)), []
        for attempt in (self.attempt, *self.attempt.riders):
            try:
                raw = specs.job_of(attempt.grant.spec)
                if without_arguments(raw) != first:
                    raise ValueError("it is not of its lane")
                out.append(Call(attempt, self._bytes(Payload.decode(raw["call"]["arguments"]))))
            except (GpulayerError, OSError) as error:
                self.tally.add(attempt, cannot_start(error), None)
            except (ValueError, KeyError, TypeError):
                self.tally.hand_back([attempt], "returned")
        return out

    def _leg(self, calls: list[Call], needs: Requirements) -> list[Call]:
        """Runs the calls as one batch; those that have not begun."""
        try:
            process = self.shop.warm.acquire(self._lane_key(needs))
        except ForkServerGone:
            return calls
        try:
            with _Leg(self, calls, self._seat(process, needs)) as leg:
                left = leg.run(process, needs)
            if leg.is_spoilt:
                process.keep(None)
            return left
        except NoSeat as error:
            self._cannot_sit(calls, error)
            return []
        finally:
            self.shop.warm.release(process)

    def _cannot_sit(self, calls: list[Call], error: NoSeat) -> None:
        """There is no folder to be had: a full disk passes, anything else is the calls' end."""
        if self.shop.hardware.has_room():
            for call in calls:
                self.tally.add(call.attempt, cannot_start(error.why), None)
        else:
            log.warning("%d calls are handed back: %s", len(calls), error)
            self.tally.hand_back([call.attempt for call in calls], "returned")

    def _lane_key(self, needs: Requirements) -> WarmKey:
        """What a process must be to serve the lane: it does not depend on the folder that a ride is given."""
        grant = self.attempt.grant
        return self.shop.lanes.get(
            f"{grant.owner} {grant.lane}",
            lambda: self._key(self._environment(Scratch(f"{self.shop.scratch.base}/ride"), needs), needs),
        )

    def _seat(self, process: WarmProcess, needs: Requirements) -> Seat:
        """The process' own, made anew where it has none."""
        seat, lane = process.kept, self.attempt.grant.lane
        if not isinstance(seat, Seat):
            try:
                seat = Seat(self.shop)
            except OSError as error:
                raise NoSeat(error) from error
            process.keep(seat)
        if seat.lane != lane:
            seat.lane, seat.env = lane, self._environment(seat.scratch, needs)
        return seat


class NoSeat(Exception):
    """A folder and its files cannot be made; `why` is what the system says."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


class Seat:
    """What a process has from one ride to the next: a folder in which nobody has left anything, and two empty files
    for output. `env` is the environment of the lane that it served last."""

    def __init__(self, shop: Workshop) -> None:
        self.shop, self.lane, self.env = shop, "", dict[str, str]()
        self.scratch = shop.scratch.make("ride", next(_numbers))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self.files = [os.open(self.scratch.file(f"log.{stream}"), flags, 0o600) for stream in STREAMS]

    def close(self) -> None:
        """Nothing runs in it any more."""
        for file in self.files:
            os.close(file)
        self.shop.cleaner.do(partial(self.shop.scratch.give_back, self.scratch))


class _Leg:
    """One batch of a ride, on one process and in one folder, which is spoilt when something is left in it."""

    def __init__(self, run: WarmRide, calls: list[Call], seat: Seat) -> None:
        self.run_, self.shop, self.calls, self.seat = run, run.shop, calls, seat
        self.scratch, self.files = seat.scratch, seat.files
        self.answered, self.read = 0, [0, 0]
        self.is_spoilt = False
        self.tokens = Tokens(len(calls))

    def __enter__(self) -> _Leg:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self.calls:
            call.attempt.on_stop = call.attempt.on_lease = None
            if call.log is not None:
                self.shop.logs.forget(call.log)
        self.tokens.close()

    def run(self, process: WarmProcess, needs: Requirements) -> list[Call]:
        run = self.run_
        batch = replace(
            run._batch(self.scratch, self.seat.env, self.files, [call.data for call in self.calls]),
            each=[_identity(call.attempt) for call in self.calls],
            folders={
                folder_in(self.scratch, name): sorted(inside) for name, inside in FOLDERS.items() if name
            },
            tokens=self.tokens,
            on_pause=self._pause,
            on_progress=self._progress,
        )
        end = process.run(batch, self._answer, lambda: self._listen(process, batch))
        return self._after(end, needs)

    def _listen(self, process: WarmProcess, batch: Batch) -> None:
        """From now on the calls can be stopped."""
        for number, call in enumerate(self.calls):
            call.attempt.on_stop = self._stopper(process, batch, number)
            if batch.lease_until_s is not None:
                call.attempt.on_lease = lambda until_s: process.extend_lease(batch, until_s)
            if call.attempt.stopped.is_set():
                call.attempt.on_stop(call.attempt.stop_reason)

    def _stopper(self, process: WarmProcess, batch: Batch, number: int) -> Callable[[str], None]:
        def stop(reason: str) -> None:
            # Nothing begins any more: whatever runs now is the last that began, or nothing.
            if self.tokens.recall() - 1 != number:
                return
            if reason == STALE:
                process.kill(batch)
            else:
                process.end(batch, batch.grace_s)

        return stop

    # --- while it runs ---

    def _answer(self, answer: Answer) -> None:
        call, run = self.calls[answer.index], self.run_
        self.answered = answer.index + 1
        outcome = report_outcome(answer.report, run.store)
        if call.attempt.stopped.is_set() and not answer.report.ok:
            outcome = Outcome("cancelled", "cancelled") if call.attempt.stop_reason == CANCELLED else outcome
        fields: dict[str, Arg] = {"usage": dumps(usage_record(answer.wall_s, Usage(user_s=answer.cpu_s)))}
        is_quiet = self._log(call, answer.written) and not answer.report.header.get("marked")
        if not is_quiet:
            self.is_spoilt = True
            fields |= self._kept(call, has_left_something=bool(answer.report.header.get("marked")))
        took_us = int(answer.wall_s * 1e6) if is_quiet else -1
        run.tally.add(call.attempt, replace(outcome, fields={**outcome.fields, **fields}), took_us)
        run.tally.tell_some()

    def _log(self, call: Call, upto: Sequence[int]) -> bool:
        """The call's part of what was written; whether it has written nothing."""
        for number, (stream, file) in enumerate(zip(STREAMS, self.files, strict=True)):
            while self.read[number] < upto[number]:
                data = os.pread(file, min(READ_BYTES, upto[number] - self.read[number]), self.read[number])
                if not data:
                    break
                self.read[number] += len(data)
                if call.log is None:
                    attempt = call.attempt
                    spill = self.scratch.file(f"log.{attempt.id}")
                    call.log = self.shop.logs.adopt(attempt.id, attempt.token, spill)
                self.shop.logs.feed(call.log, stream, data)
        return call.log is None

    def _kept(self, call: Call, has_left_something: bool) -> dict[str, Arg]:
        """What is kept of a call that wrote or left something. After one that only wrote, the next runs already: what
        is in the folder then is that one's."""
        run, fields, notes = self.run_, dict[str, Arg](), list[str]()
        try:
            if has_left_something:
                outputs = gather(run.spec, self.scratch, None, run.store, self.shop.settings.artifact_bytes)
                notes += outputs.notes
                if outputs.digest:
                    fields["outputs"] = outputs.digest
            if call.log is not None:
                self.shop.logs.finish(call.log, 0)
                fields["logs"] = dumps({"0": call.log.store(run.store)})
                if call.log.dropped:
                    notes.append(f"{call.log.dropped} bytes of the log were not kept")
        except (GpulayerError, OSError) as error:
            notes.append(f"not everything could be kept: {error}")
        if notes:
            fields["notes"] = orjson.dumps(notes)
        return fields

    def _pause(self) -> None:
        """The call that runs takes its time: those behind it go back, and what it writes is shipped."""
        begun = self.tokens.recall()
        behind = [call.attempt for call in self.calls[begun:]]
        if behind:
            self.run_.tally.hand_back(behind, "returned")
            del self.calls[begun:]
        self.run_.tally.tell_some()
        if begun == self.answered + 1:
            self._log(self.calls[self.answered], [os.fstat(file).st_size for file in self.files])

    def _progress(self, progress: dict[str, Any]) -> None:
        if self.answered < len(self.calls):
            self.calls[self.answered].attempt.progress = dumps(progress).decode()
            self.shop.on_started()

    # --- after ---

    def _after(self, end: BatchEnd, needs: Requirements) -> list[Call]:
        """Ends the call that took its process along; those that have not begun."""
        begun = self.tokens.recall()
        self.is_spoilt = self.is_spoilt or not end.finished
        if not end.finished and self.answered < begun:
            self._lost(self.calls[self.answered], end, needs)
        return self.calls[begun:]

    def _lost(self, call: Call, end: BatchEnd, needs: Requirements) -> None:
        run, ending, attempt = self.run_, end.ending, call.attempt
        if attempt.stopped.is_set():
            cancelled = attempt.stop_reason == CANCELLED
            outcome = Outcome("cancelled", "cancelled") if cancelled else Outcome("released", "returned")
        elif ending is None or ending.expired or ending.lost:
            outcome = Outcome("released", "lost")
        elif end.timed_out:
            outcome = timed_out(run.spec.timeout_s or 0)
        else:
            killed = out_of_memory(ending, end.facts, needs.memory_bytes)
            outcome = killed or process_outcome(ending, NO_REPORT)
        self._log(call, [os.fstat(file).st_size for file in self.files])
        if outcome.verdict != "released":
            outcome = replace(outcome, fields={**outcome.fields, **self._kept(call, has_left_something=True)})
        run.tally.add(attempt, with_last_words(outcome, call.log), -1)


def _identity(attempt: Attempt) -> dict[str, str]:
    """The variables that differ between calls of a lane."""
    return {"GPULAYER_JOB_ID": attempt.id, "GPULAYER_ATTEMPT": str(attempt.grant.attempt)}
