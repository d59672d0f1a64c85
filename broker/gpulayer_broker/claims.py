"""Claiming: takes what this worker can start now, and hands it on.

All claims of a worker go through one link and one lock, so that what is offered is exact and a lost reply is asked
for again by its nonce before another claim is made. A worker whose next incarnation is there claims nothing more.
Claims are numbered, and a heartbeat tells the number of the last one that was answered: what a claim granted is not
taken back by a heartbeat that was made before its answer came.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from gpulayer_broker import functions
from gpulayer_broker.answers import Claimed, Committed
from gpulayer_broker.attempts import STALE, Attempt, Attempts, lease_clock_s
from gpulayer_broker.errors import GpulayerError, NotAllowed, Unavailable
from gpulayer_broker.functions import AnyEnding, DeviceLot, Offer
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements

log = logging.getLogger("gpulayer")


NUMBER_LENGTH = 12
# How many reports go in one send: the server answers nobody else meanwhile.
MOST_TOGETHER = 32


def _number(n: int) -> str:
    """A claim's number, with which its nonce begins: numbers compare as texts do."""
    return f"{n:0{NUMBER_LENGTH}x}"


@dataclass(frozen=True)
class Question:
    """A claim under way. Asked `again`, its answer may be an old one, and its leases count from the first time."""

    nonce: str
    sent_s: float
    lots: tuple[DeviceLot, ...] = ()
    again: bool = False


@dataclass(eq=False)
class Report:
    """The end of attempts on its way to the queue, and what the queue said."""

    ended: Sequence[Attempt]
    ending: AnyEnding
    answer: Committed | GpulayerError | None = None

    def verdict(self) -> Committed:
        assert self.answer is not None
        if isinstance(self.answer, GpulayerError):
            raise copy(self.answer)  # several threads may raise the same
        return self.answer


