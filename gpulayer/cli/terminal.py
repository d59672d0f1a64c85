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
from gpulayer.logs import ERR, NOTE, OUT, Piece

# Colours and erasing; every other escape sequence, whole or of a kind that ends elsewhere, is taken out.
_SEQUENCE = re.compile(
    rb"\x1b\[[0-9;:]*[mK]"
    rb"|(?P<bad>\x1b\[[0-?]*[ -/]*[@-~]"
    rb"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    rb"|\x1b[ -/]*[0-~]"
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\x1b)"
)
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]*\x1b?|[ -/]*)?\Z")
HELD_BYTES = 4096


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
    """Writes pieces where they belong."""

    def __init__(self, *, out: BinaryIO | None = None) -> None:
        """`out` takes the job's stdout in place of this process's."""
        self._files = {OUT: out or sys.stdout.buffer, ERR: sys.stderr.buffer}
        self._safe = {name: SafeBytes() for name, file in self._files.items() if file.isatty()}

    def write(self, piece: Piece) -> None:
        if piece.stream == NOTE:
            say(f"gpulayer: {piece.data.decode()}")
            return
        file = self._files.get(piece.stream, self._files[ERR])
        safe = self._safe.get(piece.stream)
        file.write(safe.feed(piece.data) if safe else piece.data)
        file.flush()


def only(pieces: Iterable[Piece], streams: Iterable[str]) -> Iterator[Piece]:
    """The pieces of some streams."""
    wanted = set(streams)
    return (piece for piece in pieces if piece.stream in wanted)
