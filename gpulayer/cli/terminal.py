"""A job's output on this terminal: stdout to stdout, stderr to stderr, as the bytes they are.

In a pipe nothing is changed. On a terminal only colours, carriage returns and the erasing of a line pass: a job must
not retitle the window, move the cursor over other lines, or make the terminal type.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from gpulayer.cli.output import say
from gpulayer.logs import ERR, NOTE, OUT, PROGRESS, Piece

# Colours and erasing; every other escape sequence, whole or of a kind that ends elsewhere, is taken out.
_SEQUENCE = re.compile(
    rb"\x1b\[[0-9;:]*[mK]"
    rb"|(?P<bad>\x1b\[[0-?]*[ -/]*[@-~]"
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    rb"|\x1b[ -/]*[0-~]"
    rb"|\xc2[\x80-\x9f]"  # the control characters of the second half, by which some terminals begin sequences too
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\x1b)"
)
_UNFINISHED = re.compile(rb"(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?|\xc2)\Z")
HELD_BYTES = 4096
BAR_CELLS = 30


class SafeBytes:
    """Takes what is not safe on a terminal out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be shown; the start of a sequence is held back until its end comes."""
        data, self._held = self._held + data, b""
        unfinished = _UNFINISHED.search(data, max(0, len(data) - HELD_BYTES))
        if unfinished:
            data, self._held = data[: unfinished.start()], data[unfinished.start() :]
        return _SEQUENCE.sub(_kept, data)


def _kept(match: re.Match[bytes]) -> bytes:
    return b"" if match["bad"] is not None else match[0]


class Terminal:
    """Writes pieces where they belong; on a terminal also how far the job is, in a last line of its own."""

    def __init__(self, *, out: BinaryIO | None = None) -> None:
        """`out` takes the job's stdout in place of this process's."""
        self._files = {OUT: out or sys.stdout.buffer, ERR: sys.stderr.buffer}
        self._safe = {name: SafeBytes() for name, file in self._files.items() if file.isatty()}
        self._progress = ""
        self._line_is_whole = True

    @property
    def shows_progress(self) -> bool:
        """Whether somebody sees a line that is drawn anew."""
        return sys.stderr.isatty()

    @property
    def is_watched(self) -> bool:
        """Whether the job's stdout goes to somebody's eyes, not to a file or another program."""
        return OUT in self._safe

    def write(self, piece: Piece) -> None:
        if piece.stream == PROGRESS:
            self._progress = progress_text(piece.data)
            self._draw()
            return
        self.erase()
        if piece.stream == NOTE:
            say(f"gpulayer: {piece.data.decode()}")
        else:
            self._write(piece)
        self._draw()

    def _write(self, piece: Piece) -> None:
        file = self._files.get(piece.stream, self._files[ERR])
        safe = self._safe.get(piece.stream)
        file.write(safe.feed(piece.data) if safe else piece.data)
        file.flush()
        if safe and piece.data:
            self._line_is_whole = piece.data.endswith(b"\n")

    def _draw(self) -> None:
        """Only on a line of its own: a line that the job has not ended is not touched."""
        if self._progress and self._line_is_whole and self.shows_progress:
            sys.stderr.write(f"\r\x1b[K{self._progress}")
            sys.stderr.flush()

    def erase(self) -> None:
        """Takes the line about the job's progress away, before anything else is written."""
        if self._progress and self._line_is_whole and self.shows_progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def progress_text(told: bytes | str) -> str:
    """What `gl.progress` told, as a bar, numbers and per cent; empty where that makes no sense."""
    import json

    try:
        facts = json.loads(told)
        done, total = float(facts["done"]), float(facts["total"])
        share = min(1.0, max(0.0, done / total))
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
        return ""
    full = round(share * BAR_CELLS)
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {done:g} of {total:g} ({share:.0%})"


def only(pieces: Iterable[Piece], streams: Iterable[str]) -> Iterator[Piece]:
    """The pieces of some streams."""
    wanted = set(streams)
    return (piece for piece in pieces if piece.stream in wanted)
