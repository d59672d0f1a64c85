"""Ctrl-C for a job that runs elsewhere: whether it has a process that can see it, and the asking."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer.groups import refuse_group
from gpulayer.options import WARM
from gpulayer_broker import functions
from gpulayer_broker.errors import UsageError
from gpulayer_broker.spec import decode

if TYPE_CHECKING:
    from gpulayer.client import Client


def interrupt(client: Client, job_id: str) -> bool:
    """Whether the job runs and its worker is told; UsageError for one without a process of its own."""
    refuse_group(job_id)
    (record,) = client._records([job_id])
    if record.kind == "message" or record.is_array or decode(record.spec).isolation == WARM:
        raise UsageError(
            f"job {job_id} has no process of its own: gpulayer cancel {job_id} ends it", value=job_id
        )
    outcome, _ = client._session.attempt(lambda queue: queue.run(functions.interrupt(job_id)))
    return outcome == "asked"
