"""Opens connections to a queue server: TCP with keepalive, TLS, unix, the primary that sentinels name.

Every connection has a time limit on connect, read and write, and no retry below: whoever owns it decides
about another try. What redis-py raises passes through.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Protocol

from gpulayer_broker.endpoint import Endpoint

PROTOCOL = 2


class Connection(Protocol):
    """What is used of redis-py's low-level connections, which carry no types of their own."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def pack_command(self, *args: object) -> list[bytes]: ...
    def pack_commands(self, commands: Sequence[tuple[Any, ...]]) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None: ...
    def read_response(self) -> Any: ...
    def _get_socket(self) -> socket.socket | None: ...


def dial(endpoint: Endpoint, timeout_s: float) -> Connection:
    """A connected, authenticated connection on the endpoint's database; RedisError when there is none."""
    if endpoint.sentinels:
        host, port = primary_of(endpoint, timeout_s)
        return _connected(
            _tcp(endpoint, host, port, timeout_s, endpoint.username, endpoint.password, endpoint.db)
        )
    if endpoint.is_unix:
        return _connected(_unix(endpoint, timeout_s))
    return _connected(
        _tcp(
            endpoint,
            endpoint.host,
            endpoint.port,
            timeout_s,
            endpoint.username,
            endpoint.password,
            endpoint.db,
        )
    )


def primary_of(endpoint: Endpoint, timeout_s: float) -> tuple[str, int]:
    """Host and port of the service's primary, from the first sentinel that knows it."""
    from redis.exceptions import ConnectionError, RedisError

    failures = []
    for host, port in endpoint.sentinels:
        try:
            return _ask_sentinel(endpoint, host, port, timeout_s)
        except RedisError as error:
            failures.append(f"{host}:{port}: {error}")
    raise ConnectionError(f"no sentinel knows a primary of {endpoint.service!r}: {'; '.join(failures)}")


def _ask_sentinel(endpoint: Endpoint, host: str, port: int, timeout_s: float) -> tuple[str, int]:
    from redis.exceptions import ConnectionError

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
    from redis.connection import UnixDomainSocketConnection

    make: Any = UnixDomainSocketConnection
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
    from redis import connection as kinds

    options: dict[str, Any] = {"username": username, "password": password, "db": db, **_limits(timeout_s)}
    make: Any = kinds.SSLConnection if endpoint.tls else kinds.Connection
    connection: Connection = make(
        host=host, port=port, socket_keepalive=True, **dict(endpoint.tls_options), **options
    )
    return connection


def _limits(timeout_s: float) -> dict[str, Any]:
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": PROTOCOL,
    }
