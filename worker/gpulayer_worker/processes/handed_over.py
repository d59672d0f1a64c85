"""A job in a fork server's hands: the pipes on which it speaks, the message that starts it, and its end."""

from __future__ import annotations

from typing import Any

from .job import Ending, Exit, FunctionCall, JobHandle, WarmWork, work_message
from .pipes import Pipe, ProgressPipe, ReportPipe


class HandedOver:
    """A job in the fork server's hands, with the pipes that it speaks on."""

    def __init__(self, handle: JobHandle) -> None:
        self.handle = handle
        self.lease_until_s = handle.job.lease_until_s
        self.after = handle.job.after
        self.report = ReportPipe()
        callback = handle.job.on_progress
        self.progress = ProgressPipe(callback) if callback is not None else None
        self.exit: Exit | None = None
        self.expired = False
        self.is_watched = False

    def pipes(self) -> list[Pipe]:
        return [self.report] if self.progress is None else [self.report, self.progress]

    def descriptors(self) -> list[tuple[str, int]]:
        """What the job is given open, by name."""
        job = self.handle.job
        named = [("stdout", job.stdout), ("stderr", job.stderr), ("report", self.report.writer)]
        if self.progress is not None:
            named.append(("progress", self.progress.writer))
        return named + (list(job.work.channels.items()) if isinstance(job.work, WarmWork) else [])

    def blobs(self) -> list[bytes]:
        """The bytes that go with the message."""
        work = self.handle.job.work
        return work.blobs if isinstance(work, FunctionCall) else []

    def message(self) -> dict[str, Any]:
        job = self.handle.job
        names = [name for name, _ in self.descriptors()]
        return work_message(job.work) | {
            "request": "start",
            "id": job.id,
            "cwd": str(job.cwd),
            "env": dict(job.env),
            "umask": job.umask,
            "lease_until_s": self.lease_until_s,
            "cgroups": list(job.cgroups),
            "after": self.after,
            "is_quick": job.is_quick,
            "pipes": names,
            "descriptors": len(names),
        }

    def finish(self, main: Exit | None, strays: tuple[str, ...], lost: bool, refused: str | None) -> None:
        """Reads what the job has said last, and tells all who wait."""
        for pipe in self.pipes():
            pipe.read()
            pipe.close()
        self.handle.resolve(Ending(main, self.report.report(), strays, self.expired, lost, refused))
