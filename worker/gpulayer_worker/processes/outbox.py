"""Sends messages on a socket without ever blocking: what the socket does not take waits until it does.

A fork server that is busy importing must not hold up the thread that renews leases.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

from gpulayer_worker.runner import wire

from .pipes import own_copies

READ_WRITE = selectors.EVENT_READ | selectors.EVENT_WRITE


class Outbox:
    """Messages on their way; safe to use from any thread."""

    def __init__(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        self._link = link
        self._selector = selector
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._closed = False

    def send(
        self, message: dict[str, Any], descriptors: Sequence[int] = (), blobs: Sequence[bytes] = ()
    ) -> None:
        """Sends now or later; the descriptors may be closed after. To a peer that is gone it sends nothing."""
        data = _encoded(message, blobs)
        with self._lock:
            if self._closed:
                return
            taken = 0 if self._waiting else self._take(data, descriptors)
            if taken == len(data):
                return
            self._waiting.append((data[taken:], [] if taken else self.keep(descriptors)))
            self._selector.modify(self._link, READ_WRITE, self._selector.get_key(self._link).data)

    def flush(self) -> None:
        """Called when the socket takes more."""
        with self._lock:
            while self._waiting:
                data, descriptors = self._waiting[0]
                taken = self._take(data, descriptors)
                if not taken:
                    return
                self.forget(descriptors)
                self._waiting.popleft()
                if taken < len(data):
                    self._waiting.appendleft((data[taken:], []))
                    return
            self._selector.modify(self._link, selectors.EVENT_READ, self._selector.get_key(self._link).data)

    def close(self) -> None:
        """Gives up what still waits."""
        with self._lock:
            self._closed = True
            for _, descriptors in self._waiting:
                self.forget(descriptors)
            self._waiting.clear()

    @staticmethod
    def keep(descriptors: Sequence[int]) -> list[int]:
        """Copies of descriptors that their owner may close."""
        return own_copies(list(descriptors))

    @staticmethod
    def forget(descriptors: Sequence[int]) -> None:
        """Closes such copies."""
        for descriptor in descriptors:
            os.close(descriptor)

    def _take(self, data: bytes, descriptors: Sequence[int]) -> int:
        try:
            return wire.send(self._link, data, descriptors)
        except ConnectionError:
            # The reading thread finds out by itself, and resolves the jobs.
            return len(data)


def _encoded(message: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    try:
        return wire.encode(message, blobs, orjson.dumps)
    except orjson.JSONEncodeError:
        # File names of any bytes, which it does not take.
        return wire.encode(message, blobs)


def parsed(data: bytes) -> Any:
    """What a fork server has encoded."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        # The same, the other way round.
        return wire.from_json(data)
