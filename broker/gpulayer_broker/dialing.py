"""Opens connections to a queue server: TCP with keepalive, TLS, unix, the primary that sentinels name.

Every connection has a time limit on connect, read and write, and no retry below: whoever owns it decides
about another try. This is the one module that loads redis-py, which takes a tenth of a second. redis-py opens a
connection and knows what its errors mean; the bytes of every exchange go past it.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import hiredis
import redis
from redis import connection as kinds
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, InvalidResponse, RedisError, ResponseError
from redis.retry import Retry

from gpulayer_broker.endpoint import Endpoint
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.faults import error_of_reply
from gpulayer_broker.packing import packed
from gpulayer_broker.replies import NoAnswer, ReplyError

PROTOCOL = 2
READ_BYTES = 65536
UNFINISHED = object()


class Connection(Protocol):
    """What is used of redis-py's low-level connections, which carry no types of their own."""

    _parser: Any

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_command(self, *args: object) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None: ...
    def read_response(self) -> Any: ...
    def _get_socket(self) -> socket.socket | None: ...


class Wire:
    """An open connection: bytes out, replies in, faults as this project's errors."""

    def __init__(self, connection: Connection, endpoint: Endpoint) -> None:
        sock = connection._get_socket()
        assert sock is not None, "a connection that was just made has a socket"
        self.sock = sock
        # Whoever drops it, in a circle or not: the socket is then closed, without a warning from Python.
        weakref.finalize(self, sock.close).atexit = False
        self._connection = connection
        self._endpoint = endpoint
        self._buffer = bytearray(READ_BYTES)
        self._reader: Any = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=UNFINISHED,
        )

    def send(self, commands: Sequence[tuple[Any, ...]]) -> None:
        """Send all at once. One whose bytes did not all leave was not run; of several, some may have been."""
        try:
            for piece in packed(commands):
                self.sock.sendall(piece)
        except OSError as error:
            raise NoAnswer(f"queue at {self._endpoint}: {error}", sent=len(commands) > 1) from None

    def read(self) -> Any:
        """One reply; an error reply is returned as an exception. A lost connection raises, as `sent`."""
        try:
            while (reply := self._reader.gets()) is UNFINISHED:
                received = self.sock.recv_into(self._buffer)
                if not received:
                    raise ConnectionError("closed by the server")
                self._reader.feed(self._buffer, 0, received)
        except OSError as error:
            raise error_of_reply(ConnectionError(str(error)), self._endpoint, sent=True) from None
        except RedisError as error:
            raise error_of_reply(error, self._endpoint, sent=True) from None
        if not isinstance(reply, RedisError):
            return reply
        if isinstance(reply, ResponseError):
            return error_of_reply(reply, self._endpoint)
        raise error_of_reply(reply, self._endpoint, sent=True)

    def close(self) -> None:
        """Close it; the socket is shut down only in the process that opened it, a fork's copy is just closed."""
        self._connection.disconnect()


def dial(endpoint: Endpoint, timeout_s: float) -> Wire:
    """An authenticated connection on the endpoint's database; NoAnswer, NotAllowed or ConfigError if there is none."""
    try:
        return Wire(_connected(_connection_to(endpoint, timeout_s)), endpoint)
    except RedisError as error:
        fault = error_of_reply(error, endpoint)
        if isinstance(fault, ReplyError):
            # Such as a database that the server has not.
            raise ConfigError(
                f"the queue at {endpoint} takes no connection as it is asked for: {fault}"
            ) from None
        raise fault from None


def client_of(endpoint: Endpoint, timeout_s: float) -> redis.Redis:
    """A redis-py client of the same server that does not retry."""
    place: dict[str, Any] = {"unix_socket_path": endpoint.path}
    if not endpoint.is_unix:
        host, port = primary_of(endpoint, timeout_s) if endpoint.sentinels else (endpoint.host, endpoint.port)
        place = {"host": host, "port": port, "ssl": endpoint.tls, **dict(endpoint.tls_options)}
    place |= {"username": endpoint.username, "password": endpoint.password, "db": endpoint.db}
    return redis.Redis(**place, **_limits(timeout_s))


def _connection_to(endpoint: Endpoint, timeout_s: float) -> Connection:
    if endpoint.is_unix:
        return _unix(endpoint, timeout_s)
    host, port = primary_of(endpoint, timeout_s) if endpoint.sentinels else (endpoint.host, endpoint.port)
    return _tcp(endpoint, host, port, timeout_s, endpoint.username, endpoint.password, endpoint.db)


def primary_of(endpoint: Endpoint, timeout_s: float) -> tuple[str, int]:
    """Host and port of the service's primary, from the first sentinel that knows it."""
    failures = []
    for host, port in endpoint.sentinels:
        try:
            return _ask_sentinel(endpoint, host, port, timeout_s)
        except RedisError as error:
            failures.append(f"{host}:{port}: {error}")
    raise ConnectionError(f"no sentinel knows a primary of {endpoint.service!r}: {'; '.join(failures)}")


def _ask_sentinel(endpoint: Endpoint, host: str, port: int, timeout_s: float) -> tuple[str, int]:
    connection = _connected(
        _tcp(endpoint, host, port, timeout_s, endpoint.sentinel_username, endpoint.sentinel_password, 0)
    )
    try:
        command = connection.pack_command("SENTINEL", "get-master-addr-by-name", endpoint.service)
        connection.send_packed_command(command)
        answer = connection.read_response()
    finally:
        connection.disconnect()
    if not answer:
        raise ConnectionError(f"does not know the service {endpoint.service!r}")
    return answer[0].decode(), int(answer[1])


def _connected(connection: Connection) -> Connection:
    try:
        connection.connect()
    except BaseException:
        connection.disconnect()
        raise
    return connection


def _unix(endpoint: Endpoint, timeout_s: float) -> Connection:
    make: Any = kinds.UnixDomainSocketConnection
    connection: Connection = make(
        path=endpoint.path,
        db=endpoint.db,
        username=endpoint.username,
        password=endpoint.password,
        **_limits(timeout_s),
    )
    return connection


def _tcp(
    endpoint: Endpoint,
    host: str,
    port: int,
    timeout_s: float,
    username: str | None,
    password: str | None,
    db: int,
) -> Connection:
    options: dict[str, Any] = {"username": username, "password": password, "db": db, **_limits(timeout_s)}
    make: Any = kinds.SSLConnection if endpoint.tls else kinds.Connection
    connection: Connection = make(
        host=host, port=port, socket_keepalive=True, **dict(endpoint.tls_options), **options
    )
    return connection


def _limits(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": PROTOCOL,
    }
