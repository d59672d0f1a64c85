"""The probe's child as its parent sees it: started, asked, heard, and killed when it takes too long.

Nothing here waits without a limit, so a driver that hangs takes along its child and nothing else.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulayer_worker.devices.facts import Report, report_of

COMMAND = ("-P", "-m", "gpulayer_worker.devices.child")
CHUNK_BYTES = 65536


class Child:
    """One process that asks the drivers."""

    def __init__(self, root: Path | None = None, *, once: bool = False) -> None:
        options = [*(["--once"] if once else []), *(["--root", str(root)] if root else [])]
        # In the worker's own session, so that it is never taken for an orphan of a job.
        self._process = subprocess.Popen(
            [sys.executable, *COMMAND, *options],
            stdin=subprocess.DEVNULL if once else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.started_s = time.monotonic()
        self.asked_s: float | None = None
        self.listed = Report()
        self.report: Report | None = None
        self.ended = False
        self._rest = b""

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self) -> None:
        """Asks for readings; they come as a message."""
        self.asked_s = time.monotonic()
        with suppress(OSError):  # it has just ended, which its output tells
            assert self._process.stdin is not None
            os.write(self._process.stdin.fileno(), b"\n")

    def messages(self) -> list[tuple[str, Any]]:
        """What it has said since; `ended` is set at its end."""
        while True:
            try:
                data = os.read(self.fileno(), CHUNK_BYTES)
            except BlockingIOError:
                break
            if not data:
                self.ended = True
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [self._understood(line) for line in lines]

    def _understood(self, line: bytes) -> tuple[str, Any]:
        [(kind, content)] = json.loads(line).items()
        if kind == "listed":
            self.listed = report_of(content)
        elif kind == "report":
            self.report = report_of(content)
        elif kind == "readings":
            content = (self.asked_s, content)
            self.asked_s = None
        return kind, content

    @property
    def exit(self) -> str:
        """How it ended, once it has been killed or waited for."""
        code = self._process.returncode
        if code is None:
            return "still in the kernel"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """Ends it. One that hangs inside the kernel stays, and is nobody's business any more."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


def detect(limit_s: float, root: Path | None = None) -> tuple[Report, bool]:
    """The machine's devices, and whether the drivers answered; if not, what the kernel's files list."""
    child = Child(root, once=True)
    until_s = child.started_s + limit_s
    try:
        while child.report is None and not child.ended and (left_s := until_s - time.monotonic()) > 0:
            select.select([child], [], [], left_s)
            child.messages()
        return (child.listed, False) if child.report is None else (child.report, True)
    finally:
        child.kill()
