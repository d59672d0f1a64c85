"""Runs of `isolation="warm"`: a single call, and a chunk of an array, on a process of the warm lane (`warm_rides.py`:
several calls that share a slot).

A single call has the outcome that a fresh process would have given it. A chunk reports the outcomes of all items that
ran; one that took its process along has failed, and what follows it goes back to the queue, as does what had not ended
when the chunk was stopped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from gpulayer_broker.attempts import STALE
from gpulayer_broker.consumer import Outcome
from gpulayer_broker.functions import ItemsEnding
from gpulayer_broker.items import ItemOutcome, Items, pack_outcomes
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Payload
from gpulayer_worker.joblog import JobLog
from gpulayer_worker.last_words import with_last_words
from gpulayer_worker.outcomes import NO_REPORT, out_of_memory, process_outcome, report_outcome, timed_out
from gpulayer_worker.processes.job import Ending, Exit
from gpulayer_worker.processes.pool import is_the_jobs_own
from gpulayer_worker.processes.warm import Answer, Batch, BatchEnd, WarmKey, WarmProcess, ending_of
from gpulayer_worker.running import PIPES_PATIENCE_S, Run, progressed, version_of
from gpulayer_worker.scratch import Scratch
from gpulayer_worker.tally import told_alone

# A process may die between two batches: then its next batch has not begun, and another process takes it.
TRIES = 3
KEPT_ARRAYS = 4


class WarmRun(Run):
    """One call. `took_us` is what it took, once it has ended."""

    is_served = True
    took_us: int | None = None

    def _work(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> Callable[[], Ending]:
        end, answers = self._serve(scratch, needs, writers, [self._arguments()])
        ending = end.ending
        if answers:
            ending, self.took_us = ending_of(end, answers[0]), int(answers[0].wall_s * 1e6)
        return lambda: ending or Ending(None, lost=True)

    def _arguments(self) -> bytes:
        assert self.spec.call is not None
        return self._bytes(self.spec.call.arguments)

    def _serve(
        self, scratch: Scratch, needs: Requirements, writers: list[int], items: list[bytes]
    ) -> tuple[BatchEnd, list[Answer]]:
        batch = self._batch(scratch, self._environment(scratch, needs), writers, items)
        key = self._key(batch.env, needs)
        answers: list[Answer] = []
        self._clock_in()
        for _ in range(TRIES):
            process = self.shop.warm.acquire(key)
            try:
                end = self._on(process, batch, answers, partial(self._bound_disk, scratch, needs))
            finally:
                self.attempt.on_stop = self.attempt.on_lease = None
                self.shop.warm.release(process)
            if end.begun or self.attempt.stopped.is_set():
                break
        self.timed_out, self.group_facts = end.timed_out, end.facts
        self.memory_limit_bytes = needs.memory_bytes
        return end, answers

    def _on(
        self,
        process: WarmProcess,
        batch: Batch,
        answers: list[Answer],
        bound_disk: Callable[[Callable[[], object]], None],
    ) -> BatchEnd:
        def stop(reason: str) -> None:
            if reason == STALE:
                process.kill(batch)
            else:
                process.end(batch, batch.grace_s)

        def begun() -> None:
            self.attempt.on_stop = stop
            if batch.lease_until_s is not None:
                self.attempt.on_lease = lambda until_s: process.extend_lease(batch, until_s)
            if self.attempt.stopped.is_set():
                stop(self.attempt.stop_reason)
            bound_disk(lambda: process.end(batch, batch.grace_s))
            self._tell_start()

        return process.run(batch, answers.append, begun)

    def _batch(self, scratch: Scratch, env: dict[str, str], writers: list[int], items: list[bytes]) -> Batch:
        call, settings = self.spec.call, self.shop.settings
        assert call is not None
        return Batch(
            sha256=digest_of(call.function),
            function=lambda: self._bytes(call.function),
            items=items,
            python=version_of(call),
            cwd=Path(scratch.work),
            env=env,
            payload=Path(scratch.file("result")),
            stdout=writers[0],
            stderr=writers[1],
            name=call.qualname or "function",
            result_limit_bytes=settings.result_bytes,
            lease_until_s=None if self.spec.on_outage == "keep" else self.attempt.lease_until_s,
            timeout_s=self.spec.timeout_s,
            grace_s=settings.term_grace_s,
            on_progress=partial(progressed, self.attempt, self.shop.on_started),
        )

    def _key(self, env: Any, needs: Requirements) -> WarmKey:
        """What must not differ: what is read at imports, the code of the folder, whose it is, and the devices."""
        assert self.spec.call is not None
        own, spec = self.attempt.grant, self.spec
        return WarmKey(
            python=self.shop.python,
            env=frozenset((name, value) for name, value in env.items() if not is_the_jobs_own(name)),
            preload=frozenset(self.spec.call.modules),
            place="\n".join((own.owner, spec.source, spec.inputs, env.get("PYTHONPATH", ""))),
            devices=tuple(sorted({uuid for uuid, _ in own.lots})),
            memory_bytes=needs.memory_bytes,
        )


class SingleRun(WarmRun):
    """A call of a lane that rides with no other; what it took says how many of the next may."""

    def outcome(self) -> Outcome:
        outcome = super().outcome()
        is_quiet = not outcome.fields.keys() & {"logs", "outputs"}
        return told_alone(self.attempt, outcome, self.took_us if is_quiet else -1)


class ChunkRun(WarmRun):
    """A range of an array's items."""

    def _work(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> Callable[[], Ending]:
        grant, call = self.attempt.grant, self.spec.call
        assert call is not None
        every = _items.get(digest_of(call.arguments), lambda: self._bytes(call.arguments))
        items = [every[number] for number in range(grant.start, grant.stop)]
        self.batch_end, self.answers = self._serve(scratch, needs, writers, items)
        return lambda: self.batch_end.ending or Ending(Exit(0, None))

    def _ended(self, ending: Ending, scratch: Scratch, job_log: JobLog) -> Outcome:
        self.shop.logs.finish(job_log, PIPES_PATIENCE_S)
        outcomes = [self._item(report_outcome_of(answer, self)) for answer in self.answers]
        took_us = sum(int(answer.wall_s * 1e6) for answer in self.answers)
        if (last := self._fatal(ending)) is not None:
            outcomes.append(self._item(with_last_words(last, job_log)))
        if not outcomes:
            return self._stopped_outcome() if self.attempt.stopped.is_set() else Outcome("released", "lost")
        grant = self.attempt.grant
        failed = sum(not outcome.ok for outcome in outcomes)
        upto = grant.start + len(outcomes)
        ended = ItemsEnding(grant.id, grant.token, upto, failed, took_us, pack_outcomes(outcomes))
        return Outcome("succeeded", items=ended)

    def _fatal(self, ending: Ending) -> Outcome | None:
        """The outcome of the item that took its process along, where it was the item's own doing."""
        if self.batch_end.finished or self.attempt.stopped.is_set() or ending.expired or ending.lost:
            return None
        if self.over_disk or self.timed_out:
            return self.over_disk or timed_out(self.spec.timeout_s or 0)
        killed = out_of_memory(ending, self.group_facts, self.memory_limit_bytes)
        return killed or process_outcome(ending, NO_REPORT)

    def _item(self, outcome: Outcome) -> ItemOutcome:
        if outcome.verdict == "succeeded":
            fields = outcome.fields
            return ItemOutcome(True, str(fields["result_kind"]), fields["result"])  # type: ignore[arg-type]
        return ItemOutcome(False, "error", outcome.fields["error"])  # type: ignore[arg-type]


def report_outcome_of(answer: Answer, run: Run) -> Outcome:
    return report_outcome(answer.report, run.store)


class _KeptItems:
    """The items of the arrays that were worked on last: chunks of one array follow each other closely."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[str, Items] = OrderedDict()

    def get(self, digest: str, read: Callable[[], bytes]) -> Items:
        with self._lock:
            if (known := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return known
        # Two that ask at once read it twice: no other array is to wait for a slow store.
        items = Items(read())
        with self._lock:
            self._kept[digest] = items
            if len(self._kept) > KEPT_ARRAYS:
                self._kept.popitem(last=False)
        return items


_items = _KeptItems()


def digest_of(payload: Payload) -> str:
    return payload.sha256 or sha256(payload.data or b"").hexdigest()
