"""The link: one exchange at a time, each within its limit, never another's reply; errors by kind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulayer_broker.connection import (
    Endpoint,
    Link,
    NoAnswer,
    ReplyError,
    connect,
    plain_client,
)
from gpulayer_broker.errors import (
    NotAllowed,
    QueueUnreachable,
    ServerOutOfMemory,
    ServerTooOld,
    UnsafeEviction,
)
from gpulayer_broker.server_check import check_server
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

StartServer = Callable[..., QueueServer]
SILENCE = b""


@pytest.fixture
def root() -> str:
    """Keys of no job's: these tests are about the connection alone."""
    return f"{uuid.uuid4().hex}:"


def test_a_call_returns_bytes(link: Link, root: str) -> None:
    assert link.call("SET", root + "a", b"\x00\xff") == b"OK"

    assert link.call("GET", root + "a") == b"\x00\xff"
    assert link.call("GET", root + "none") is None


def test_a_pipeline_answers_in_order_and_holds_its_errors(link: Link, root: str) -> None:
    replies = link.pipeline([("SET", root + "a", "1"), ("LPUSH", root + "a", "x"), ("INCR", root + "a")])

    assert replies[0] == b"OK"
    assert isinstance(replies[1], ReplyError)
    assert replies[1].word == "WRONGTYPE"
    assert replies[2] == 2
    assert link.connects == 1


def test_an_error_reply_is_raised_with_its_code_and_keeps_the_connection(link: Link) -> None:
    with pytest.raises(ReplyError, match="unknown command") as raised:
        link.call("NOSUCH")

    assert raised.value.word == "ERR"
    assert link.call("PING") == b"PONG"
    assert link.connects == 1


def test_a_block_outlasts_the_socket_timeout(valkey: Endpoint, root: str) -> None:
    with Link(valkey, socket_timeout_s=0.2) as link:
        started = time.monotonic()
        reply = link.block("XREAD", "BLOCK", 500, "STREAMS", root + "s", "$", timeout_s=0.5)

    assert reply is None
    assert time.monotonic() - started >= 0.5


def test_a_half_open_connection_ends_within_the_socket_timeout() -> None:
    with scripted_server(SILENCE, socket_timeout_s=2 * PATIENCE_S) as link:
        started = time.monotonic()
        with pytest.raises(NoAnswer) as raised:
            link.call("PING", timeout_s=0.3)

        assert time.monotonic() - started < PATIENCE_S
        assert raised.value.sent


def test_a_peer_that_never_greets_ends_within_the_socket_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(Endpoint(host="127.0.0.1", port=listener.getsockname()[1]), socket_timeout_s=0.3)
        with pytest.raises(NoAnswer) as raised:
            link.call("PING")

    assert not raised.value.sent


def test_a_refused_connection_says_where_and_how_to_start_one(tmp_path: Path) -> None:
    link = Link(Endpoint.unix(str(tmp_path / "none.sock")))

    with pytest.raises(NoAnswer, match=r"none\.sock.*start") as raised:
        link.call("PING")

    assert not raised.value.sent
    assert "\n" not in str(raised.value)


def test_an_answer_that_comes_too_late_reaches_nobody(valkey: Endpoint, root: str) -> None:
    with Link(valkey) as link, Link(valkey) as other:
        with pytest.raises(QueueUnreachable):
            link.call("BLPOP", root + "list", 0, timeout_s=0.2)
        other.call("RPUSH", root + "list", "late")

        assert link.call("ECHO", "mine") == b"mine"
        assert link.connects == 2


def test_an_exception_in_mid_exchange_drops_the_socket(valkey: Endpoint, root: str) -> None:
    """As Ctrl-C does: the reply under way must not be read as the next call's."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Link(valkey) as link, ThreadPoolExecutor(1) as pool:
            blocked = f"id={link.call('CLIENT', 'ID')} "
            pool.submit(interrupt_in_blpop, valkey, blocked)
            with pytest.raises(KeyboardInterrupt):
                link.block("BLPOP", root + "list", 2 * PATIENCE_S, timeout_s=2 * PATIENCE_S)

            assert link.call("ECHO", "mine") == b"mine"
            assert link.connects == 2
    finally:
        signal.signal(signal.SIGALRM, previous)


def interrupt_in_blpop(valkey: Endpoint, client: str) -> None:
    """A signal to this process when that client's call has reached the server."""
    with Link(valkey) as link:
        wait_until(lambda: is_in_blpop(link, client), PATIENCE_S, "the server has the call")
    os.kill(os.getpid(), signal.SIGALRM)


def is_in_blpop(link: Link, client: str) -> bool:
    clients = link.call("CLIENT", "LIST").decode().splitlines()
    return any(each.startswith(client) and "cmd=blpop" in each for each in clients)


def test_threads_share_a_link_without_mixing_replies(valkey: Endpoint) -> None:
    def echo(number: int) -> bool:
        return bool(link.call("ECHO", f"{number}") == f"{number}".encode())

    with Link(valkey, socket_timeout_s=PATIENCE_S) as link, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(echo, range(2_000)))
        assert link.connects == 1


