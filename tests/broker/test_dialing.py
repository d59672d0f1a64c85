"""The ways to a server: plain TCP, TLS with a given authority, the primary that sentinels name, also the next."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from gpulayer_broker.connection import Endpoint, Link, connect, plain_client
from gpulayer_broker.errors import QueueUnreachable
from tests.servers import QueueServer, server_binary
from tests.support import PATIENCE_S, wait_until

StartServer = Callable[..., QueueServer]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_tcp_reaches_the_server_with_keepalive_on(queue_server: StartServer) -> None:
    port = free_port()
    queue_server("--port", str(port), "--bind", "127.0.0.1")

    with connect(f"redis://127.0.0.1:{port}/2") as link:
        sock = link._wire.sock if link._wire else None
        assert sock is not None
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert b" db=2 " in link.call("CLIENT", "INFO") + b" "


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    out = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(
        ["openssl", "req", *kind.split(), "-addext", "subjectAltName=DNS:localhost", *out],
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return paths


@contextmanager
def tls_front(server: QueueServer, certificate: tuple[Path, Path]) -> Iterator[int]:
    """A port that speaks TLS and passes everything on to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    peers: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def accept_all(listener: socket.socket) -> None:
        while True:
            try:
                peer = context.wrap_socket(listener.accept()[0], server_side=True)
            except ssl.SSLError:
                continue
            except OSError:
                return
            inner = socket.socket(socket.AF_UNIX)
            inner.connect(server.endpoint.path)
            peers.extend((peer, inner))
            for pair in ((peer, inner), (inner, peer)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept_all, args=(listener,))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
            for peer in peers:
                peer.close()


def test_tls_reaches_a_server_whose_authority_is_given(
    queue_server: StartServer, certificate: tuple[Path, Path]
) -> None:
    with tls_front(queue_server(), certificate) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate[0]}"
        with connect(url) as link:
            assert link.call("ECHO", b"x" * 100_000) == b"x" * 100_000
        with closing(plain_client(Endpoint.parse(url))) as client:
            assert client.ping()


def test_tls_refuses_a_server_that_nobody_vouches_for(
    queue_server: StartServer, certificate: tuple[Path, Path]
) -> None:
    with (
        tls_front(queue_server(), certificate) as port,
        pytest.raises(QueueUnreachable, match="certificate verify failed"),
    ):
        connect(f"rediss://localhost:{port}/0")


@contextmanager
def sentinel_of(primary_port: int, folder: Path) -> Iterator[int]:
    """The port of a sentinel that watches the primary under the name `main`."""
    port = free_port()
    configuration = folder / "sentinel.conf"
    configuration.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor main 127.0.0.1 {primary_port} 1\nsentinel down-after-milliseconds main 60000\n"
    )
    with open(folder / "sentinel.log", "wb") as log:
        sentinel = subprocess.Popen(
            [server_binary(), str(configuration), "--sentinel"], stdout=log, stderr=log
        )
    try:
        with Link(Endpoint(host="127.0.0.1", port=port)) as link:
            assert link.call_idempotent("PING", deadline_s=PATIENCE_S) == b"PONG"
        yield port
    finally:
        sentinel.terminate()
        sentinel.wait(PATIENCE_S)


def replica_is_linked(sentinel: Link) -> bool:
    replicas = sentinel.call("SENTINEL", "replicas", "main")
    return any(dict(zip(r[::2], r[1::2], strict=True))[b"master-link-status"] == b"ok" for r in replicas)


def test_sentinels_lead_to_the_primary_and_after_a_failover_to_the_next(
    tmp_path: Path, queue_server: StartServer
) -> None:
    ports = [free_port(), free_port()]
    queue_server("--port", str(ports[0]), "--bind", "127.0.0.1")
    replica = queue_server(
        "--port", str(ports[1]), "--bind", "127.0.0.1", "--replicaof", "127.0.0.1", str(ports[0])
    )
    with (
        sentinel_of(ports[0], tmp_path) as port,
        connect(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main/0") as link,
        Link(Endpoint(host="127.0.0.1", port=port)) as sentinel,
        Link(replica.endpoint) as next_primary,
    ):
        assert link.call("ROLE")[0] == b"master"
        wait_until(lambda: replica_is_linked(sentinel), PATIENCE_S, "the sentinel knows the replica")
        link.call("SET", "a", "1")
        assert link.call("WAIT", 1, 5000) == 1

        sentinel.call("SENTINEL", "failover", "main")
        wait_until(lambda: next_primary.call("ROLE")[0] == b"master", PATIENCE_S, "the replica was promoted")

        def writes_to_next() -> bool:
            link.call_idempotent("SET", "b", "2", deadline_s=PATIENCE_S)
            return bool(next_primary.call("GET", "b") == b"2")

        wait_until(writes_to_next, PATIENCE_S, "the link follows the failover")
        assert link.call("GET", "a") == b"1"


def test_a_service_that_no_sentinel_knows_is_told(tmp_path: Path, queue_server: StartServer) -> None:
    primary_port = free_port()
    queue_server("--port", str(primary_port), "--bind", "127.0.0.1")

    with (
        sentinel_of(primary_port, tmp_path) as port,
        pytest.raises(QueueUnreachable, match="no sentinel knows a primary of 'other'"),
    ):
        connect(f"redis+sentinel://127.0.0.1:{port}/other/0")
