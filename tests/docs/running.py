"""Runs the examples of a page as a reader would: in one folder, in order, on a terminal, in a set-up of their own."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import Block
from tests.support import end_process

DEADLINE_S = 60.0
COLUMNS = "110"
# Styles, and a bar from the hiding of the cursor until it is wiped away: nobody finds these on the screen afterwards.
_UNSEEN = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(?:\r\x1b\[1A\x1b\[2K)?|\x1b\[[0-9;]*m", re.S)
# What differs from run to run, and what stands for it on both sides of a comparison.
_VARYING = (
    (re.compile(r"\b(j|w|g)_[0-9a-z]{6,12}\b"), r"\1_ID"),
    (re.compile(r"\bpid \d+"), "pid N"),
    (re.compile(r"\b\d+ cpus?, "), "N cpus, "),
    (re.compile(r"\b\d+\.\d+\.\d+\b"), "VERSION"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h)\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)? (MB|GB|TB|kB)\b"), "SIZE"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT[\d:.]+Z"), "DATE"),
    (re.compile(r"[\s\N{BOX DRAWINGS LIGHT HORIZONTAL}]+"), " "),
)


class PageFolder:
    """Where a page's examples run, and the environment that keeps them apart from everything else."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder / "page"
        self.folder.mkdir()
        # A socket's path is short: the runtime folder is not below pytest's long one.
        self.environment = {
            **os.environ,
            "GPULAYER_STATE_DIR": str(folder / "state"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "REDIS_URL": redis_url,
            "TERM": "xterm",
            "COLUMNS": COLUMNS,
        }

    def run(self, block: Block) -> str:
        """What a block prints; AssertionError where its exit code is not the expected one."""
        command = self._command(block)
        code, printed = on_terminal(command, self.folder, self.environment)
        assert code == block.exit_code, f"{block} ended with {code}, not {block.exit_code}:\n{printed}"
        return printed

    def write(self, block: Block) -> Path:
        path = self.folder / (block.title or f"example_{block.line}.{block.language}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.body)
        return path

    def _command(self, block: Block) -> list[str]:
        path = str(self.write(block).relative_to(self.folder))
        return {"bash": ["bash", "-eu", path], "python": ["python", path]}[block.language]

    def down(self) -> None:
        """Ends the private set-up of this folder."""
        subprocess.run(
            ["gpulayer", "down"], env=self.environment, check=True, capture_output=True, timeout=DEADLINE_S
        )


def on_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command that has a terminal."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        try:
            printed = _read_all(ours)
            return process.wait(DEADLINE_S), _UNSEEN.sub("", printed).replace("\r\n", "\n")
        finally:
            end_process(process)
    finally:
        os.close(ours)


def _read_all(descriptor: int) -> str:
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux tells so that the last writer has closed the terminal
            part = b""
        if not part:
            return b"".join(parts).decode("utf-8", "replace")
        parts.append(part)


def normal(text: str) -> list[str]:
    """The lines of an output without what differs from run to run, from machine to machine, and without layout."""
    host = socket.gethostname()
    text = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text)
    text = re.sub(r"(?<![\w-])vm(?![\w-])", "HOST", text)
    lines = []
    for line in text.splitlines():
        for pattern, stand_in in _VARYING:
            line = pattern.sub(stand_in, line)
        if line.strip():
            lines.append(line.strip())
    return lines


def matches(printed: str, documented: str) -> bool:
    """Whether the output is as documented; `…` stands for any text, and alone in a line for any lines."""
    pattern = ""
    for line in normal(documented):
        if line == "…":
            pattern += "(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.split("…"))) + "\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in normal(printed))) is not None
