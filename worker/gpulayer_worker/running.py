"""Runs one attempt of one job, from the grant to its outcome.

What a run guarantees: it returns only when nothing of the job's processes is left; it stops early when the attempt is
stopped (cancelled, stale, handed back); it never raises for what the job did, only for faults of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from gpulayer_broker import spec as specs
from gpulayer_broker.attempts import CANCELLED, DEVICE_LOST, STALE, Attempt
from gpulayer_broker.consumer import Outcome, dumps
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.functions import Arg
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.requirements import decode as decode_requirements
from gpulayer_broker.spec import Payload, Spec
from gpulayer_broker.store.tree import Manifest
from gpulayer_worker.bounds import Bound
from gpulayer_worker.grant import (
    NAMED_BY_UUID,
    Device,
    Grant,
    Share,
    job_environment,
    nvidia_library_folders,
    with_queue,
)
from gpulayer_worker.hardware import DeviceLost, free_bytes
from gpulayer_worker.joblog import JobLog
from gpulayer_worker.last_words import with_last_words
from gpulayer_worker.outcomes import (
    COMMAND_ENDED,
    NO_REPORT,
    cannot_start,
    failed,
    out_of_memory,
    over_disk,
    process_outcome,
    report_outcome,
    tells_full_disk,
    timed_out,
)
from gpulayer_worker.outputs import gather
from gpulayer_worker.preparing import fetch_given, unpack_folders
from gpulayer_worker.processes.cgroup import Group, GroupFacts
from gpulayer_worker.processes.fork_server import ForkServerGone
from gpulayer_worker.processes.job import Ending, FunctionCall, JobHandle, JobProcess
from gpulayer_worker.processes.pool import CannotFollow
from gpulayer_worker.scratch import Scratch
from gpulayer_worker.usage import usage_record
from gpulayer_worker.workshop import Workshop

log = logging.getLogger("gpulayer")

RETURNED = "returned"
PIPES_PATIENCE_S = 5.0
# What goes to a call's process through its fork server; what is larger is a file of the scratch folder.
INLINE_BYTES = 1 << 17


class Run:
    """One attempt."""

    # Whether it is a process of many calls that runs it.
    is_served = False
    is_quick = False
    # What it begins after; None: it begins at once.
    after: JobHandle | None = None
    # What a run that has begun waits for, and what is left to be done after it.
    _ending: Callable[[], Ending]
    _left: ExitStack
    _scratch: Scratch
    _log: JobLog

    def __init__(self, shop: Workshop, attempt: Attempt, spec: Spec) -> None:
        self.shop, self.attempt, self.spec = shop, attempt, spec
        self.store = shop.store.for_job()
        self.source: Manifest | None = None
        self.notes: list[str] = []
        self.timed_out = False
        self.over_disk: Outcome | None = None
        self.group: Group | None = None
        self.group_facts = GroupFacts()
        self.memory_limit_bytes = 0
        self.started_s = 0.0
        self.unread: JobLog | None = None

    def outcome(self) -> Outcome:
        """Runs it; what it came to."""
        return self.begin() or self.end()

    def begin(self) -> Outcome | None:
        """Starts it; what it came to, where that is known by then. Else `end` is to be called."""
        with ExitStack() as left:
            early = self._begin(left)
            if early is None:
                self._left = left.pop_all()
            return early

    def end(self) -> Outcome:
        """Waits for the end of what has begun; what it came to."""
        ending = self._ending
        del self._ending  # it refers to this run, which is over when that is called
        with self._left:
            return self._ended(ending(), self._scratch, self._log)

    def _begin(self, left: ExitStack) -> Outcome | None:
        """As `begin`; `left` is to be closed when all is over."""
        needs = self._needs()
        if isinstance(needs, Outcome):
            return needs
        try:
            self._scratch = self.shop.scratch.make(self.attempt.id, self.attempt.grant.attempt)
        except OSError as error:
            if not self.shop.hardware.has_room():
                log.warning("job %s is handed back: %s", self.attempt.id, error)
                return Outcome("released", "returned")
            return cannot_start(error)
        left.callback(self._let_go)
        return self._in_scratch(self._scratch, needs, left)

    def _let_go(self) -> None:
        # What has ended and what was to be done to it do not refer to each other any more: all of it is gone at once,
        # and the collector of cycles is not needed.
        self.attempt.on_stop = self.attempt.on_interrupt = self.attempt.on_lease = _nothing
        self.shop.bounds.forget(self.attempt.token)
        self.shop.meters.end(self.attempt.token)
        self.shop.cleaner.do(partial(self._clear, self._scratch))

    def _clear(self, scratch: Scratch) -> None:
        """What is left to be done when everybody knows the outcome."""
        try:
            self.shop.scratch.give_back(scratch)
        finally:
            if self.group is not None:
                self.shop.groups.give_back(self.group)

    def _needs(self) -> Requirements | Outcome:
        """What the job asks for; how it ends where nobody can read that, or this worker does not have it."""
        try:
            needs = _requirements(self.spec.requirements)
        except GpulayerError as error:
            return failed("undecodable", type(error).__name__, str(error))
        return needs if self.shop.fits(self.attempt.grant.signature, needs) else Outcome("released", "unfit")

    def _in_scratch(self, scratch: Scratch, needs: Requirements, left: ExitStack) -> Outcome | None:
        try:
            # A function may be over before anybody could have read what it writes.
            late = self.spec.call is not None and not self.is_served
            self._log, writers = self.shop.logs.open(
                self.attempt.id, self.attempt.token, scratch.file("log"), at_once=not late
            )
            self.unread = self._log if late else None
        except OSError as error:
            return cannot_start(error)
        left.callback(self.shop.logs.forget, self._log)
        try:
            self._prepare(scratch)
            if early := self._stopped_before_start():
                return early
            self._ending = self._work(scratch, needs, writers)
        except (GpulayerError, OSError) as error:
            return cannot_start(error)
        except ForkServerGone as error:
            log.warning("job %s: %s", self.attempt.id, error)
            return self._stopped_before_start() or Outcome("released", "lost")
        except (DeviceLost, CannotFollow) as error:
            log.warning("job %s does not start here: %s", self.attempt.id, error)
            return self._stopped_before_start() or Outcome("released", "returned")
        finally:
            for writer in writers:
                os.close(writer)
        return None

    # --- before ---

    def _prepare(self, scratch: Scratch) -> None:
        self.source = unpack_folders(self.spec, self.store, self.shop.settings, Path(scratch.work))
        if self.spec.call is not None:
            fetch_given(self.spec.call.given, self.shop, self.store, scratch, self.attempt.stopped)

    def _stopped_before_start(self) -> Outcome | None:
        if not self.attempt.stopped.is_set():
            return None
        return self._stopped_outcome()

    def _work(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> Callable[[], Ending]:
        """Starts the job; what waits for its end, once the writers are closed here."""
        return partial(self._wait, self._start(scratch, needs, writers))

    def _start(self, scratch: Scratch, needs: Requirements, writers: list[int]) -> JobHandle:
        work: tuple[str, ...] | FunctionCall = self.spec.argv
        if self.spec.call is not None:
            work = self._function(scratch)
        self.group = self.shop.groups.take(needs.memory_bytes)
        self.memory_limit_bytes = self.group.limit_bytes if self.group else 0
        process = JobProcess(
            id=f"{self.attempt.id}.{self.attempt.grant.attempt}",
            work=work,
            cwd=scratch.work,
            env=self._environment(scratch, needs) | self._temporary(scratch, needs),
            stdout=writers[0],
            stderr=writers[1],
            python=self.shop.python,
            preload=frozenset(self.spec.call.modules if self.spec.call else ()),
            lease_until_s=None if self.spec.on_outage == "keep" else self.attempt.lease_until_s,
            on_progress=partial(progressed, self.attempt, self.shop.on_started),
            on_running=partial(self.shop.logs.watch, self.unread) if self.unread else None,
            cgroups=self.group.folders if self.group else (),
            after=self.after.id if self.after else "",
            is_quick=self.is_quick,
        )
        self._clock_in()
        handle = self.shop.pool.start(process, self.after)
        self.attempt.on_stop = lambda reason: self._end(handle, reason)
        self.attempt.on_interrupt = handle.interrupt
        if self.spec.on_outage != "keep":
            self.attempt.on_lease = handle.extend_lease
        if self.attempt.stopped.is_set():
            self._end(handle, self.attempt.stop_reason)
        self._bound_disk(scratch, needs, partial(handle.end, self.shop.settings.term_grace_s))
        self._tell_start()
        return handle

    def _temporary(self, scratch: Scratch, needs: Requirements) -> dict[str, str]:
        """Of a job that asked for disk, its temporary files are there too, unless it names a place itself."""
        if not needs.disk_bytes or "TMPDIR" in self.spec.env:
            return {}
        return {"TMPDIR": self.shop.scratch.make_temporary(scratch)}

    def _bound_disk(self, scratch: Scratch, needs: Requirements, end: Callable[[], object]) -> None:
        """Watches the job's folders; `end` is called when they have more than it asked for, or fill the disk."""

        def on_over(size_bytes: int, limit_bytes: int) -> None:
            self.over_disk = over_disk(size_bytes, limit_bytes)
            end()

        folders = (scratch.work, scratch.home, scratch.temporary)
        self.shop.bounds.watch(self.attempt.token, Bound(folders, needs.disk_bytes, on_over))

    def _clock_in(self) -> None:
        self.started_s = time.monotonic()
        self.shop.meters.begin(self.attempt.token, {uuid for uuid, _ in self.attempt.grant.lots})

    def _tell_start(self) -> None:
        if not self.attempt.started:
            self.attempt.started = True
            self.shop.on_started()

    def _function(self, scratch: Scratch) -> FunctionCall:
        call = self.spec.call
        assert call is not None
        return FunctionCall(
            function=self._part(call.function, scratch, "function"),
            arguments=self._part(call.arguments, scratch, "arguments"),
            python=version_of(call),
            payload=scratch.file("result"),
            name=call.qualname or "function",
            result_limit_bytes=self.shop.settings.result_bytes,
            given=scratch.file("given") if call.given else None,
        )

    def _part(self, payload: Payload, scratch: Scratch, name: str) -> bytes | Path:
        """What is small goes to the process as it is: a file costs more than the rest of a tiny job's start."""
        data = self._bytes(payload)
        if len(data) <= INLINE_BYTES:
            return data
        path = Path(scratch.file(name))
        path.write_bytes(data)
        return path

    def _bytes(self, payload: Payload) -> bytes:
        if payload.data is not None:
            return payload.data
        return self.store.read_bytes(payload.sha256, self.shop.settings.argument_blob_bytes)

    def _environment(self, scratch: Scratch, needs: Requirements) -> dict[str, str]:
        given = self.shop.hardware.granted(self.attempt)
        devices = tuple(
            Device(device.index, device.uuid, self.shop.hardware.is_named_by_uuid(device)) for device in given
        )
        if any(device.by_uuid for device in devices):
            self.notes.append(NAMED_BY_UUID)
        share = Share(
            accelerator=given[0].kind if given else "cpu",
            cpus=max(1, needs.cpus),
            python=self.shop.python,
            cache=str(self.shop.cache),
            devices=devices,
        )
        grant = Grant(
            job_id=self.attempt.id,
            attempt=self.attempt.grant.attempt,
            name=self.spec.name,
            scratch=scratch.root,
            outputs=scratch.outputs,
            share=share,
        )
        submitted = with_queue(self.spec.env, self.shop.queue, self.attempt.grant.owner)
        return job_environment(
            grant, submitted, self.shop.environment, nvidia_library_folders(self.shop.python)
        )

    # --- while it runs ---

    def _end(self, handle: JobHandle, reason: str) -> None:
        """Somebody wants the end: what nobody will hear of any more is killed at once, the rest gets its grace."""
        if reason == STALE:
            handle.kill()
        else:
            handle.end(self.shop.settings.term_grace_s)

    def _wait(self, handle: JobHandle) -> Ending:
        if self.spec.timeout_s is None:
            return handle.wait()
        until_s = self.started_s + self.spec.timeout_s
        try:
            return handle.wait(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            self.timed_out = True
            handle.end(self.shop.settings.term_grace_s)
            return handle.wait()

    # --- after ---

    def _ended(self, ending: Ending, scratch: Scratch, job_log: JobLog) -> Outcome:
        wall_s = ending.exit.wall_s if ending.exit else None
        if wall_s is None:
            wall_s = time.monotonic() - self.started_s
        if self.group is not None:
            self.group_facts = self.group.facts()
        outcome = self._judge(ending)
        if self.attempt.stop_reason == DEVICE_LOST and outcome.verdict == "released":
            why = self.shop.hardware.why_lost(self.attempt)
            job_log.write("err", f"\n[gpulayer: {why}; the job is handed back and starts again]\n".encode())
        self.shop.logs.finish(job_log, PIPES_PATIENCE_S)
        if outcome.verdict == "released":
            return outcome
        if ending.strays:
            self.notes.append(f"ended with the job: {', '.join(ending.strays[:5])}")
        self._note_limits(outcome, scratch)
        fields = self._fields(scratch, job_log)
        if ending.exit is not None:
            devices = self.shop.meters.end(self.attempt.token)
            group = self.group_facts if self.group else None
            fields["usage"] = dumps(usage_record(wall_s, ending.exit.usage, group, devices))
        return with_last_words(replace(outcome, fields={**outcome.fields, **fields}), job_log)

    def _judge(self, ending: Ending) -> Outcome:
        """The outcome by what happened to the process, then by what it reported."""
        if self.attempt.stopped.is_set() and not (ending.report and ending.report.ok):
            return self._stopped_outcome()
        if ending.expired or (ending.lost and ending.report is None):
            return Outcome("released", "returned" if ending.refused else "lost")
        if ending.refused is not None:
            return failed("cannot_start", "CannotStart", ending.refused)
        if self.over_disk and not (ending.report and ending.report.ok):
            return self.over_disk
        if self.timed_out and not (ending.report and ending.report.ok):
            return timed_out(self.spec.timeout_s or 0)
        if self.spec.call is not None and ending.report is not None:
            return report_outcome(ending.report, self.store)
        if killed := out_of_memory(ending, self.group_facts, self.memory_limit_bytes):
            return killed
        return process_outcome(ending, COMMAND_ENDED if self.spec.call is None else NO_REPORT)

    def _stopped_outcome(self) -> Outcome:
        reason = self.attempt.stop_reason
        if reason == CANCELLED:
            return Outcome("cancelled", "cancelled")
        return Outcome("released", "lost" if reason == DEVICE_LOST else "returned")

    def _note_limits(self, outcome: Outcome, scratch: Scratch) -> None:
        """A word on the limits that the job has met without being ended by them."""
        if self.group_facts.forks_refused:
            most = self.shop.settings.job_processes
            self.notes.append(f"it was refused new processes: a job has {most} at most (threads count)")
        if self.group_facts.oom_kills and outcome.reason != "oom":
            self.notes.append(f"the kernel killed {self.group_facts.oom_kills} of its processes for memory")
        if outcome.verdict == "failed" and tells_full_disk(outcome, free_bytes(Path(scratch.root))):
            self.notes.append(f"the worker's disk is full: {scratch.root} has no room, ask for it with disk=")

    def _fields(self, scratch: Scratch, job_log: JobLog) -> dict[str, Arg]:
        fields: dict[str, Arg] = {}
        try:
            limit_bytes = self.shop.settings.artifact_bytes
            outputs = gather(self.spec, scratch, self.source, self.store, limit_bytes)
            self.notes += outputs.notes
            if outputs.digest:
                fields["outputs"] = outputs.digest
            if job_log.size:
                fields["logs"] = dumps({"0": job_log.store(self.store)})
        except (GpulayerError, OSError) as error:
            self.notes.append(f"not everything could be kept: {error}")
            log.warning("job %s: %s", self.attempt.id, error)
        if job_log.dropped:
            self.notes.append(f"{job_log.dropped} bytes of the log were not kept")
        if self.notes:
            import orjson

            fields["notes"] = orjson.dumps(self.notes)
        return fields


# Many jobs of a worker ask for the same.
_requirements = lru_cache(maxsize=256)(decode_requirements)


def progressed(attempt: Attempt, tell: Callable[[], None], progress: dict[str, Any]) -> None:
    """A job says how far it is; not the run's own, to which whoever hears it would refer."""
    attempt.progress = dumps(progress).decode()
    tell()


def _nothing(*_: object) -> None:
    """Is done to an attempt that is over."""


def version_of(call: specs.FunctionCall) -> tuple[int, int, int]:
    """The Python that pickled a call."""
    parts = [int(part) for part in call.python.split(".")[:3] if part.isdigit()]
    major, minor, micro = [*parts, 0, 0, 0][:3]
    return major, minor, micro


def spec_of(raw: Mapping[str, Any]) -> Spec:
    """The spec in a message's arguments."""
    return specs.decode_job(raw)
