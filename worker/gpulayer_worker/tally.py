"""What the calls of a ride came to, on its way to the queue: some at a time, and what is left with the ride's own end.

Whatever happens, every call is told or handed back once, and an outage of the queue ends no call that runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Protocol

from dramatiq.errors import ConnectionFailed

from gpulayer_broker.attempts import CANCELLED, Attempt
from gpulayer_broker.consumer import Calls, Outcome
from gpulayer_broker.functions import CallEnding, CallsEnding, Ending

log = logging.getLogger("gpulayer")

# So long after the queue could not be reached, it is asked again.
AGAIN_S = 30.0


class Teller(Protocol):
    """Where calls are told before their ride is over."""

    def commit_some(self, calls: Calls) -> bool: ...

    def release(self, attempts: Iterable[Attempt], how: str = ...) -> None: ...


class Tally:
    """The ends of one ride's calls, told every so often, and the calls that leave it without one."""

    def __init__(self, teller: Teller, every_s: float) -> None:
        self._teller, self._every_s = teller, every_s
        self._due_s = time.monotonic() + every_s
        self._untold: list[tuple[Attempt, CallEnding]] = []
        # By the way in which they leave: those that go together go in one send.
        self._leaving: dict[str, list[Attempt]] = {}
        self._away_until_s = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether the queue has yet to hear of something."""
        return bool(self._untold or self._leaving)

    def add(self, attempt: Attempt, outcome: Outcome, took_us: int | None) -> None:
        """A call has ended: told with others, and soon. `took_us` as in CallEnding."""
        if outcome.verdict == "released":
            self.hand_back([attempt], outcome.reason)
            return
        self._untold.append((attempt, _ending(attempt, outcome, took_us)))

    def add_unbegun(self, attempt: Attempt) -> bool:
        """Whether a call that has not begun is not to begin any more."""
        if not attempt.stopped.is_set():
            return False
        if attempt.stop_reason == CANCELLED:
            self.add(attempt, Outcome("cancelled", "cancelled"), None)
        else:
            self.hand_back([attempt], "returned")
        return True

    def hand_back(self, attempts: Iterable[Attempt], how: str) -> None:
        """They leave the ride without an end, now or, through an outage, later: what runs here is none the worse."""
        for attempt in attempts:
            self._leaving.setdefault(how, []).append(attempt)
        if time.monotonic() >= self._away_until_s:
            self._release()

    def tell_some(self) -> None:
        """Tells those that have ended, if the last time was a while ago."""
        if not self.is_behind or time.monotonic() < max(self._due_s, self._away_until_s):
            return
        self._release()
        if self._untold and time.monotonic() >= self._away_until_s:
            if self._teller.commit_some(self._calls()):
                self._untold.clear()
                self._due_s = time.monotonic() + self._every_s
            else:
                self._is_away()

    def outcome(self, everybody: Iterable[Attempt]) -> Outcome:
        """What is left to tell; those of everybody that have not ended go back."""
        leaving = [attempt for attempts in self._leaving.values() for attempt in attempts]
        known = {attempt.token for attempt in (*(ended for ended, _ in self._untold), *leaving)}
        self._away_until_s = 0.0
        self.hand_back([each for each in everybody if each.token not in known], "lost")
        if not self._untold:
            return Outcome("released", "returned")
        return Outcome("succeeded", calls=self._calls())

    def _release(self) -> None:
        try:
            while self._leaving:
                how, leaving = next(iter(self._leaving.items()))
                self._teller.release(leaving, how)
                del self._leaving[how]
        except ConnectionFailed as error:
            log.warning("calls of a ride could not be handed back yet: %s", error)
            self._is_away()

    def _is_away(self) -> None:
        """Asking in vain takes seconds, in which nobody looks at the call that runs: it is done now and then."""
        self._away_until_s = time.monotonic() + AGAIN_S

    def _calls(self) -> Calls:
        attempts, endings = zip(*self._untold, strict=True)
        return Calls(attempts, CallsEnding(endings))


def told_alone(attempt: Attempt, outcome: Outcome, took_us: int | None) -> Outcome:
    """The outcome of a call of a lane that rides with no other: what it took says how many of the next may."""
    if outcome.verdict == "released":
        return outcome
    calls = Calls((attempt,), CallsEnding((_ending(attempt, outcome, took_us),)))
    return Outcome("succeeded", calls=calls)


def _ending(attempt: Attempt, outcome: Outcome, took_us: int | None) -> CallEnding:
    ending = Ending(attempt.id, attempt.token, outcome.verdict, outcome.reason, fields=outcome.fields)
    return CallEnding(ending, took_us)
