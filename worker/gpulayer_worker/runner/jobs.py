"""The fork server's table of jobs, and which process belongs to which.

A job's tree is its main process, everything below it, and its orphans: the kernel gives those to the fork
server, which has to find out whose they are. Where jobs have control groups, an orphan's says it. Else it is
a job's by its session, by a pipe of the job that it holds, or by GPULAYER_PROCESS in the environment of its
exec. One that hides all three (a daemon) belongs to one of the jobs that ran when it began: it is left alone
while one of these still runs, and killed after.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from . import cgroups, proctree

REMEMBERED_JOBS = 1000
TOLD_STRAYS = 20
# In the environment of everything that a job starts: the id under which the fork server knows it.
MARK = "GPULAYER_PROCESS"


class Job:
    """One job that was started here and is not gone yet."""

    __slots__ = (
        "begun_s",
        "ended",
        "exit",
        "files",
        "folders",
        "id",
        "kill_at_s",
        "killed",
        "lease_until_s",
        "pid",
        "started",
        "strays",
    )

    def __init__(
        self,
        identifier: str,
        pid: int,
        lease_until_s: float | None,
        files: set[tuple[int, int]],
        started: int,
        folders: Sequence[str] = (),
    ) -> None:
        self.id = identifier
        self.pid = pid
        self.lease_until_s = lease_until_s
        self.kill_at_s: float | None = None
        self.ended = False
        self.killed = False
        self.files = files
        # How its main process ended, as the worker is told of it.
        self.exit = "null"
        self.strays: list[dict[str, Any]] = []
        self.started = started
        self.begun_s = time.monotonic()
        self.folders = folders

    @property
    def tag(self) -> bytes:
        """By which its group is known among all; only orphans make it wanted."""
        return cgroups.tag(self.folders)

    def lease_over(self, now_s: float) -> bool:
        """Whether the job runs on borrowed time."""
        return self.lease_until_s is not None and now_s >= self.lease_until_s

    def deadline_s(self) -> float | None:
        """When this job has to be killed, if at all."""
        if self.killed:
            return None
        known = [moment for moment in (self.lease_until_s, self.kill_at_s) if moment is not None]
        return min(known) if known else None

    def tell_stray(self, pid: int) -> None:
        """Remembers, for the report, a process that outlived the job."""
        if len(self.strays) < TOLD_STRAYS and all(stray["pid"] != pid for stray in self.strays):
            self.strays.append({"pid": pid, "command": proctree.command_line(pid)})


class Jobs:
    """All jobs of one fork server."""

    def __init__(self) -> None:
        self._by_id: dict[str, Job] = {}
        self._by_pid: dict[int, Job] = {}
        self._past: deque[int] = deque(maxlen=REMEMBERED_JOBS)
        self._children = f"/proc/self/task/{os.getpid()}/children"

    def add(self, job: Job) -> None:
        """Takes up a job whose main process has just been forked."""
        self._by_id[job.id] = job
        self._by_pid[job.pid] = job

    def find(self, identifier: str) -> Job | None:
        """A job of which something is left."""
        return self._by_id.get(identifier)

    def running(self) -> list[str]:
        """Ids of all jobs of which something is left."""
        return sorted(self._by_id)

    def main_ended(self, pid: int) -> Job | None:
        """Notes the end of a process that has been waited for; its job, if it was one's main process."""
        job = self._by_pid.pop(pid, None)
        if job is not None:
            job.ended = True
        return job

    def next_deadline_s(self) -> float | None:
        """The earliest moment at which a job has to be killed."""
        first = None
        for job in self._by_id.values():
            if not job.killed:
                for moment_s in (job.lease_until_s, job.kill_at_s):
                    if moment_s is not None and (first is None or moment_s < first):
                        first = moment_s
        return first

    def overdue(self, now_s: float) -> list[Job]:
        """Jobs that have to be killed now."""
        return [job for job in self._by_id.values() if (job.deadline_s() or now_s + 1) <= now_s]

    def kill(self, job: Job) -> None:
        """KILLs the whole tree of a job."""
        job.killed = True
        cgroups.kill(job.folders)
        proctree.kill_tree(self._roots(job))

    def tree(self, job: Job) -> set[int]:
        """Every process of a job."""
        return proctree.descendants(self._roots(job))

    def sweep(self, childless: bool = False) -> list[Job]:
        """Deals with every orphan there is; the jobs that are gone now, and are forgotten here."""
        orphans = None if childless else self._orphans()
        kept = self._end_orphans(orphans) if orphans else ()
        gone = []
        for job in list(self._by_id.values()):
            if job.ended and job.id not in kept:
                gone.append(job)
                del self._by_id[job.id]
                self._past.append(job.pid)
        return gone

    def _end_orphans(self, orphans: set[int]) -> set[str]:
        """Ends those whose job has ended; the ids of the jobs that have to wait for them."""
        kept = set()
        unknown = []
        for pid in orphans:
            owner = self._owner(pid)
            if owner is None:
                unknown.append(pid)
            elif owner.ended:
                kept.add(owner.id)
                self._end_stray(owner, pid)
        kept.update(self._end_unknown(unknown))
        return kept

    def _orphans(self) -> set[int]:
        """What the kernel has given to this process. It gives them to its main thread, which forks the jobs too."""
        try:
            listed = proctree.contents(self._children)
        except OSError:
            return proctree.children(os.getpid()).difference(self._by_pid)
        return set(map(int, listed.split())).difference(self._by_pid)

    def _roots(self, job: Job) -> set[int]:
        roots = {pid for pid in self._orphans() if self._owner(pid) is job}
        return roots if job.ended else roots | {job.pid}

    def _owner(self, pid: int) -> Job | None:
        facts = proctree.status(pid)
        if facts is None:
            return None
        for job in self._by_id.values():
            if job.pid == facts.session:
                return job
        paths = cgroups.paths_of(pid) if any(job.tag for job in self._by_id.values()) else []
        for job in self._by_id.values():
            if cgroups.holds(job.tag, paths):
                return job
        named = self._by_id.get(proctree.environment_value(pid, MARK) or "")
        if named is not None:
            return named
        files = proctree.open_files(pid)
        holders = [job for job in self._by_id.values() if job.files & files]
        return holders[0] if len(holders) == 1 else None

    def _end_stray(self, job: Job, pid: int) -> None:
        """A job ends with its main process; a job that is being ended leaves the rest of its grace to the others."""
        if not job.killed and job.kill_at_s is not None:
            return
        for found in proctree.descendants([pid]):
            job.tell_stray(found)
        proctree.kill_tree([pid])

    def _end_unknown(self, pids: list[int]) -> Iterator[str]:
        """Kills orphans that can belong to no running job; yields the ids of ended jobs that have to wait for them."""
        for pid in pids:
            facts = proctree.status(pid)
            if facts is None or facts.state == "Z":
                continue
            suspects = [job for job in self._by_id.values() if job.started <= facts.started]
            if facts.session in self._past or all(job.ended for job in suspects):
                for job in suspects:
                    job.tell_stray(pid)
                    yield job.id
                proctree.kill_tree([pid])
