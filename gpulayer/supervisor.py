"""Keeps a user's private set-up alive: one queue server and one worker, started, adopted, restarted, stopped.

One supervisor lives for a state folder, by a lock that it holds for life. It sees the end of what it keeps by the
locks that server and worker hold for life, so what a former supervisor started is kept as well as its own. It stops
all when no client has been connected and no job been open for a while, or at SIGTERM; a worker that takes its time
then hands back what it runs, at once after a second SIGTERM. The queue's data stay. Nothing here listens, on TCP or
otherwise.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpulayer_broker.alive import go_on, holder_goes_on, wait_for_end
from gpulayer_broker.embedded import (
    bound_file,
    claim_idle,
    ensure_server,
    server_endpoint,
    server_log,
    stop_server,
    sync_data,
    terminate_server,
)
from gpulayer_broker.errors import ConfigError, GpulayerError, QueueUnreachable, StoreError
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import FileLock, block_until_free, holder_pid, is_held
from gpulayer_broker.room import full_disk
from gpulayer_broker.settings import Settings
from gpulayer_broker.store.local import LocalStore

log = logging.getLogger("gpulayer.supervisor")

LOG_MOST_BYTES = 4 * 1024 * 1024
LOG_KEPT_BYTES = 1024 * 1024
CHECK_MOST_S = 5.0
SYNC_EVERY_S = 1.0
LOOK_EVERY_S = 1.0
TIDY_EVERY_S = 3600.0
KEEPER_JOIN_S = 0.2
LOAD_DEADLINE_S = 600.0
STOP_MARGIN_S = 20.0
EXIT_S = 10.0
LASTED_S = 60.0
BACK_OFF_FIRST_S = 0.1
BACK_OFF_MOST_S = 30.0


def worker_log(folders: Folders) -> Path:
    return folders.state / "worker.log"


class BackOff:
    """Pauses between restarts: none at first, then doubling, until something lasted again."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._started = 0.0

    def next_pause_s(self) -> float:
        """How long to wait before the next start, which counts from then."""
        now = time.monotonic()
        pause_s = 0.0 if now - self._started > LASTED_S else self._pause_s
        self._pause_s = min(BACK_OFF_MOST_S, max(BACK_OFF_FIRST_S, pause_s * 2))
        self._started = now + pause_s
        return pause_s


