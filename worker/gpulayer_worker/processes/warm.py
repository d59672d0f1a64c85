"""Warm processes as the worker sees them: one serves a batch of calls at a time, a lane keeps the idle ones.

Guarantees: items are called in order, each answer is told as it comes, and of a process that dies every answer that it
gave before is told. A batch's output goes to its own descriptors, which nothing holds any more when `run` returns.
What a batch leaves behind (children, threads that a fresh process would wait for, memory) ends with its process, and a
process that had a device ends when it is given back.

A batch that was stopped, or an item that ran too long, costs the process: the next batch gets another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from gpulayer_worker.runner.proctree import lease_clock_s
from gpulayer_worker.runner.warm_wire import (
    ABOUT_BATCH,
    Recent,
    Reply,
    ReplyDecoder,
    encode_request,
    plain_json,
    send_request,
)

from .cgroup import Group, GroupFacts, Groups
from .job import DEFAULT_UMASK, Ending, Exit, JobProcess, Report, Usage, WarmWork
from .pipes import ProgressPipe
from .pool import Pool

MOST_CALLS = 10_000
MOST_GROWTH_BYTES = 512 << 20
READ_BYTES = 1 << 20
PIPE_BYTES = 1 << 20
GOODBYE_S = 5.0
# Between two looks at a batch of many items: whoever waits in poll is woken by each of them.
NAP_S = 0.0005
MANY_ITEMS = 8
# How long a call of a ride takes before those behind it are better off elsewhere.
PAUSE_S = 0.05
# Of a lease: its holder is killed a little early rather than told of each.
WORTH_TELLING = 0.8

_numbers = itertools.count(1)


@dataclass(frozen=True)
class WarmKey:
    """What batches must agree in to share a process. `env` is what does not differ between two jobs of a submitter.

    `place` names the code that is imported from the job's folder, `devices` are what the process may use.
    """

    python: str
    env: frozenset[tuple[str, str]] = frozenset()
    preload: frozenset[str] = frozenset()
    place: str = ""
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0


class Tokens:
    """One for each call of a ride, in a pipe: a call begins by taking one, and what is recalled never begins."""

    def __init__(self, count: int) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.write(writer, b"t" * count)
        os.close(writer)
        self._lock = threading.Lock()
        self._count = count

    def recall(self) -> int:
        """No other call begins; how many have."""
        with self._lock:
            if self.reader >= 0:
                self._count -= len(os.read(self.reader, self._count))
            return self._count

    def close(self) -> None:
        """Recalls what is left."""
        self.recall()
        with self._lock:
            os.close(self.reader)
            self.reader = -1


@dataclass(frozen=True)
class Batch:
    """Calls of one function. `items` are pickled (args, kwargs); `function` is asked for where it is not known yet.

    `stdout` and `stderr` stay the caller's, who may close them when `run` has returned. `payload` is where large
    results go: the item's number is appended. The lease is a moment of `lease_clock_s`; the timeout is of each item.

    A ride's calls are of different jobs: `each` has the variables of each, `folders` what lies in the job's folders
    before it, stdout and stderr are files. Its calls begin one by one, by its tokens; `on_pause` is called while one
    takes its time.
    """

    sha256: str
    function: Callable[[], bytes]
    items: Sequence[bytes]
    python: tuple[int, int, int]
    cwd: Path
    env: Mapping[str, str]
    payload: Path
    stdout: int
    stderr: int
    name: str = "function"
    protocol: int = 5
    result_limit_bytes: int | None = None
    lease_until_s: float | None = None
    timeout_s: float | None = None
    grace_s: float = 10.0
    on_progress: Callable[[dict[str, float]], None] | None = None
    each: Sequence[Mapping[str, str]] = ()
    folders: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tokens: Tokens | None = None
    on_pause: Callable[[], None] | None = None


@dataclass(frozen=True)
class Answer:
    """What became of one item; of a ride's also how long its stdout and stderr were then."""

    index: int
    report: Report
    cpu_s: float
    wall_s: float
    written: tuple[int, int] = (0, 0)


@dataclass
class BatchEnd:
    """How a batch ended. `ending` is that of the process, where the batch did not outlive it."""

    begun: bool = False
    answered: int = 0
    finished: bool = False
    timed_out: bool = False
    ending: Ending | None = None
    facts: GroupFacts = field(default_factory=GroupFacts)
    max_rss_bytes: int = 0


class Kept(Protocol):
    """What a process has from one batch to the next."""

    def close(self) -> None: ...


