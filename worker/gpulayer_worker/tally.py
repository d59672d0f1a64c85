"""What the calls of a ride came to, on its way to the queue: some at a time, and what is left with the ride's own end.

Whatever happens, every call is told or handed back once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Protocol

from dramatiq.errors import ConnectionFailed

from gpulayer_broker.attempts import CANCELLED, Attempt
from gpulayer_broker.consumer import Calls, Outcome
from gpulayer_broker.functions import CallEnding, CallsEnding, Ending

log = logging.getLogger("gpulayer")


class Teller(Protocol):
    """Where calls are told before their ride is over."""

    def commit_some(self, calls: Calls) -> bool: ...

    def release(self, attempts: Iterable[Attempt], how: str = ...) -> None: ...


class Tally:
    """The ends of one ride's calls, told every so often."""

    def __init__(self, teller: Teller, every_s: float) -> None:
        self._teller, self._every_s = teller, every_s
        self._told_s = time.monotonic()
        self._untold: list[tuple[Attempt, CallEnding]] = []

    def add(self, attempt: Attempt, outcome: Outcome, took_us: int | None) -> None:
        """A call has ended: told with others, and soon. `took_us` as in CallEnding."""
        if outcome.verdict == "released":
            self._teller.release([attempt], outcome.reason)
            return
        self._untold.append((attempt, _ending(attempt, outcome, took_us)))

    def add_unbegun(self, attempt: Attempt) -> bool:
        """Whether a call that has not begun is not to begin any more."""
        if not attempt.stopped.is_set():
            return False
        if attempt.stop_reason == CANCELLED:
            self.add(attempt, Outcome("cancelled", "cancelled"), None)
        else:
            self._teller.release([attempt], "returned")
        return True

    def tell_some(self) -> None:
        """Tells those that have ended, if the last time was a while ago."""
        if not self._untold or time.monotonic() - self._told_s < self._every_s:
            return
        if self._teller.commit_some(self._calls()):
            self._untold.clear()
            self._told_s = time.monotonic()
        else:
            # Asking in vain takes seconds, in which nobody looks at the call that runs: the rest is told at the end.
            self._told_s = math.inf

    def outcome(self, everybody: Iterable[Attempt]) -> Outcome:
        """What is left to tell; those of everybody that have not ended go back."""
        ended = {attempt.token for attempt, _ in self._untold}
        try:
            self._teller.release([each for each in everybody if each.token not in ended], "lost")
        except ConnectionFailed as error:
            log.warning("calls of a ride could not be handed back yet: %s", error)
        if not self._untold:
            return Outcome("released", "returned")
        return Outcome("succeeded", calls=self._calls())

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
