"""What a job asks for, read back from its record."""

from __future__ import annotations

from gpulayer.session import Session
from gpulayer_broker.errors import UsageError
from gpulayer_broker.job import MESSAGE, JobRecord
from gpulayer_broker.requirements import Requirements, decode
from gpulayer_broker.spec import decode as decode_spec


def needs_of(session: Session, record: JobRecord) -> Requirements:
    """The requirements; those of a message of a Dramatiq app stand for its signature, while that is in use."""
    if record.kind != MESSAGE:
        return decode(decode_spec(record.spec).requirements)
    canonical = session.attempt(lambda queue: queue.requirements(record.signature))
    if canonical is None:
        raise UsageError(
            f"job {record.id} is a message of a Dramatiq app and has ended: what it needed is not kept",
            job_id=record.id,
        )
    return decode(canonical)
