"""The fork server: starts jobs, watches their process trees, enforces their leases, ends all with its worker.

One thread, one loop. It never runs a user's code: a job begins in a forked child (`child.py`). What it
promises:

- `exited` is told when a job's main process ended, `gone` only when nothing of the job's tree is left;
- a job whose lease passes is killed here, whatever the worker is doing (it may be stopped);
- when the worker is gone, every tree is killed before this process exits.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import warnings
from typing import Any

from . import call, child, forks, preload, proctree, room, signals, wire
from .jobs import Job, Jobs
from .lined_up import LinedUp
from .news import News

# While a lease is open, time is looked at this often: poll's clock stands still while the machine sleeps, a
# lease's does not.
LOOK_AT_LEASES_S = 5.0
LAST_WAIT_S = 0.05
# News of a start waits so long for more: where the job has ended by then, the worker is woken once for both.
LINGER_MS = 3
# The same for a job that is one of many like it, of which hardly any has run longer.
QUICK_LINGER_MS = 20
# A handler that only makes the signal wake the loop. It takes what a handler is given, and is no function of Python's,
# of which each touches pages that the last fork has made expensive.
IGNORE: Any = {}.get


class Server:
    """The loop and its requests; one method a request."""

    def __init__(self, link: socket.socket, worker: int) -> None:
        self._link = link
        self._worker = worker
        self._decoder = wire.Decoder()
        self._news = News(link)
        self._wants_room = False
        self._jobs = Jobs()
        self._lined_up = LinedUp()
        self._open = True
        self._null = identity(os.stat(os.devnull))
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(link.fileno(), select.POLLIN)
        self._catch_signals()

    def run(self) -> None:
        """Serves until the worker is gone, then ends what still runs."""
        try:
            self._loop()
        finally:
            self._kill_everything()

    def _loop(self) -> None:
        while self._open:
            due_s = self._jobs.next_deadline_s()
            for descriptor, _ in self._poller.poll(self._patience_ms(due_s)):
                if descriptor == self._wake_reader:
                    self._drain_wakeups()
                    self._reap()
                else:
                    self._read()
            # What has got an earlier deadline in this round is met in the next, which waits no longer than for it.
            if due_s is not None and due_s <= proctree.lease_clock_s():
                self._end_overdue()
            # The worker hears of those that are gone before what has waited for them begins.
            self._flush()
            self._start_due()

    # --- waking up ---

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, IGNORE)
        signal.signal(signal.SIGTERM, self._close)
        # A second way to learn of the worker's death, for the case that something else holds its end of the
        # socket. The signal also comes when only the thread that started us ends, therefore the look at the
        # parent.
        signal.signal(signal.SIGUSR1, self._close_if_orphaned)
        proctree.prctl(proctree.PR_SET_PDEATHSIG, signal.SIGUSR1)
        self._close_if_orphaned()

    def _close(self, *_: object) -> None:
        self._open = False

    def _close_if_orphaned(self, *_: object) -> None:
        if os.getppid() != self._worker:
            self._close()

    def _drain_wakeups(self) -> None:
        try:
            os.read(self._wake_reader, 4096)
        except BlockingIOError:
            return  # it was read with an earlier one

    def _patience_ms(self, due_s: float | None) -> int | None:
        news_due_in_s = self._news.due_in_s()
        if news_due_in_s is None and due_s is None:
            return None
        wait_s = LOOK_AT_LEASES_S if news_due_in_s is None else news_due_in_s
        if due_s is not None:
            wait_s = min(wait_s, due_s - proctree.lease_clock_s())
        return int(1000 * max(0.0, wait_s)) + 1

    # --- the link ---

    def _read(self) -> None:
        received = wire.receive(self._link)
        if received is None:
            return
        data, descriptors = received
        if not data:
            self._close()
            return
        for message, its_descriptors in self._decoder.feed(data, descriptors):
            self._serve(message, its_descriptors)

    def _serve(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            getattr(self, "_request_" + str(message["request"]))(message, descriptors)
        finally:
            close_all(descriptors)

    def _flush(self) -> None:
        try:
            wants_room = self._news.send()
        except OSError:
            self._close()
            return
        if wants_room != self._wants_room:
            self._wants_room = wants_room
            wanted = select.POLLIN | select.POLLOUT if wants_room else select.POLLIN
            self._poller.modify(self._link.fileno(), wanted)

    # --- requests ---

    def _request_start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        after = message["after"]
        if after and (self._jobs.find(after) or after in self._lined_up):
            self._lined_up.add(message, descriptors)
        else:
            self._begin(message, descriptors)

    def _start_due(self) -> None:
        """Starts what has waited for jobs that are gone."""
        while self._open:
            due = self._lined_up.take_due()
            if due is None:
                return
            message, descriptors = due
            try:
                self._begin(message, descriptors)
            finally:
                close_all(descriptors)
            # Where it was refused.
            self._flush()

    def _begin(self, message: dict[str, Any], descriptors: list[int]) -> None:
        lease_until_s = message.get("lease_until_s")
        if lease_until_s is not None and lease_until_s <= proctree.lease_clock_s():
            self._news.tell("expired", id=message["id"])
            self._refuse(message["id"], "its lease was over before it began")
            return
        started = proctree.now_ticks()
        pipes = dict(zip(message["pipes"], descriptors))  # noqa: B905 - strict= came with 3.10
        child.prepare(message)
        try:
            pid = self._fork(message, pipes)
        except OSError as error:
            self._refuse(message["id"], f"cannot fork: {error}")
            return
        folders = message.get("cgroups", ())
        # Of a job that has a group, the group says what is its own.
        files = set() if folders else held_files(pipes, self._null)
        job = Job(message["id"], pid, lease_until_s, files, started, folders)
        self._jobs.add(job)
        linger_ms = QUICK_LINGER_MS if message["is_quick"] else LINGER_MS
        # Of a process that serves many calls, the first is waiting.
        self._news.tell_start(job, 0 if message["kind"] == "warm" else linger_ms)

    def _refuse(self, identifier: str, error: str) -> None:
        self._news.tell("refused", id=identifier, error=error)
        self._lined_up.release(identifier)

    def _fork(self, message: dict[str, Any], pipes: dict[str, int]) -> int:
        """A child that becomes the job. Signals wait, so that an early TERM meets the job's own dispositions."""
        signals.hold()
        try:
            server, private = os.getpid(), self._not_the_jobs()
            pid = fork()
            if pid == 0:
                child.become_job(message, pipes, server, private)
            return pid
        finally:
            signals.let_go()

    def _not_the_jobs(self) -> list[int]:
        """What is open here and is the fork server's own, or of jobs that are still to begin."""
        own = [self._link.fileno(), self._wake_reader, self._wake_writer]
        return own + self._lined_up.descriptors() + self._decoder.descriptors()

    def _request_recall(self, message: dict[str, Any], _: list[int]) -> None:
        self._drop(message["id"])

    def _drop(self, identifier: str) -> bool:
        """Whether the job was still to begin; then nothing comes of it."""
        dropped = self._lined_up.drop(identifier)
        if dropped:
            self._news.tell("refused", id=identifier, error="ended before it began")
        return dropped

    def _request_end(self, message: dict[str, Any], _: list[int]) -> None:
        if self._drop(message["id"]):
            return
        job = self._jobs.find(message["id"])
        if job is not None:
            job.kill_at_s = proctree.lease_clock_s() + float(message["grace_s"])
            proctree.send_signal(self._jobs.tree(job), signal.SIGTERM)

    def _request_interrupt(self, message: dict[str, Any], _: list[int]) -> None:
        job = self._jobs.find(message["id"])
        if job is not None:
            proctree.send_signal(self._jobs.tree(job), signal.SIGINT)

    def _request_kill(self, message: dict[str, Any], _: list[int]) -> None:
        if self._drop(message["id"]):
            return
        job = self._jobs.find(message["id"])
        if job is not None:
            self._jobs.kill(job)

    def _request_lease(self, message: dict[str, Any], _: list[int]) -> None:
        for identifier, until_s in message["until_s"].items():
            job = self._jobs.find(identifier)
            if job is not None:
                job.lease_until_s = until_s
            self._lined_up.extend(identifier, until_s)

    def _request_preload(self, message: dict[str, Any], _: list[int]) -> None:
        imported, failed = preload.load(message["modules"])
        note_own_state()
        unsafe = preload.foreign_threads() + preload.open_gpus()
        self._news.tell("preloaded", imported=imported, failed=failed, unsafe=unsafe)

    def _request_stats(self, _: dict[str, Any], __: list[int]) -> None:
        self._news.tell(
            "stats",
            pid=os.getpid(),
            jobs=self._jobs.running(),
            children=sorted(proctree.children(os.getpid())),
        )

    # --- ends ---

    def _reap(self) -> None:
        reaped = childless = False
        ended: list[Job] = []
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                childless = True
                break
            if pid == 0:
                break
            reaped = True
            job = self._jobs.main_ended(pid)
            if job is not None:
                job.exit = told_exit(code, usage, time.monotonic() - job.begun_s)
                ended.append(job)
        if reaped:
            self._settle(childless, ended)

    def _settle(self, childless: bool, ended: list[Job]) -> None:
        """Ends what outlived its job's main process, and tells of the jobs of which nothing is left."""
        gone = self._jobs.sweep(childless)
        for job in ended:
            if job not in gone:
                self._news.tell_end("exited", job)
        for job in gone:
            self._news.tell_end("gone", job)
            self._lined_up.release(job.id)

    def _end_overdue(self) -> None:
        now_s = proctree.lease_clock_s()
        for job in self._jobs.overdue(now_s):
            if job.lease_over(now_s):
                self._news.tell("expired", id=job.id)
            self._jobs.kill(job)

    def _kill_everything(self) -> None:
        while True:
            orphans = proctree.children(os.getpid())
            proctree.kill_tree(orphans)
            try:
                while os.wait4(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            select.select([self._wake_reader], [], [], LAST_WAIT_S)
            self._drain_wakeups()


def close_all(descriptors: list[int]) -> None:
    """Closes the fork server's copies of what a job is given open."""
    for descriptor in descriptors:
        os.close(descriptor)


def note_own_state() -> None:
    """What jobs are to be rid of is looked up here, once, and not in each of them."""
    child.note_environment()
    call.note_state()
    call.rehearse()
    room.make_again()
    signals.note_ignored()
    forks.leave_out()
    forks.note_threading()
    proctree.ready_to_fork()


def fork_quietly() -> int:
    """os.fork without its warning: the threads it may find are those that a preloaded library keeps to itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


fork = fork_quietly if sys.version_info >= (3, 12) else os.fork


def told_exit(code: int, usage: Any, wall_s: float) -> str:
    """A wait status as exit code or signal, what was used (seconds of processor time, KiB) and how long it ran; as
    JSON."""
    killed = os.WIFSIGNALED(code)
    end, number = ("null", os.WTERMSIG(code)) if killed else (os.WEXITSTATUS(code), "null")
    used = f"[{usage.ru_utime!r},{usage.ru_stime!r},{usage.ru_maxrss}]"
    return f'{{"code":{end},"signal":{number},"usage":{used},"wall_s":{wall_s:.6f}}}'


def identity(facts: os.stat_result) -> tuple[int, int]:
    """What tells a file from every other."""
    return facts.st_dev, facts.st_ino


def held_files(pipes: dict[str, int], null: tuple[int, int]) -> set[tuple[int, int]]:
    """Identities of the job's own pipes, which `null` is none of: whoever holds one belongs to the job."""
    return {identity(os.fstat(descriptor)) for descriptor in pipes.values()} - {null}


def serve(descriptor: int) -> int:
    """Runs a fork server on an inherited socket until the worker at its other end is gone."""
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    worker = os.getppid()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1024)
    proctree.become_subreaper()
    os.chdir("/")
    forks.leave_out()
    forks.leave_logging_to_jobs()
    preload.settle()
    # Python's own, where it found no locale: no job's.
    os.environ.pop("LC_CTYPE", None)
    note_own_state()
    # What an import prints goes to the worker's log; a job gets a stdout of its own.
    os.dup2(2, 1)
    Server(link, worker).run()
    return 0
