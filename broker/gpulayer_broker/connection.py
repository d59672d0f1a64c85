"""One owned connection to the queue server: the only place that talks RESP.

What a `Link` guarantees:

- A call returns or raises within its time limit, half-open connections included: every socket has a timeout,
  nothing below retries, and waiting for another thread's exchange counts.
- `call` sends a command at most once. When the answer is lost it raises NoAnswer (a QueueUnreachable), whose
  `sent` tells whether the server may have run the command. `call_idempotent` re-sends: for what bears it.
- A reply is never given to another call: after anything but a complete exchange the socket is dropped, and
  before a command is sent a socket that already has something to read (a close, unasked bytes) is dropped
  too.
- It is safe between threads (one exchange at a time) and across a fork (the child opens its own connection).

RESP2 is spoken, whatever the server offers: the shapes of FCALL replies are then the same everywhere. Replies
are bytes, integers, None and lists of them.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpulayer_broker.endpoint import Endpoint
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.replies import NoAnswer, ReplyError

if TYPE_CHECKING:
    import redis

    from gpulayer_broker.dialing import Wire

__all__ = ["Endpoint", "Link", "NoAnswer", "ReplyError", "connect", "plain_client"]

Arg = bytes | str | int | float
SOCKET_TIMEOUT_S = 5.0
_loading = threading.Lock()
RECONNECT_FIRST_S = 0.01
RECONNECT_MOST_S = 0.5


class Link:
    """One connection with its owner's time limit; the first call, and the first after a loss, opens it."""

    def __init__(self, endpoint: Endpoint, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self.endpoint = endpoint
        self.socket_timeout_s = socket_timeout_s
        self.connects = 0
        self._closed = False
        self._forget()

    def __repr__(self) -> str:
        return f"Link({self.endpoint}, {self.socket_timeout_s} s)"

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *args: Arg, timeout_s: float | None = None) -> Any:
        """The reply to one command, sent at most once; an error reply is raised as its own class."""
        reply = self._exchange([args], self.socket_timeout_s if timeout_s is None else timeout_s)[0]
        if isinstance(reply, GpulayerError):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[tuple[Arg, ...]], timeout_s: float | None = None) -> list[Any]:
        """The replies to many commands in one send, in order; error replies stand in it, not raised."""
        if not commands:
            return []
        return self._exchange(commands, self.socket_timeout_s if timeout_s is None else timeout_s)

    def block(self, *args: Arg, timeout_s: float) -> Any:
        """The reply to a command that may wait on the server for `timeout_s`, such as XREAD BLOCK."""
        return self.call(*args, timeout_s=timeout_s + self.socket_timeout_s)

    def call_idempotent(self, *args: Arg, deadline_s: float) -> Any:
        """The reply to a command that may be sent again, tried until `deadline_s` from now.

        What passes (a lost connection, a loading server, a failover) is waited out; any other error is
        raised at once.
        """
        end = time.monotonic() + deadline_s
        try:
            return self.call(*args, timeout_s=min(self.socket_timeout_s, deadline_s))
        except NoAnswer as lost:
            reply = self._sent_again([args], end, lost)[0]
        if isinstance(reply, GpulayerError):
            raise reply
        return reply

    def pipeline_idempotent(self, commands: Sequence[tuple[Arg, ...]], *, deadline_s: float) -> list[Any]:
        """As `pipeline`, for commands that may all be sent again: what passes is waited out for each of them."""
        end = time.monotonic() + deadline_s
        try:
            return _answered(self.pipeline(commands, min(self.socket_timeout_s, deadline_s)))
        except NoAnswer as lost:
            return self._sent_again(commands, end, lost)

    def _sent_again(self, commands: Sequence[tuple[Arg, ...]], end: float, lost: NoAnswer) -> list[Any]:
        """The replies, once they come; at the end of the time the last fault is raised."""
        pause_s = RECONNECT_FIRST_S
        while not self._closed and (left_s := end - time.monotonic()) > 0:
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(RECONNECT_MOST_S, pause_s * 2)
            left_s = max(0.001, end - time.monotonic())
            try:
                return _answered(self.pipeline(commands, min(self.socket_timeout_s, left_s)))
            except NoAnswer as error:
                lost = error
        raise lost

    def close(self) -> None:
        """Close for good; a call that another thread has in flight ends with NoAnswer."""
        self._closed = True
        wire = self._wire
        if wire is not None and self._pid == os.getpid():
            with suppress(OSError):
                wire.sock.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=self.socket_timeout_s):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        """Start without a connection: after a fork neither the socket nor the lock is this process's."""
        self._wire: Wire | None = None
        self._poll: select.poll | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _exchange(self, commands: Sequence[tuple[Arg, ...]], timeout_s: float) -> list[Any]:
        if self._pid != os.getpid():
            self._leave_to_parent()
        if not self._lock.acquire(timeout=timeout_s):
            raise self._unreachable("another thread holds this connection")
        try:
            wire = self._ready(timeout_s)
            wire.send(commands)
            return [wire.read() for _ in commands]
        except BaseException:
            self._drop()
            raise
        finally:
            self._lock.release()

    def _ready(self, timeout_s: float) -> Wire:
        """An open wire whose socket has nothing to say, its timeout set."""
        if self._closed:
            raise self._unreachable("this connection was closed")
        if self._poll is not None and self._poll.poll(0):
            self._drop()
        wire = self._wire or self._open(timeout_s)
        if wire.sock.gettimeout() != timeout_s:
            wire.sock.settimeout(timeout_s)
        return wire

    def _open(self, timeout_s: float) -> Wire:
        wire: Wire = _driver().dial(self.endpoint, min(timeout_s, self.socket_timeout_s))
        self.connects += 1
        self._wire = wire
        # `close` first sets the flag and then looks for a connection: one of the two sees the other.
        if self._closed:
            raise self._unreachable("this connection was closed")
        # A TLS socket may have something to read that is no reply: its session's tickets.
        if not self.endpoint.tls:
            self._poll = select.poll()
            self._poll.register(wire.sock, select.POLLIN)
        return wire

    def _drop(self) -> None:
        wire, self._wire, self._poll = self._wire, None, None
        if wire is not None:
            wire.close()

    def _leave_to_parent(self) -> None:
        """Close this process's copy of an inherited socket, without a word to the server."""
        wire = self._wire
        self._forget()
        if wire is not None:
            wire.close()

    def _unreachable(self, why: str) -> NoAnswer:
        return NoAnswer(f"queue at {self.endpoint}: {why}", sent=False)


def _answered(replies: list[Any]) -> list[Any]:
    """The replies, unless one of them says that the server could not answer just now."""
    for reply in replies:
        if isinstance(reply, NoAnswer):
            raise reply
    return replies


def _driver() -> Any:
    """The module that loads redis-py, at the first connection.

    One thread at a time: two whose first calls meet would import its parts in opposite orders, which Python breaks
    off with an error.
    """
    with _loading:
        from gpulayer_broker import dialing
    return dialing


def connect(url: str | Endpoint, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> Link:
    """An open link to the server at `url`; raises at once when nobody answers there."""
    endpoint = Endpoint.parse(url) if isinstance(url, str) else url
    link = Link(endpoint, socket_timeout_s=socket_timeout_s)
    link.call("PING")
    return link


def plain_client(endpoint: Endpoint, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A redis-py client of the same server, for what is neither hot nor delicate; it does not retry."""
    client: redis.Redis = _driver().client_of(endpoint, socket_timeout_s)
    return client
