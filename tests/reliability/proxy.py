"""A proxy between clients and a queue server: it delays, holds, and cuts a connection after any number of bytes.

Requests and replies are counted apart. A cut is armed once: when so many more bytes have passed in that direction, over
whichever connection, that connection is broken on both sides and the next ones pass again.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from gpulayer_broker.connection import Endpoint
from tests.support import PATIENCE_S

REQUEST, REPLY = "request", "reply"


class Proxy:
    """Listens on a unix socket of its own and passes on to the server's."""

    def __init__(self, server: Endpoint) -> None:
        self.server = server
        self.folder = Path(tempfile.mkdtemp(prefix="gpl-", dir="/tmp"))
        self.endpoint = Endpoint.unix(str(self.folder / "p"))
        self.delay_s = 0.0
        self.passed = {REQUEST: 0, REPLY: 0}
        self.cuts = 0
        self._left: dict[str, int | None] = {REQUEST: None, REPLY: None}
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.endpoint.path)
        self._listener.listen(64)
        self._run(self._accept)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut_after(self, count: int, direction: str) -> None:
        """The connection breaks when `count` more bytes have passed in that direction."""
        with self._lock:
            self._left = {REQUEST: None, REPLY: None, direction: count}

    def disarm(self) -> None:
        with self._lock:
            self._left = {REQUEST: None, REPLY: None}

    def shut(self) -> None:
        """Breaks every connection and refuses new ones, until `reopen`."""
        self._open.clear()
        self._break_all()

    def reopen(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break_all()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        shutil.rmtree(self.folder)

    def _run(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _break_all(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            _break(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = self._dial()
            if server is None:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            self._run(self._pump, client, server, REQUEST)
            self._run(self._pump, server, client, REPLY)

    def _dial(self) -> socket.socket | None:
        if not self._open.is_set():
            return None
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(self.server.path)
        except OSError:
            server.close()
            return None
        return server

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self.delay_s:
                    time.sleep(self.delay_s)
                data, cut = self._allowed(data, direction)
                target.sendall(data)
                if cut:
                    break
        _break(source)
        _break(target)
        with self._lock:
            self._sockets -= {source, target}

    def _allowed(self, data: bytes, direction: str) -> tuple[bytes, bool]:
        with self._lock:
            left = self._left[direction]
            cut = left is not None and left <= len(data)
            if cut:
                data = data[:left]
                self._left[direction] = None
                self.cuts += 1
            elif left is not None:
                self._left[direction] = left - len(data)
            self.passed[direction] += len(data)
            return data, cut


def _break(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
