"""What a job's own code may ask and tell while it runs: `current_job` and `progress`.

Both do nothing harmful outside of a job, so that the same function runs here and there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class CurrentJob:
    """The job that this process runs for, as its worker's environment tells it."""

    id: str
    attempt: int
    name: str
    accelerator: str
    gpus: int
    outputs: str
    scratch: str


def current_job() -> CurrentJob | None:
    """The job that this process runs for; None outside of one.

    >>> if job := gl.current_job():
    ...     print(job.id, job.attempt, job.outputs)
    """
    given = os.environ
    if not given.get("GPULAYER_JOB_ID"):
        return None
    return CurrentJob(
        id=given["GPULAYER_JOB_ID"],
        attempt=int(given.get("GPULAYER_ATTEMPT") or 1),
        name=given.get("GPULAYER_NAME", ""),
        accelerator=given.get("GPULAYER_ACCELERATOR", "cpu"),
        gpus=int(given.get("GPULAYER_GPUS") or 0),
        outputs=given.get("GPULAYER_OUTPUTS", "outputs"),
        scratch=given.get("GPULAYER_SCRATCH", ""),
    )


def progress(done: float, total: float) -> None:
    """Tells how far the job is; does nothing outside of a job, and never blocks it.

    >>> for step in range(1000):
    ...     gl.progress(step, 1000)
    """
    descriptor = os.environ.get("GPULAYER_PROGRESS_FD")
    if not descriptor:
        return
    import json

    line = json.dumps({"done": done, "total": total}) + "\n"
    try:
        os.write(int(descriptor), line.encode("ascii"))
    except OSError:
        # A full pipe: the worker is behind, and the next call tells more. A closed one: nobody listens.
        return
