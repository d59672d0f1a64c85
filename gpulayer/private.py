"""The private set-up: what a user has who gives no server, started by the first command that needs it.

`ensure_private` is the clients' side: when the queue answers and its supervisor lives, it costs one connect; else a
supervisor is started, detached from the client, and waited for. Clients at once make one set-up. While a process that
called it lives, the set-up does not stop for idleness, unless it gives up its share, as its last client that is closed
does. `python -m gpulayer.private` is the supervisor's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulayer_broker.alive import go_on, holder_goes_on, is_stopped, wait_for_end
from gpulayer_broker.embedded import (
    STOP_DEADLINE_S,
    ServerInfo,
    hold_in_use,
    running_server,
    server_answers,
    server_endpoint,
    stop_server,
)
from gpulayer_broker.errors import ConfigError, GpulayerError, QueueUnreachable
from gpulayer_broker.folders import Folders, locate_folders
from gpulayer_broker.locks import FileLock, holder_pid, is_held, wait_lock, wait_until_free
from gpulayer_broker.room import check_room
from gpulayer_broker.settings import Settings, load_settings

if TYPE_CHECKING:
    from gpulayer_broker.connection import Endpoint

START_DEADLINE_S = 30.0
POLL_S = 0.005
EXIT_S = 10.0
OPEN_STATES = ("queued", "scheduled", "running")
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"

# This process's share of each set-up that it uses, by the set-up's folder.
_shares: dict[Path, FileLock] = {}


def ensure_private(
    settings: Settings, *, worker_program: Sequence[str] | None = None, deadline_s: float = START_DEADLINE_S
) -> Endpoint:
    """The address of this user's private queue, which is started if need be; its worker may still be starting."""
    if not settings.private:
        raise ConfigError(
            "no server is given and GPULAYER_PRIVATE=off refuses a private one: give --redis URL or "
            "GPULAYER_REDIS_URL, or set GPULAYER_PRIVATE=on"
        )
    folders = locate_folders().create()
    _take_share(folders)
    # One that stands still holds its lock and keeps nothing; server and worker it lets go on itself.
    holder_goes_on(folders.supervisor_lock)
    end = time.monotonic() + deadline_s
    waited = False
    while not (is_held(folders.supervisor_lock) and server_answers(folders)):
        check_room(folders)
        if time.monotonic() >= end:
            raise QueueUnreachable(
                f"the private queue does not answer after {deadline_s:g} s: see {folders.supervisor_log}"
            )
        if not is_held(folders.supervisor_lock):
            if waited:
                _raise_failure(folders)
            _start_supervisor(folders, settings, worker_program or default_worker())
        waited = True
        time.sleep(POLL_S)
    if waited:
        _renew_functions(folders)
    return server_endpoint(folders)


def release_private() -> None:
    """Give up this process's share: it is no longer a reason to keep the set-up up."""
    while _shares:
        _shares.popitem()[1].close()


def down() -> list[str]:
    """Stop this user's private set-up, data kept; what was stopped, by name and process id."""
    from gpulayer.supervisor import STOP_MARGIN_S, stop_worker

    folders = locate_folders().create()
    grace_s = load_settings().term_grace_s
    before = {name: pid for name, pid in _process_ids(folders).items() if pid is not None}
    if "supervisor" in before:
        _stop_supervisor(folders, before["supervisor"], 2 * grace_s + 2 * STOP_MARGIN_S + STOP_DEADLINE_S)
    stop_worker(folders.worker_lock(worker_name()), None, grace_s)
    stop_server(folders)
    return [f"{name} (pid {pid})" for name, pid in before.items()]


def status() -> dict[str, Any]:
    """What runs of this user's private set-up, and where its data are; a part that does not run is None."""
    folders = locate_folders().create()
    ids = _process_ids(folders)
    server = running_server(folders)
    return {
        "supervisor": _process(ids["supervisor"]),
        "server": None if server is None else _server(server, folders),
        "worker": _process(ids["worker"]),
        "socket": server_endpoint(folders).path,
        "data": str(folders.state),
    }


def origin() -> str:
    """Which installation of GPUlayer this process runs: its Python's folder, and when the package was written there."""
    return f"{sys.prefix}\n{os.stat(__file__).st_mtime_ns}"


def strangeness(folders: Folders) -> list[str]:
    """What a client should know of a set-up that was started from another installation, or by one that was updated."""
    try:
        theirs = folders.supervisor_origin.read_text()
    except OSError:
        return []
    if theirs == (ours := origin()):
        return []
    prefix = theirs.partition("\n")[0]
    if prefix == ours.partition("\n")[0]:
        return [
            "GPUlayer was updated, and the private set-up still runs what was there before: "
            "gpulayer down, and the next command starts the new one"
        ]
    return [
        f"the private set-up was started from {prefix}, and jobs run in that Python: "
        "gpulayer down, and the next command starts it from here"
    ]