class Supervisor:
    """One life of the private set-up; `run` returns the exit code of the process."""

    def __init__(
        self,
        folders: Folders,
        settings: Settings,
        worker: Sequence[str],
        worker_name: str,
        busy: Callable[[], bool],
    ) -> None:
        self._folders = folders
        self._settings = settings
        self._worker_command = worker
        self._worker_lock = folders.worker_lock(worker_name)
        self._busy = busy
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._served = threading.Event()
        self._keepers = [
            threading.Thread(target=self._guarded, args=(keep,), name=keep.__name__, daemon=True)
            for keep in (
                self._keep_server,
                self._keep_worker,
                self._keep_moving,
                self._keep_synced,
                self._keep_tidy,
            )
        ]
        self._server_since = math.inf
        self._exit_code = 0
        self._signals = 0
        self._full = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Keep the set-up until it is idle, told to stop, or cannot start. The caller holds the supervisor's lock."""
        self._folders.supervisor_failure.unlink(missing_ok=True)
        self._listen_to_signals()
        for keeper in self._keepers:
            keeper.start()
        claim = self._wait_for_the_end()
        self._stop_all()
        if claim is not None:
            claim.close()
        return self._exit_code

    def _listen_to_signals(self) -> None:
        def count(*_: object) -> None:
            self._signals += 1
            self._wake()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, count)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _wake(self) -> None:
        """Wake the main thread; safe in a signal handler, where an Event is not."""
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _pause(self, seconds: float) -> None:
        """Sleep in the main thread until the time is over or something happened."""
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        if ready:
            os.read(self._wake_read, 4096)

    def _fail(self, error: GpulayerError) -> None:
        """Give up, with the reason where the waiting client looks for it."""
        log.error("%s", error)
        self._exit_code = error.exit_code
        try:
            self._folders.supervisor_failure.write_text(str(error))
        except OSError as refused:  # its log tells then, if anything can
            log.error("%s cannot be written: %s", self._folders.supervisor_failure, refused)
        self._stopping.set()
        self._wake()

    def _guarded(self, keep: Callable[[], None]) -> None:
        """A keeper that cannot go on ends the set-up: half of one would look alive."""
        try:
            keep()
        except GpulayerError as error:
            if not self._stopping.is_set():
                self._fail(error)
        except Exception as error:
            log.exception("the supervisor's %s", keep.__name__)
            self._fail(ConfigError(f"the supervisor broke ({error!r}): see {self._folders.supervisor_log}"))

    def _keep_server(self) -> None:
        """Start or adopt a server, and another whenever its lock comes free, its own child or not."""
        back_off = BackOff()
        while not self._stopping.wait(back_off.next_pause_s()):
            try:
                ensure_server(self._folders, deadline_s=LOAD_DEADLINE_S)
            except (QueueUnreachable, OSError) as error:
                if isinstance(error, OSError) and not full_disk(self._folders):
                    raise
                log.warning("%s", error)
                continue
            self._server_since = time.monotonic()
            self._served.set()
            self._configure()
            block_until_free(self._folders.server_lock).close()
            self._server_since = math.inf
            log.info("the queue server ended")

    def _configure(self) -> None:
        """This release's functions, and what the queue itself keeps of the settings.

        A server that has just ended is the next round's.
        """
        # Nothing that starts waits for these imports.
        from gpulayer_broker import library
        from gpulayer_broker.connection import Link
        from gpulayer_broker.queue import Queue

        try:
            with Link(server_endpoint(self._folders)) as link:
                library.renew(link)
                Queue(link, self._settings.namespace).configure(self._settings)
        except QueueUnreachable as error:
            log.warning("%s", error)

    def _keep_worker(self) -> None:
        """Start a worker whenever none holds the worker's lock."""
        back_off = BackOff()
        self._served.wait()
        while True:
            block_until_free(self._worker_lock).close()
            if self._stopping.wait(back_off.next_pause_s()):
                return
            child = self._start_worker()
            if child is None:
                return
            log.info("worker %d started", child.pid)
            log.warning("worker %d ended with code %d", child.pid, child.wait())

    def _keep_moving(self) -> None:
        """A job may stop the processes that it depends on, and their locks would be held for ever."""
        while not self._stopping.wait(LOOK_EVERY_S):
            for name, lock in (("queue server", self._folders.server_lock), ("worker", self._worker_lock)):
                if pid := holder_goes_on(lock):
                    log.warning("%s %d was stopped: it is told to go on", name, pid)

    def _keep_synced(self) -> None:
        """A power cut costs what was written since the last round."""
        failed = False
        while not self._stopping.wait(SYNC_EVERY_S):
            try:
                sync_data(self._folders)
                failed = False
            except OSError as error:
                if not failed:
                    log.error("the queue's file cannot be synced: %s", error)
                failed = True

    def _keep_tidy(self) -> None:
        """What nobody has used for the retention of outputs leaves the store."""
        store = LocalStore(self._folders.store)
        while True:
            try:
                report = store.gc(self._settings.outputs_keep_s)
                if report.blobs:
                    log.info("%d blobs left the store, %d bytes", report.blobs, report.total_bytes)
            except (OSError, StoreError) as error:
                log.error("the store cannot be tidied: %s", error)
            if self._stopping.wait(TIDY_EVERY_S):
                return

    def _start_worker(self) -> subprocess.Popen[bytes] | None:
        """The worker's process, unless the end has begun: then nobody would stop it."""
        with self._starting, open(worker_log(self._folders), "ab") as output:
            if self._stopping.is_set():
                return None
            address = server_endpoint(self._folders).url
            self._child = _spawn([*self._worker_command, "--redis", address], output)
            return self._child

    def _wait_for_the_end(self) -> FileLock | None:
        """Until a signal, a failure, or idleness; the claim on idleness is kept while all is stopped."""
        check_s = max(0.02, min(CHECK_MOST_S, self._settings.idle_stop_s / 10))
        idle_since, last_use = time.monotonic(), self._last_use()
        while not self._signals and not self._stopping.is_set():
            self._pause(check_s)
            self._tend_files()
            claim = claim_idle(self._folders)
            if claim is None or self._last_use() != last_use or self._busy():
                idle_since, last_use = time.monotonic(), self._last_use()
            elif time.monotonic() - idle_since >= self._settings.idle_stop_s:
                log.info("idle for %g s: stopping", self._settings.idle_stop_s)
                return claim
            if claim is not None:
                claim.close()
        return None

    def _last_use(self) -> int:
        """When a client last connected, also one that came and went between two looks."""
        try:
            return self._folders.in_use_lock.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _tend_files(self) -> None:
        """Bound the logs, tell of a full disk once, and end a server whose socket somebody removed: its keeper starts
        another."""
        problem = full_disk(self._folders)
        if problem and not self._full:
            log.error("%s", problem)
        self._full = bool(problem)
        with suppress(OSError):  # a full disk must not end what it stops
            for path in (self._folders.supervisor_log, worker_log(self._folders), server_log(self._folders)):
                bound_file(path, LOG_MOST_BYTES, LOG_KEPT_BYTES)
        # In this order: a server that is started anew has no socket yet, and is not settled by then.
        lost = not os.path.exists(server_endpoint(self._folders).path)
        if lost and time.monotonic() - self._server_since > CHECK_MOST_S:
            terminate_server(self._folders)

    def _stop_all(self) -> None:
        """The worker first, for its jobs report to the server; then the server."""
        self._stopping.set()
        with self._starting:
            child = self._child
        stop_worker(
            self._worker_lock,
            child,
            self._settings.term_grace_s,
            hurry=lambda signals: self._signals > signals,
        )
        try:
            stop_server(self._folders)
            # Its keeper may just have started another.
            while self._keepers[0].is_alive():
                self._keepers[0].join(KEEPER_JOIN_S)
                stop_server(self._folders)
        except GpulayerError as error:
            log.error("%s", error)
            self._exit_code = self._exit_code or error.exit_code