def test_a_thread_does_not_wait_for_anothers_block_past_its_own_limit(valkey: Endpoint, root: str) -> None:
    with Link(valkey, socket_timeout_s=5) as link:
        link.call("PING")
        with ThreadPoolExecutor(1) as pool, Link(valkey) as other:
            pool.submit(link.block, "BLPOP", root + "list", PATIENCE_S, timeout_s=PATIENCE_S)
            wait_until(link._lock.locked, PATIENCE_S, "the other thread holds the link")

            with pytest.raises(QueueUnreachable, match="another thread"):
                link.call("PING", timeout_s=0.1)
            other.call("RPUSH", root + "list", "end")


def test_close_ends_a_block_of_another_thread(valkey: Endpoint, root: str) -> None:
    link = Link(valkey)
    link.call("PING")
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(link.block, "BLPOP", root + "list", 2 * PATIENCE_S, timeout_s=2 * PATIENCE_S)
        wait_until(link._lock.locked, PATIENCE_S, "the other thread holds the link")
        link.close()

        with pytest.raises(QueueUnreachable):
            blocked.result(PATIENCE_S)
    with pytest.raises(QueueUnreachable, match="closed"):
        link.call("PING")


def test_a_fork_opens_its_own_connection(link: Link) -> None:
    parent_id = link.call("CLIENT", "ID")

    child = os.fork()
    if child == 0:
        os._exit(0 if link.call("CLIENT", "ID") != parent_id else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert link.call("CLIENT", "ID") == parent_id


def test_a_call_after_a_restart_reconnects_before_it_sends(queue_server: StartServer) -> None:
    server = queue_server()
    with connect(server.endpoint) as link:
        server.kill()
        server.start()

        assert link.call("PING") == b"PONG"
        assert link.connects == 2


def test_a_call_whose_server_dies_under_it_is_told_as_sent(queue_server: StartServer) -> None:
    server = queue_server()
    with connect(server.endpoint) as link, ThreadPoolExecutor(1) as pool:
        pending = pool.submit(link.call, "BLPOP", "list", 0)
        wait_until(link._lock.locked, PATIENCE_S, "the call is under way")
        with connect(server.endpoint) as observer:
            wait_until(
                lambda: b"cmd=blpop" in observer.call("CLIENT", "LIST"), PATIENCE_S, "the server has the call"
            )
        server.kill()

        with pytest.raises(NoAnswer) as raised:
            pending.result(PATIENCE_S)
    assert raised.value.sent


def test_an_idempotent_call_outlives_a_restart(queue_server: StartServer) -> None:
    server = queue_server()
    with connect(server.endpoint) as link, ThreadPoolExecutor(1) as pool:
        server.kill()
        pending = pool.submit(link.call_idempotent, "SET", "a", "1", deadline_s=PATIENCE_S)
        server.start()

        assert pending.result(PATIENCE_S) == b"OK"


def test_an_idempotent_call_gives_up_at_its_deadline() -> None:
    with scripted_server(SILENCE, socket_timeout_s=0.2) as link:
        started = time.monotonic()
        with pytest.raises(QueueUnreachable):
            link.call_idempotent("PING", deadline_s=1)

        assert 0.9 < time.monotonic() - started < PATIENCE_S
        assert link.connects > 1


def test_an_idempotent_call_raises_other_errors_at_once(link: Link) -> None:
    started = time.monotonic()
    with pytest.raises(ReplyError):
        link.call_idempotent("NOSUCH", deadline_s=2 * PATIENCE_S)

    assert time.monotonic() - started < PATIENCE_S


def test_a_full_server_is_told_as_out_of_memory(queue_server: StartServer) -> None:
    server = queue_server("--maxmemory", "1")
    with connect(server.endpoint) as link, pytest.raises(ServerOutOfMemory, match="maxmemory"):
        link.call("SET", "a", "1")


def test_a_missing_or_wrong_password_is_not_allowed(queue_server: StartServer) -> None:
    server = queue_server("--requirepass", "right")

    with pytest.raises(NotAllowed, match="asks for a password"):
        connect(server.endpoint)
    with pytest.raises(NotAllowed, match="refused user or password") as raised:
        connect(Endpoint(path=server.endpoint.path, password="wr0ng"))
    assert "wr0ng" not in str(raised.value)
    connect(Endpoint(path=server.endpoint.path, password="right")).close()


def test_a_command_outside_the_login_is_not_allowed(queue_server: StartServer) -> None:
    server = queue_server()
    with connect(server.endpoint) as admin:
        admin.call("ACL", "SETUSER", "worker", "on", ">secret", "+ping", "~*")

    login = Endpoint(path=server.endpoint.path, username="worker", password="secret")
    with connect(login) as link, pytest.raises(NotAllowed, match="does not allow"):
        link.call("GET", "a")


def test_the_plain_client_reaches_the_same_server(link: Link, valkey: Endpoint, root: str) -> None:
    link.call("SET", root + "a", "1")
    client = plain_client(valkey)

    assert client.get(root + "a") == b"1"
    client.close()


def test_a_safe_server_passes_the_check_without_a_word(queue_server: StartServer) -> None:
    with connect(queue_server(append_only=True).endpoint) as link:
        assert check_server(link) == []


def test_a_server_without_an_append_only_file_is_warned_about(queue_server: StartServer) -> None:
    with connect(queue_server().endpoint) as link:
        (warning,) = check_server(link)

    assert "appendonly" in warning


def test_a_server_that_still_reads_its_file_is_not_said_to_have_none() -> None:
    facts = b"valkey_version:9.0.0\r\nmaxmemory_policy:noeviction\r\naof_enabled:0\r\nloading:1\r\n"
    info = b"$%d\r\n%s\r\n" % (len(facts), facts)
    with scripted_server(info, info, info) as link:
        assert check_server(link) == []


def test_a_server_that_may_evict_jobs_is_refused(queue_server: StartServer) -> None:
    server = queue_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")

    with connect(server.endpoint) as link, pytest.raises(UnsafeEviction, match=r"allkeys-lru.*noeviction"):
        check_server(link)


def test_an_eviction_policy_without_a_memory_limit_is_harmless(queue_server: StartServer) -> None:
    server = queue_server("--maxmemory-policy", "allkeys-lru", append_only=True)

    with connect(server.endpoint) as link:
        assert check_server(link) == []


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (b"redis_version:6.2.14\r\n", "Redis 6.2.14"),
        (b"redis_version:7.2.4\r\nvalkey_version:7.0.9\r\n", "Valkey 7.0.9"),
        (b"", "of no known version"),
    ],
)
def test_an_old_server_is_refused_naming_what_is_needed(facts: bytes, named: str) -> None:
    info = b"$%d\r\n%s\r\n" % (len(facts), facts)
    with scripted_server(info, info, info) as link, pytest.raises(ServerTooOld, match=named) as raised:
        check_server(link)

    assert "Redis 7.0" in str(raised.value)
    assert "Valkey 7.2" in str(raised.value)