def worker_name() -> str:
    """The name of the private set-up's worker: this machine's."""
    import platform

    return platform.node() or "local"


def default_worker() -> list[str]:
    """The program of the worker; where to find the queue and whom to be is appended."""
    return [sys.executable, "-P", "-m", "gpulayer_worker"]


def _process_ids(folders: Folders) -> dict[str, int | None]:
    return {
        "worker": holder_pid(folders.worker_lock(worker_name())),
        "server": holder_pid(folders.server_lock),
        "supervisor": holder_pid(folders.supervisor_lock),
    }


def _server(server: ServerInfo, folders: Folders) -> dict[str, Any]:
    answers = bool(server.version) and server_answers(folders)
    facts = {"version": server.version or None, "answers": answers, "writes": server.writes}
    return {**_process_facts(server.pid), **facts}


def _process(pid: int | None) -> dict[str, Any] | None:
    return None if pid is None else _process_facts(pid)


def _process_facts(pid: int) -> dict[str, Any]:
    import psutil

    facts = {"pid": pid, "stopped": is_stopped(pid)}
    try:
        return {**facts, "uptime_s": round(time.time() - psutil.Process(pid).create_time(), 1)}
    except psutil.Error:
        return {**facts, "uptime_s": None}


def _renew_functions(folders: Folders) -> None:
    """What the data of an older build held is not called, not even before the supervisor has come to replace it."""
    from gpulayer_broker import library
    from gpulayer_broker.connection import Link

    with suppress(QueueUnreachable), Link(server_endpoint(folders)) as link:
        library.renew(link)


def _take_share(folders: Folders) -> None:
    if folders.state not in _shares:
        _shares[folders.state] = hold_in_use(folders)


def _raise_failure(folders: Folders) -> None:
    """Raise why the supervisor that has ended gave up, if it did."""
    path = folders.supervisor_failure
    if path.exists():
        raise ConfigError(path.read_text())


def _start_supervisor(folders: Folders, settings: Settings, worker_program: Sequence[str]) -> None:
    """Start a supervisor of its own session; returns when its lock is taken, or another's."""
    folders.supervisor_failure.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "gpulayer.private", "--detach", "--", *worker_program]
    with open(folders.supervisor_log, "ab") as log:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **settings.as_environment()},
            start_new_session=True,
            check=False,
        )
    if ended.returncode:
        raise ConfigError(f"the private set-up cannot be started: see {folders.supervisor_log}")


def _stop_supervisor(folders: Folders, pid: int, deadline_s: float) -> None:
    import signal

    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        go_on(pid)
        if not wait_until_free(folders.supervisor_lock, deadline_s):
            os.kill(pid, signal.SIGKILL)
    wait_for_end(pid, EXIT_S)


def open_jobs(folders: Folders, namespace: str) -> Callable[[], bool]:
    """Whether the queue holds a job that is not final; a queue that cannot be asked may."""
    from gpulayer_broker.connection import Link
    from gpulayer_broker.keys import Keys, root_of

    keys = Keys(root_of(namespace))

    def busy() -> bool:
        try:
            with Link(server_endpoint(folders)) as link:
                return any(link.call("ZCARD", keys.jobs(state)) for state in OPEN_STATES)
        except GpulayerError:
            return True

    return busy


def main(arguments: Sequence[str]) -> int:
    """The supervisor's process: `[--detach] [-- WORKER PROGRAM …]`."""
    head, program = _split(arguments)
    settings = load_settings()
    folders = locate_folders().create()
    lock = wait_lock(folders.supervisor_lock, 1.0)
    if lock is None:
        return 0
    # The lock is taken before the fork, so that whoever waits for this process finds it held.
    if "--detach" in head and os.fork():
        return 0
    with lock:
        lock.record_pid(os.getpid())
        folders.supervisor_origin.write_text(origin())
        os.chdir("/")
        return _supervise(folders, settings, program or default_worker())


def _supervise(folders: Folders, settings: Settings, program: Sequence[str]) -> int:
    import logging

    from gpulayer.supervisor import Supervisor

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    name = worker_name()
    worker = [*program, "--name", name, "--namespace", settings.namespace, "--private"]
    busy = open_jobs(folders, settings.namespace)
    return Supervisor(folders, settings, worker, name, busy).run()


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:at]), list(arguments[at + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
