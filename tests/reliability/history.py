"""What clients did and what they were told: one JSON line for each call that began, and one for how it ended.

A call ends `ok`, `fail` (surely without effect) or `unknown` (its answer was lost). Unknown ones may count either way;
that is what makes the account sound.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpulayer_broker.connection import NoAnswer
from gpulayer_broker.errors import GpulayerError

Line = dict[str, Any]


class History:
    """Appends; safe between threads; closed by `with`, or by close()."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()
        self._calls = 0

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def note(self, **facts: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"at": round(time.monotonic(), 6), **facts}) + "\n")

    @contextmanager
    def call(self, what: str, **facts: Any) -> Iterator[Line]:
        """Writes the call's begin and end; facts put into the yielded dictionary go with its end."""
        with self._lock:
            self._calls += 1
            number = self._calls
        self.note(call=number, type="invoke", what=what, **facts)
        told: Line = {}
        try:
            yield told
        except NoAnswer as error:
            self.note(
                call=number, type="unknown" if error.sent else "fail", what=what, **facts, error=str(error)
            )
            raise
        except GpulayerError as error:
            self.note(call=number, type="fail", what=what, **facts, error=str(error))
            raise
        self.note(call=number, type="ok", what=what, **facts, **told)

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def account(lines: list[Line], present: set[str]) -> list[str]:
    """One line for each submitted id that should be in the queue and is not, or should not and is (I1, I8)."""
    ended = {
        line["call"]: line for line in lines if line.get("what") == "submit" and line["type"] != "invoke"
    }
    invoked = {line["id"] for line in lines if line.get("what") == "submit" and line["type"] == "invoke"}
    accepted = {line["id"] for line in ended.values() if line["type"] == "ok"}
    unknown = {
        line["id"]
        for line in lines
        if line.get("what") == "submit" and line["type"] == "invoke" and line["call"] not in ended
    } | {line["id"] for line in ended.values() if line["type"] == "unknown"}
    lost = [f"{job} was accepted and is not there" for job in sorted(accepted - present)]
    strange = [f"{job} is there and nobody submitted it" for job in sorted(present - invoked)]
    refused = [f"{job} was refused and is there" for job in sorted((present & invoked) - accepted - unknown)]
    return lost + strange + refused