class Claims:
    """What a worker offers, and the one road by which jobs come to it and leave it."""

    def __init__(
        self,
        queue: Queue,
        attempts: Attempts,
        *,
        worker: str,
        incarnation: str,
        lease_s: float,
        deliver: Callable[[Attempt], None],
        register: Callable[[], None],
        on_superseded: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.attempts = attempts
        self.worker = worker
        self.incarnation = incarnation
        self.lease_s = lease_s
        self.capacity = 0
        self.lots: Callable[[], tuple[DeviceLot, ...]] = tuple
        self.disk_mib: Callable[[], int] = lambda: 1 << 40
        self.has_room: Callable[[], bool] = lambda: True
        self._deliver = deliver
        self._register = register
        self._on_superseded = on_superseded
        self.lock = threading.RLock()
        self._open = False
        self._unanswered: Question | None = None
        self._asked, self.known = 0, _number(0)
        self._reports: list[Report] = []

    def open(self, capacity: int) -> None:
        """From now on up to `capacity` jobs are held at once."""
        with self.lock:
            self.capacity, self._open = capacity, True

    def close(self) -> None:
        """Nothing new is asked for; returns when a call under way has ended, or the queue takes too long to answer."""
        self._open = False
        if self.lock.acquire(timeout=self.queue.deadline_s):
            if self._unanswered:  # nobody asks again: what it granted goes back with the next heartbeat
                self._answered(self._unanswered)
            self.lock.release()

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def free(self) -> int:
        """How many jobs may be asked for; none where the machine could not even make a job's folder."""
        return max(0, self.capacity - self.attempts.slots()) if self._open and self.has_room() else 0

    def claim(self) -> int:
        """Claims for what is free; how many jobs came."""
        came = 0
        with self.lock:
            while (most := self.free) > 0:
                question = self._question()
                claimed = self.queue.run(functions.claim(self._offer(question, most)))
                if self._is_stranger(claimed):
                    claimed = self.queue.run(functions.claim(self._offer(question, most)))
                came += self._take(claimed, question)
                if not question.again:
                    break
        return came

    def commit(
        self,
        ended: Sequence[Attempt],
        ending: AnyEnding,
        needs: Iterable[Requirements] = (),
        *,
        claim_next: bool = True,
    ) -> Committed:
        """Ends the attempts, several only where they are calls of one ride, and claims for the place that they leave,
        in one call.

        Reports that come while a call is under way go together in the next, each with its own verdict, and one claim
        for all their places. Alone goes what brings other jobs with it, whose needs may have to be made known first.
        """
        needs = tuple(needs)
        if needs or not claim_next:
            with self.lock:
                return self._commit_alone(ended, ending, needs, claim_next)
        report = Report(ended, ending)
        self._reports.append(report)
        with self.lock:
            while report.answer is None:  # whoever had the lock before may have sent it
                self._send_reports()
        return report.verdict()

    def _commit_alone(
        self,
        ended: Sequence[Attempt],
        ending: AnyEnding,
        needs: tuple[Requirements, ...],
        claim_next: bool,
    ) -> Committed:
        question = self._next_question() if claim_next else None
        committed = self.queue.commit(ending, self._next_offer(question, ended), needs)
        stale = self._forget(ended, committed)
        if question:
            self._go_on(committed, question)
        elif stale:
            self.claim()  # as in release
        return committed

    def _send_reports(self) -> None:
        """Sends those that have gathered. A thread that is broken off here leaves all of them to the next one."""
        reports = self._reports[:MOST_TOGETHER]
        question = self._next_question()
        offer = self._next_offer(question, [attempt for report in reports for attempt in report.ended])
        calls = [functions.commit(r.ending, claim_follows=offer is not None) for r in reports[:-1]]
        calls.append(functions.commit(reports[-1].ending, offer))
        try:
            told = self.queue.run_together(calls)
            answers: Sequence[Committed | GpulayerError] = told
        except GpulayerError as error:
            answers, question = [error] * len(reports), None
        for report, answer in zip(reports, answers, strict=True):
            if isinstance(answer, Committed):
                self._forget(report.ended, answer)
            report.answer = answer
        del self._reports[: len(reports)]
        if question:
            self._go_on(answers[-1], question)

    def _go_on(self, answer: Committed | GpulayerError, question: Question) -> None:
        """Takes what came with a report's answer; asks anew where that was refused, or answered an older claim."""
        if isinstance(answer, GpulayerError):
            self.claim()
            return
        stranger = self._is_stranger(answer.claimed)
        self._take(answer.claimed, question)
        if stranger or question.again:
            self.claim()

    def _forget(self, ended: Sequence[Attempt], committed: Committed) -> bool:
        """What was told is held no longer; whether a report was refused."""
        verdicts = committed.verdicts or (committed.verdict,)
        for attempt, verdict in zip(ended, verdicts, strict=True):
            self.attempts.remove(attempt)
            if verdict == STALE:
                log.warning(
                    "job %s: report of attempt %s refused, the job has moved on", attempt.id, attempt.token
                )
        return STALE in verdicts

    def release(self, attempts: Sequence[Attempt], how: str) -> list[str | GpulayerError]:
        """Gives the attempts' jobs back in one send: returned, lost or unfit.

        What the queue refuses to take back stands in the list as its error, and is held no longer either; what passes,
        or an operator can mend, is raised.
        """
        with self.lock:
            answers = self.queue.run_together([functions.release(a.id, a.token, how) for a in attempts])
            for answer in answers:
                if isinstance(answer, (NotAllowed, Unavailable)):
                    raise answer
            for attempt in attempts:
                self.attempts.remove(attempt)
            if STALE in answers:
                self.claim()  # the bell for its place may have rung while it still seemed taken
            return answers

    def _next_question(self) -> Question | None:
        """What is asked in the place of what ends; nothing where no more is taken."""
        return self._question() if self._open and self.has_room() else None

    def _next_offer(self, question: Question | None, leaving: Collection[Attempt]) -> Offer | None:
        if question is None:
            return None
        return self._offer(question, max(0, self.capacity - self.attempts.slots(leaving)))

    def _question(self) -> Question:
        """A new claim, or the one whose answer never came: what it granted is held for this worker.

        The devices are looked at first, which may take a while: leases count from when the claim is sent.
        """
        lots, asked = self.lots(), self._unanswered
        if asked:
            self._unanswered = Question(asked.nonce, asked.sent_s, lots, again=True)
        else:
            self._asked += 1
            self._unanswered = Question(_number(self._asked) + secrets.token_hex(16), lease_clock_s(), lots)
        return self._unanswered

    def _offer(self, question: Question, most: int) -> Offer:
        return Offer(
            worker=self.worker,
            incarnation=self.incarnation,
            max=most,
            nonce=question.nonce,
            lease_ms=int(self.lease_s * 1000),
            disk_mib=self.disk_mib(),
            lots=question.lots,
        )

    def _is_stranger(self, claimed: Claimed) -> bool:
        """Registers anew where the queue has forgotten this worker."""
        if claimed.status == "superseded":
            self._open = False
            self._on_superseded()
        if claimed.status == "unknown":
            self._register()
            return True
        return False

    def _take(self, claimed: Claimed, question: Question) -> int:
        until_s = question.sent_s + self.lease_s
        if claimed.grants and lease_clock_s() >= until_s:
            log.warning("%d jobs came after the end of their lease and go back", len(claimed.grants))
            self._answered(question)
            return 0
        attempts = [Attempt(grant, until_s, started=grant.state == "running") for grant in claimed.grants]
        for attempt in attempts:
            self.attempts.add(attempt)
        self._answered(question)
        for attempt in _leaders(attempts):
            self._deliver(attempt)
        return len(attempts)

    def _answered(self, question: Question) -> None:
        """Heartbeats from now on list what came of it, and the queue takes back what they do not list."""
        self._unanswered, self.known = None, question.nonce[:NUMBER_LENGTH]


def _leaders(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Those that are delivered: the first of each ride, with its riders, and all that ride with nobody."""
    by_slot: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_slot.setdefault(attempt.slot, []).append(attempt)
    for leader, *riders in by_slot.values():
        leader.riders = tuple(riders)
    return [leader for leader, *_ in by_slot.values()]
