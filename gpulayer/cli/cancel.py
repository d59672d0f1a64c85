"""`gpulayer cancel`: asks for the end of jobs and groups, of however many in a few sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say, say_each

if TYPE_CHECKING:
    from gpulayer.client import Client


def cancel_jobs(
    job: opt.JobsArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Ask for the end of jobs: a waiting one ends at once, a running one by TERM, then KILL.

    Example: gpulayer cancel j_0123456789ab
    """
    from gpulayer.cli.many import cancelled_group
    from gpulayer.groups import is_group, refuse_part
    from gpulayer_broker.errors import JobNotFound

    names = list(dict.fromkeys(job))
    for each in names:
        refuse_part(each)
    with opt.open_client(target, redis) as client:
        found = _cancelled(client, [each for each in names if not is_group(each)])
        missing = [each for each, document in found.items() if document is None]
        if missing == names:
            raise JobNotFound.named(*missing)
        found |= {each: cancelled_group(client, each) for each in names if is_group(each)}
    documents = [document for each in names if (document := found[each])]
    if json:
        print_json(documents if len(job) > 1 else documents[0])
    else:
        _tell(documents)
    if missing:
        raise JobNotFound.named(*missing)
    return 0


def _cancelled(client: Client, job_ids: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """What came of each; None for one that is not there."""
    from gpulayer.opened import HEARD

    outcomes = client._opened.cancel_each(job_ids)
    records = client._opened.found(job_ids)
    return {
        job_id: {
            "schema": 1,
            "id": job_id,
            "asked": outcome in HEARD,
            "state": record.state,
            "end_reason": record.end_reason or None,
        }
        if record is not None
        else None
        for job_id, outcome, record in zip(job_ids, outcomes, records, strict=True)
    }


def _tell(documents: Sequence[dict[str, Any]]) -> None:
    for document in documents:
        if "states" in document:
            say(f"group {document['id']}: the end of {document['asked']} jobs is asked for")
    say_each([(f"job {document['id']}", _text(document)) for document in documents if "state" in document])


def _text(told: dict[str, Any]) -> str:
    if not told["asked"]:
        return f"it has ended already ({told['state']})"
    return "cancelled" if told["state"] == "cancelled" else "its end is asked for"