def test_a_login_that_may_not_read_info_is_warned_that_nothing_was_checked(queue_server: StartServer) -> None:
    server = queue_server()
    with connect(server.endpoint) as admin:
        admin.call("ACL", "SETUSER", "worker", "on", ">secret", "+ping", "~*")

    with connect(Endpoint(path=server.endpoint.path, username="worker", password="secret")) as link:
        (warning,) = check_server(link)
    assert "unchecked" in warning


def test_a_server_that_loads_its_data_is_waited_for() -> None:
    with scripted_server(b"-LOADING Redis is loading the dataset in memory\r\n", b"+PONG\r\n") as link:
        assert link.call_idempotent("PING", deadline_s=10) == b"PONG"


def test_a_full_disk_is_told_in_one_line() -> None:
    refusal = b"-MISCONF Errors writing to the AOF file: No space left on device\r\n"
    with (
        scripted_server(refusal) as link,
        pytest.raises(NoAnswer, match="cannot write to its disk") as raised,
    ):
        link.call("SET", "a", "1")

    assert not raised.value.sent


class ScriptedServer(socketserver.ThreadingTCPServer):
    """Answers each command, whatever it is, with the next of its replies; the last one serves for ever."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, replies: list[bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.replies = replies

    def next_reply(self) -> bytes:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class _Answers(socketserver.BaseRequestHandler):
    server: ScriptedServer

    def handle(self) -> None:
        with suppress(OSError):
            while command := self.request.recv(65536):
                self.request.sendall(b"+OK\r\n" if b"SETINFO" in command else self.server.next_reply())


@contextmanager
def scripted_server(*replies: bytes, socket_timeout_s: float = 2.0) -> Iterator[Link]:
    """A link to a peer that gives these answers; SILENCE as the last is a half-open connection."""
    with ScriptedServer(list(replies)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        address, port = server.server_address[:2]
        try:
            with Link(Endpoint(host=str(address), port=port), socket_timeout_s=socket_timeout_s) as link:
                yield link
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


def test_the_first_calls_of_many_threads_at_once_load_the_driver_once(valkey: Endpoint) -> None:
    script = """
import sys, threading
from gpulayer_broker.connection import Endpoint, Link
assert "redis" not in sys.modules, "loaded before the first connection"
start, failures = threading.Barrier(16), []
def call():
    start.wait()
    try:
        with Link(Endpoint.parse(sys.argv[1])) as link:
            link.call("PING")
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=call) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.exit(repr(failures) if failures else 0)
"""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script, valkey.url], check=True, timeout=PATIENCE_S)


def test_a_link_that_is_dropped_in_a_circle_is_closed_without_a_warning(valkey: Endpoint) -> None:
    gc.collect()
    circle = SimpleNamespace(link=Link(valkey))
    circle.itself = circle
    assert circle.link.call("PING") is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del circle
        gc.collect()
    assert [str(each.message) for each in told if "unclosed" in str(each.message)] == []
