"""Groups: jobs that were submitted together. A group is `g_…`, its members are `g_…-1`, `g_…-2`, and so on.

A group has no record of its own: its members' ids are made of its id, and each member's spec says how many they are.
Any one member that is still kept is therefore enough to find them all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from gpulayer_broker.damage import words
from gpulayer_broker.errors import GpulayerError, JobNotFound, UsageError
from gpulayer_broker.job import new_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.spec import decode

SIZE = "of"
PREFIX = "g_"
PAGE = 500
MOST_MEMBERS = 1_000_000

_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12})(?::(\d{1,12}))?)?")


def new_group_id() -> str:
    """An id that no group has."""
    return new_id(PREFIX)


def member_id(group_id: str, number: int) -> str:
    """The id of a member, by its number from 1."""
    return f"{group_id}-{number}"


def is_group(job_id: str) -> bool:
    """Whether the id is a group's."""
    return job_id.startswith(PREFIX) and "-" not in job_id


def refuse_group(job_id: str) -> None:
    """UsageError for a group where one job is meant, and for a part of a job."""
    refuse_part(job_id)
    if is_group(job_id):
        raise UsageError(
            f"{job_id} is a group: name one of its jobs, such as {member_id(job_id, 1)}", value=job_id
        )


def refuse_part(job_id: str) -> None:
    """JobNotFound for what the queue calls a range of a map's calls."""
    if "/" in job_id:
        raise JobNotFound.named(job_id)


def members(queue: Queue, group_id: str) -> list[str]:
    """The ids of all members, of those also that are no longer kept; JobNotFound where none is."""
    for page in (range(1, 2), range(2, PAGE + 1)):
        for record in queue.records([member_id(group_id, number) for number in page]):
            if record is not None:
                count = int(decode(record.spec).extra.get(SIZE) or 0)
                return [member_id(group_id, number) for number in range(1, count + 1)]
    raise JobNotFound(f"no group '{group_id}': gpulayer jobs lists what there is", value=group_id)


def expanded(queue: Queue, job_ids: Sequence[str]) -> list[str]:
    """The ids, each group's members in its place."""
    found: list[str] = []
    for job_id in job_ids:
        found += members(queue, job_id) if is_group(job_id) else [job_id]
    return found


def states(queue: Queue, job_ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(id, state) of each job; '' for one that is no longer kept."""
    for start in range(0, len(job_ids), PAGE):
        page = job_ids[start : start + PAGE]
        commands = [("HGET", queue.keys.job(job_id), "state") for job_id in page]
        for job_id, state in zip(page, queue.link.pipeline(commands), strict=True):
            if isinstance(state, GpulayerError):
                raise state
            yield job_id, words(state)


def summary(counts: Counter[str]) -> str:
    """`98 succeeded, 2 failed`."""
    return ", ".join(f"{count} {state or 'no longer kept'}" for state, count in counts.items())


def parsed_array(text: str) -> tuple[list[int], int | None]:
    """The numbers of `0-99`, `1,5-7`, `0-8:2`, and after `%` how many run at once."""
    ranges, percent, most = text.replace(" ", "").partition("%")
    if percent and not (most.isascii() and most.isdigit() and int(most)):
        raise UsageError(f"--array {text}: after % stands how many run at once, such as 0-99%4", value=text)
    numbers: dict[int, None] = {}
    for part in ranges.split(","):
        some = _numbers(part, text)
        if len(numbers) + len(some) > MOST_MEMBERS:
            raise UsageError(f"--array {text}: these are more than {MOST_MEMBERS} jobs", value=text)
        numbers.update(dict.fromkeys(some))
    return list(numbers), int(most) if percent else None


def _numbers(part: str, text: str) -> range:
    match = _RANGE.fullmatch(part)
    if match is None or match[3] in ("0", "00"):
        raise UsageError(
            f"--array {text}: write numbers and ranges, such as 0-99 or 1,5-7 or 0-8:2", value=text
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise UsageError(f"--array {text}: {part} is empty: the larger number stands last", value=text)
    return range(first, last + 1, max(1, int(match[3] or 1)))
