"""The three streams of this process as a command needs them: there, and able to take any text.

A descriptor that is closed would be given to the next file or connection that is opened, which then got what is said.
"""

from __future__ import annotations

import errno
import io
import os
import sys

STREAMS = ("stdin", "stdout", "stderr")
# What keeps a stream from taking more, whoever's fault it is.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def mend_streams() -> None:
    """Closed ones lead nowhere; a character that the terminal's encoding has not is written by its number."""
    for descriptor, name in enumerate(STREAMS):
        if getattr(sys, name) is None:
            _lead_nowhere(descriptor, name)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")


def _lead_nowhere(descriptor: int, name: str) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115 - for good


def write_bytes(data: bytes) -> None:
    """Bytes to stdout as they are, behind what was printed before."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def fault_of(error: OSError) -> str | None:
    """The words for an error of this process's own output; None for any other."""
    if error.filename is None and error.errno in FULL:
        # What is still held back would fail again at the end.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for good
        return f"its output cannot be written: {os.strerror(error.errno)}"
    return None


def as_utf8(text: str) -> str | None:
    """An argument whose bytes are UTF-8, whatever this locale takes them for; None for other bytes."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return None
