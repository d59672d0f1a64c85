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
are bytes, integers, None and lists of them. The connection underneath is redis-py's, driven directly: the
client's `execute_command` costs a third more per call.
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
from gpulayer_broker.replies import NoAnswer, ReplyError, error_of_reply
from gpulayer_broker.server_check import check_server

if TYPE_CHECKING:
    import redis

    from gpulayer_broker.dialing import Connection

__all__ = ["Endpoint", "Link", "NoAnswer", "ReplyError", "check_server", "connect", "plain_client"]

Arg = bytes | str | int | float
SOCKET_TIMEOUT_S = 5.0
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
        pause_s = RECONNECT_FIRST_S
        while True:
            left_s = end - time.monotonic()
            try:
                return self.call(*args, timeout_s=max(0.001, min(self.socket_timeout_s, left_s)))
            except NoAnswer:
                left_s = end - time.monotonic()
                if self._closed or left_s <= 0:
                    raise
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(RECONNECT_MOST_S, pause_s * 2)

    def close(self) -> None:
        """Close for good; a call that another thread has in flight ends with NoAnswer."""
        self._closed = True
        connection = self._connection
        sock = connection._get_socket() if connection is not None else None
        if sock is not None and self._pid == os.getpid():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=self.socket_timeout_s):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        """Start without a connection: after a fork neither the socket nor the lock is this process's."""
        self._connection: Connection | None = None
        self._poll: select.poll | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def _exchange(self, commands: Sequence[tuple[Arg, ...]], timeout_s: float) -> list[Any]:
        if self._pid != os.getpid():
            self._leave_to_parent()
        if not self._lock.acquire(timeout=timeout_s):
            raise self._unreachable("another thread holds this connection", sent=False)
        try:
            connection = self._ready(timeout_s)
            self._send(connection, commands)
            return [self._read(connection) for _ in commands]
        except BaseException:
            self._drop()
            raise
        finally:
            self._lock.release()

    def _ready(self, timeout_s: float) -> Connection:
        """A connected connection whose socket has nothing to say, its timeout set."""
        if self._closed:
            raise self._unreachable("this connection was closed", sent=False)
        if self._poll is not None and self._poll.poll(0):
            self._drop()
        connection = self._connection or self._open(timeout_s)
        sock = connection._get_socket()
        if sock is None:
            raise self._unreachable("connection lost", sent=False)
        if sock.gettimeout() != timeout_s:
            sock.settimeout(timeout_s)
        return connection

    def _open(self, timeout_s: float) -> Connection:
        from redis.exceptions import RedisError

        from gpulayer_broker.dialing import dial

        try:
            connection = dial(self.endpoint, min(timeout_s, self.socket_timeout_s))
        except RedisError as error:
            raise error_of_reply(error, self.endpoint) from None
        self.connects += 1
        self._connection = connection
        # `close` first sets the flag and then looks for a connection: one of the two sees the other.
        if self._closed:
            raise self._unreachable("this connection was closed", sent=False)
        sock = connection._get_socket()
        if sock is not None and not self.endpoint.tls:
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)
        return connection

    def _send(self, connection: Connection, commands: Sequence[tuple[Arg, ...]]) -> None:
        """Send all at once. One whose bytes did not all leave was not run; of several, some may have been."""
        from redis.exceptions import ConnectionError, TimeoutError

        packed = (
            connection.pack_command(*commands[0])
            if len(commands) == 1
            else connection.pack_commands(commands)
        )
        try:
            connection.send_packed_command(packed, check_health=False)
        except (ConnectionError, TimeoutError) as error:
            raise self._unreachable(str(error), sent=len(commands) > 1) from None

    def _read(self, connection: Connection) -> Any:
        """One reply; an error reply is returned as an exception. A lost connection raises, as `sent`."""
        from redis.exceptions import RedisError, ResponseError

        try:
            return connection.read_response()
        except ResponseError as error:
            return error_of_reply(error, self.endpoint)
        except RedisError as error:
            raise error_of_reply(error, self.endpoint, sent=True) from None

    def _drop(self) -> None:
        connection, self._connection, self._poll = self._connection, None, None
        if connection is not None:
            connection.disconnect()

    def _leave_to_parent(self) -> None:
        """Close this process's copy of an inherited socket; redis-py shuts it down only where it was made."""
        connection = self._connection
        self._forget()
        if connection is not None:
            connection.disconnect()

    def _unreachable(self, why: str, *, sent: bool) -> NoAnswer:
        return NoAnswer(f"queue at {self.endpoint}: {why}", sent=sent)


def connect(url: str | Endpoint, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> Link:
    """An open link to the server at `url`; raises at once when nobody answers there."""
    endpoint = Endpoint.parse(url) if isinstance(url, str) else url
    link = Link(endpoint, socket_timeout_s=socket_timeout_s)
    link.call("PING")
    return link


def plain_client(endpoint: Endpoint, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A redis-py client of the same server, for what is neither hot nor delicate; it does not retry."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from gpulayer_broker.dialing import primary_of

    place: dict[str, Any] = {"unix_socket_path": endpoint.path}
    if not endpoint.is_unix:
        host, port = endpoint.host, endpoint.port
        if endpoint.sentinels:
            host, port = primary_of(endpoint, socket_timeout_s)
        place = {"host": host, "port": port, "ssl": endpoint.tls, **dict(endpoint.tls_options)}
    return redis.Redis(
        **place,
        db=endpoint.db,
        username=endpoint.username,
        password=endpoint.password,
        protocol=2,
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=socket_timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