class WarmProcess:
    """One process. One batch at a time; `end` and `extend_lease` may be called from any thread."""

    def __init__(self, pool: Pool, groups: Groups, key: WarmKey) -> None:
        self.key = key
        self.group: Group | None = groups.take(key.memory_bytes)
        self.idle_since_s = 0.0
        self._known: Recent[bool] = Recent()
        self._calls = 0
        self._first_rss_bytes = 0
        self._worn_out = False
        self._lock = threading.Lock()
        self._current: Batch | None = None
        self._decoder = ReplyDecoder()
        self.kept: Kept | None = None
        self._lease_until_s: float | None = None
        self._start(pool)

    @property
    def pid(self) -> int:
        return self._handle.started.result()

    @property
    def usable(self) -> bool:
        """Whether another batch may go to it."""
        return not (self._worn_out or self._handle.exited.done())

    def run(
        self, batch: Batch, on_answer: Callable[[Answer], None], on_begin: Callable[[], None] | None = None
    ) -> BatchEnd:
        """Calls all items; returns when the batch is done, or nothing of the process is left.

        `on_begin` is called when `end`, `kill` and `extend_lease` mean this batch from now on.
        """
        end = BatchEnd()
        with self._lock:
            self._current = batch
        self._renew(batch.lease_until_s)
        try:
            if on_begin is not None:
                on_begin()
            if self._send(batch):
                self._read_answers(batch, end, on_answer)
            if not end.finished or not self.usable:
                self._worn_out = True
                ending = self._until_gone()
                end.ending = None if end.finished else ending
                end.facts = self.group.facts() if self.group else end.facts
        except BaseException:
            self._abandon()
            raise
        finally:
            with self._lock:
                self._current = None
        return end

    def end(self, batch: Batch, grace_s: float) -> None:
        """TERM to the process while it serves this batch, KILL after the grace."""
        with self._lock:
            if self._current is batch:
                self._worn_out = True
                self._handle.end(grace_s)

    def kill(self, batch: Batch) -> None:
        """KILL to the process while it serves this batch."""
        with self._lock:
            if self._current is batch:
                self._worn_out = True
                self._handle.kill()

    def extend_lease(self, batch: Batch, until_s: float) -> None:
        """Moves the batch's lease."""
        with self._lock:
            if self._current is batch:
                self._lease_until_s = until_s
                self._handle.extend_lease(until_s)

    def keep(self, thing: Kept | None) -> None:
        """Something that is closed when another takes its place, or the process is gone."""
        if self.kept is not None:
            self.kept.close()
        self.kept = thing

    def _renew(self, until_s: float | None) -> None:
        """A batch's lease, where that is worth telling: a little later than the one that is known is not."""
        known_s, now_s = self._lease_until_s, lease_clock_s()
        if (
            until_s is None
            or known_s is None
            or known_s > until_s
            or known_s - now_s < WORTH_TELLING * (until_s - now_s)
        ):
            self._lease_until_s = until_s
            self._handle.extend_lease(until_s)

    def _abandon(self) -> None:
        """A batch was broken off: what the process still answers is that batch's, and nobody else may read it."""
        self._worn_out = True
        self._handle.kill()
        self._until_gone()

    def let_go(self) -> None:
        """The process ends by itself, as any Python does; by force if it does not. Returns when it is gone."""
        self._worn_out = True
        self._until_gone()

    def dispose(self) -> None:
        """Removes what a process that is gone had."""
        self.keep(None)
        for close in (self._link.close, self._progress.close):
            close()
        os.close(self._replies)
        if self.group is not None:
            self.group.remove()

    # --- starting ---

    def _start(self, pool: Pool) -> None:
        self._link, theirs = socket.socketpair()
        self._replies, writer = os.pipe()
        _enlarge(writer)
        os.set_blocking(self._replies, False)
        self._progress = ProgressPipe(self._on_progress)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            self._handle = pool.start(
                JobProcess(
                    id=f"warm-{os.getpid()}-{next(_numbers)}",
                    work=WarmWork(theirs.fileno(), writer, self._progress.writer),
                    cwd=Path("/"),
                    env=dict(self.key.env),
                    stdout=null,
                    stderr=null,
                    python=self.key.python,
                    preload=self.key.preload,
                    umask=DEFAULT_UMASK,
                    cgroups=self.group.folders if self.group else (),
                )
            )
        except BaseException:
            self.dispose()
            raise
        finally:
            theirs.close()
            os.close(writer)
            os.close(null)
            self._progress.close_writer()
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._poll.register(self._progress.reader, select.POLLIN)

    def _on_progress(self, progress: dict[str, float]) -> None:
        if self._current is not None and self._current.on_progress is not None:
            self._current.on_progress(progress)

    # --- a batch ---

    def _send(self, batch: Batch) -> bool:
        """False where the process is gone already."""
        known = self._known.find(batch.sha256) is not None
        parts = list(batch.items) if known else [batch.function(), *batch.items]
        head = {
            "function": batch.sha256,
            "has_function": not known,
            "python": list(batch.python),
            "protocol": batch.protocol,
            "payload": str(batch.payload),
            "name": batch.name,
            "cwd": str(batch.cwd),
            "env": dict(batch.env),
            "result_limit_bytes": batch.result_limit_bytes,
        }
        descriptors = [batch.stdout, batch.stderr]
        if batch.tokens is not None:
            head.update(each=[dict(own) for own in batch.each], folders=dict(batch.folders))
            descriptors.append(batch.tokens.reader)
        try:
            send_request(self._link, encode_request(head, parts, _json), descriptors)
        except ConnectionError:
            return False
        if not known:
            self._known.keep(batch.sha256, True)
        return True

    def _read_answers(self, batch: Batch, end: BatchEnd, on_answer: Callable[[Answer], None]) -> None:
        many = len(batch.items) > MANY_ITEMS
        item_until_s = None
        while not end.finished:
            begun, before = end.begun, end.answered
            until_s = item_until_s
            if batch.on_pause is not None:
                until_s = min(item_until_s or math.inf, time.monotonic() + PAUSE_S)
            if not self._look(until_s, end, on_answer):
                return
            if batch.on_pause is not None and end.begun and (end.begun, end.answered) == (begun, before):
                batch.on_pause()
            # An item's time begins with it: how long the process took to start does not count.
            if batch.timeout_s is not None and (end.begun, end.answered) != (begun, before):
                item_until_s = time.monotonic() + batch.timeout_s
            elif item_until_s is not None and time.monotonic() >= item_until_s and not end.finished:
                end.timed_out, item_until_s = True, None
                self.end(batch, batch.grace_s)
            if many and end.answered > before and not end.finished:
                time.sleep(NAP_S)

    def _look(self, until_s: float | None, end: BatchEnd, on_answer: Callable[[Answer], None]) -> bool:
        """Takes what has come; False when no more will."""
        patience_ms = None if until_s is None else max(0, int((until_s - time.monotonic()) * 1000) + 1)
        for descriptor, _ in self._poll.poll(patience_ms):
            if descriptor == self._progress.reader:
                if not self._progress.read():
                    self._poll.unregister(descriptor)
                continue
            try:
                data = os.read(self._replies, READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                return False
            for reply in self._decoder.feed(data):
                self._take(reply, end, on_answer)
        return True

    def _take(self, reply: Reply, end: BatchEnd, on_answer: Callable[[Answer], None]) -> None:
        if reply.number != ABOUT_BATCH:
            end.answered = reply.number + 1
            report = Report(reply.header, reply.payload)
            on_answer(Answer(reply.number, report, reply.cpu_s, reply.wall_s, reply.written))
        elif "begun" in reply.header:
            end.begun = True
        else:
            end.finished = True
            end.max_rss_bytes = reply.header["max_rss_bytes"]
            self._progress.read()
            self._judge_wear(reply.header)

    def _judge_wear(self, facts: Mapping[str, int]) -> None:
        self._calls += facts["done"]
        self._first_rss_bytes = self._first_rss_bytes or facts["rss_bytes"]
        grown_bytes = facts["rss_bytes"] - self._first_rss_bytes
        if (
            facts["ending"]
            or facts["children"]
            or self._calls >= MOST_CALLS
            or grown_bytes > MOST_GROWTH_BYTES
        ):
            self._worn_out = True

    # --- the end ---

    def _until_gone(self) -> Ending:
        """Waits for the process' own end, not for long, and for the end of all that it left."""
        with contextlib.suppress(OSError):  # it is gone already
            self._link.shutdown(socket.SHUT_RDWR)
        try:
            return self._handle.wait(GOODBYE_S)
        except TimeoutError:
            self._handle.kill()
            return self._handle.wait()


def ending_of(end: BatchEnd, answer: Answer) -> Ending:
    """One answered call as the end of a process of its own would be told."""
    code = 0 if answer.report.ok else int(answer.report.header.get("exit_code", 1))
    usage = Usage(user_s=answer.cpu_s, max_rss_bytes=end.max_rss_bytes)
    return Ending(Exit(code, None, usage), answer.report)


def _json(head: dict[str, Any]) -> bytes:
    """Quick; any text that is no Unicode, as an environment may hold, the slow way."""
    try:
        return orjson.dumps(head)
    except TypeError:
        return plain_json(head)


def _enlarge(pipe: int) -> None:
    """Room for the answers of a whole batch, where the system allows it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
