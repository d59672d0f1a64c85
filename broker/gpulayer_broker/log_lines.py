"""Lines out of what a job wrote: redraws folded, and the last few of them as a failure's record carries them.

Guarantees: each byte is looked at once, in whatever pieces it comes; what `last_lines` and `safe_line` return moves no
cursor and has no control character, whatever bytes a job wrote; last lines are at most MOST_LINES of MOST_BYTES.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator

MOST_LINES = 20
MOST_BYTES = 2048
CUT = "…"
# Escape sequences are taken out whole: without its first character the rest of one would be read as text.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\|$)|[ -/]*[0-~])")


class Lines:
    """One stream's lines out of its pieces; of a line that was redrawn by carriage returns only what was last drawn.

    `\\r\\n` ends a line as `\\n` does. What was drawn over is not kept: a progress bar of any length takes the room of
    one drawing. Each byte is looked at once, however small the pieces of a long line are.
    """

    def __init__(self) -> None:
        self._drawn: list[bytes] = []
        self._returned = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that end in the data."""
        *whole, rest = data.split(b"\n")
        for each in whole:
            self._draw(each)
            yield self._line()
        self._draw(rest)

    def rest(self) -> Iterator[str]:
        """The last line, if no newline ended it."""
        if self._drawn or self._returned:
            yield self._line()

    def _draw(self, data: bytes) -> None:
        text = data.rstrip(b"\r")
        if text:
            _, redrawn, last = text.rpartition(b"\r")
            if redrawn or self._returned:
                self._drawn.clear()
            self._drawn.append(last)
            self._returned = False
        self._returned = self._returned or len(data) > len(text)

    def _line(self) -> str:
        line = b"".join(self._drawn).decode("utf-8", "replace")
        self._drawn, self._returned = [], False
        return line


def last_lines(pieces: Iterable[tuple[str, bytes]]) -> str:
    """The last lines of (stream, bytes), as safe text; lines without a sign are left out."""
    streams: dict[str, Lines] = {}
    kept: deque[str] = deque(maxlen=MOST_LINES)
    for stream, data in pieces:
        kept.extend(_told(streams.setdefault(stream, Lines()).feed(data)))
    for each in streams.values():
        kept.extend(_told(each.rest()))
    return "\n".join(_within(kept))


def _told(lines: Iterable[str]) -> Iterator[str]:
    return filter(None, map(safe_line, lines))


def _within(lines: Iterable[str]) -> list[str]:
    """As many of the last ones as there is room for; of a last one that is too long its beginning and its end."""
    chosen: deque[str] = deque()
    left = MOST_BYTES
    for line in reversed(list(lines)):
        size = len(line.encode()) + 1
        if size > left:
            if not chosen:
                chosen.append(_shortened(line))
            break
        chosen.appendleft(line)
        left -= size
    return list(chosen)


def _shortened(line: str) -> str:
    half = (MOST_BYTES - 1 - len(CUT.encode())) // 2
    raw = line.encode()
    return raw[:half].decode(errors="ignore") + CUT + raw[-half:].decode(errors="ignore")


def safe_line(line: str) -> str:
    """The line without what is no sign to be read: escape sequences, control characters, what turns text around."""
    plain = _SEQUENCE.sub("", line)
    return "".join(sign if sign.isprintable() else " " for sign in plain).rstrip()