def stop_worker(
    lock_path: Path,
    child: subprocess.Popen[bytes] | None,
    grace_s: float,
    hurry: Callable[[int], bool] = lambda signals: False,
) -> int | None:
    """Its process id, if there was one: TERM, at the end of the grace or in a hurry a second, and at last KILL.

    The second TERM makes it hand back what still runs, so that no job is counted as lost. `hurry` tells whether more
    signals than so many have come.
    """
    pid = child.pid if child is not None and child.poll() is None else holder_pid(lock_path)
    if pid is None:
        return None

    def is_gone() -> bool:
        return (child is None or child.poll() is not None) and not is_held(lock_path)

    def gone_within(patience_s: float, cut_short: Callable[[], bool] = lambda: False) -> bool:
        end = time.monotonic() + patience_s
        while not is_gone() and time.monotonic() < end and not cut_short():
            time.sleep(0.01)
        return is_gone()

    _signal(pid, signal.SIGTERM)
    if not gone_within(grace_s, lambda: hurry(1)):
        _signal(pid, signal.SIGTERM)
        if not gone_within(grace_s + STOP_MARGIN_S, lambda: hurry(2)):
            log.warning("worker %d does not end: killing it", pid)
            _signal(pid, signal.SIGKILL)
            gone_within(STOP_MARGIN_S)
    if child is None:  # its lock comes free a moment before its process has ended
        wait_for_end(pid, EXIT_S)
    return pid


def _signal(pid: int, number: int) -> None:
    """A process that stands still meets its signal when it goes on."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    go_on(pid)


def _spawn(command: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which outlives the supervisor."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
