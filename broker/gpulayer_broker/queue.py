"""The queue over one connection: every function in one line, and the plain reads beside them.

Each function is idempotent by its token, nonce or id, so a lost reply is answered by sending the call again until
`deadline_s`. What is new to the queue (a signature, a class) is judged here in Python, because versions and
labels cannot be judged in Lua.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

from gpulayer_broker import capabilities, functions, library, requirements
from gpulayer_broker.answers import Committed, Page, Submitted
from gpulayer_broker.connection import Link, ReplyError
from gpulayer_broker.damage import MOST, whole, words
from gpulayer_broker.errors import (
    GpulayerError,
    IdempotencyConflict,
    JobNotFound,
    QueueFull,
    TooManyRequirements,
    Unavailable,
)
from gpulayer_broker.functions import AnyEnding, Call, Offer, Registration, Stencilled, Submission
from gpulayer_broker.job import QUEUED, RECORD_FIELDS, JobRecord, decode_record
from gpulayer_broker.keys import DEFAULT_NAMESPACE, Keys, root_of
from gpulayer_broker.matching import eligible_groups
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.settings import Settings

T = TypeVar("T")

_ROUNDS = 50
_PAGES_AT_ONCE = 50
_PAGE_OF_IDS = 500


class Queue:
    """One namespace of the queue, over one link. Safe between threads as far as the link is."""

    def __init__(self, link: Link, namespace: str = DEFAULT_NAMESPACE, *, deadline_s: float = 15.0) -> None:
        self.link = link
        self.namespace = namespace
        self.keys = Keys(root_of(namespace))
        self.deadline_s = deadline_s

    def load(self) -> None:
        """Loads the Lua library where it is missing or older."""
        library.load(self.link)

    def configure(self, settings: Settings, *, changed_only: bool = False) -> None:
        """Writes the settings that the functions themselves keep, which hold for the whole namespace.

        With `changed_only` those that differ from the defaults, and nothing where none does.
        """
        default = _kept_by_the_queue(Settings())
        kept = {
            name: value
            for name, value in _kept_by_the_queue(settings).items()
            if not changed_only or value != default[name]
        }
        if kept:
            parts = (part for item in kept.items() for part in item)
            self.link.call_idempotent("HSET", self.keys.named("config"), *parts, deadline_s=self.deadline_s)

    def run(self, call: Call[T]) -> T:
        """The parsed reply; sent again after a lost connection, because every function bears it."""
        command = call.command(self.keys.root)
        try:
            reply = self.link.call_idempotent(*command, deadline_s=self.deadline_s)
        except ReplyError as error:
            self.load_again(error)
            reply = self.link.call_idempotent(*command, deadline_s=self.deadline_s)
        return call.parse(reply)

    def run_once(self, call: Call[T]) -> T:
        """The parsed reply of a call that is run at most once."""
        command = call.command(self.keys.root)
        try:
            return call.parse(self.link.call(*command))
        except ReplyError as error:
            self.load_again(error)
            return call.parse(self.link.call(*command))

    def load_again(self, error: ReplyError) -> None:
        """For a server that lost its functions with its data, or has an older release's; any other error is raised."""
        if not library.is_missing(error):
            raise error
        library.reload(self.link)

    def run_together(self, calls: Sequence[Call[T]]) -> list[T | GpulayerError]:
        """As `run` for many calls in one send, in order; a refused one stands in the list as its error."""
        commands = [call.command(self.keys.root) for call in calls]
        replies = self.link.pipeline_idempotent(commands, deadline_s=self.deadline_s)
        if missing := next(filter(library.is_missing, replies), None):
            self.load_again(missing)
            replies = self.link.pipeline_idempotent(commands, deadline_s=self.deadline_s)
        return _parsed(calls, replies)

    def run_many(self, calls: Sequence[Call[T]]) -> list[T | GpulayerError]:
        """Many calls in one send, in order; a refused one stands in the list as its error."""
        return _parsed(calls, self.link.pipeline([call.command(self.keys.root) for call in calls]))

    # Entering the queue ---------------------------------------------------------------------------------------------

    def submit(self, job: Submission | Stencilled, needs: Requirements) -> str:
        """The job's id: the given one, or the one that the idempotency key already has."""
        answer = self._introducing(
            lambda: self.run(functions.submit(job)),
            lambda answer: needs if answer.outcome == "introduce" else None,
        )
        return accepted(answer, job)

    def submit_many(self, jobs: Sequence[Submission], needs: Requirements) -> list[str]:
        """The ids, in order, of jobs that share their requirements; sent together."""
        ids: dict[str, str] = {}

        def send() -> bool:
            """Whether all are in."""
            pending = [job for job in jobs if job.id not in ids]
            answers = granted(self.run_many([functions.submit(job) for job in pending]))
            for job, answer in zip(pending, answers, strict=True):
                if answer.outcome != "introduce":
                    ids[job.id] = accepted(answer, job)
            return all(job.id in ids for job in jobs)

        self._introducing(send, lambda all_in: None if all_in else needs)
        return [ids[job.id] for job in jobs]

    def requeue(self, dead: Submission, needs: Requirements) -> bool:
        """Enters a dead letter anew; False where it is none any more."""
        answer = self._introducing(
            lambda: self.run(functions.requeue(dead)),
            lambda answer: needs if answer.outcome == "introduce" else None,
        )
        return answer.outcome != "missing"

    def _introducing(self, ask: Callable[[], T], unknown: Callable[[T], Requirements | None]) -> T:
        """The answer, asked for again as long as it says that the queue does not know some requirements."""
        for _ in range(_ROUNDS):
            answer = ask()
            needs = unknown(answer)
            if needs is None:
                return answer
            self.introduce(needs)
        raise Unavailable("the namespace's requirements change faster than they can be judged; try again")

    def introduce(self, needs: Requirements) -> None:
        """Makes a signature known, judged against every class of workers that the queue knows."""
        for _ in range(_ROUNDS):
            version, classes = self.table("classes")
            fits = {}
            for class_id, record in classes.items():
                groups = _eligible(needs, record)
                if groups is not None:
                    fits[class_id] = groups
            answer = self.run(functions.introduce(needs.signature, needs.canonical(), version, fits))
            if answer.outcome == "ok":
                return
            if answer.outcome == "too_many":
                raise TooManyRequirements(
                    f"this namespace already holds {answer.version} different requirements with open jobs: "
                    "use rounder amounts, or a namespace of your own",
                )
        raise Unavailable("workers come and go faster than requirements can be judged; try again")

    def register(self, worker: Registration) -> None:
        """Joins a worker, its class judged against every signature that the queue knows."""
        version, fits = "", dict[str, tuple[int, ...]]()
        for _ in range(_ROUNDS):
            answer = self.run(functions.register(worker, version, fits))
            if answer.outcome == "ok":
                return
            version, signatures = self.table("signatures")
            judged = (
                (sig, _eligible_text(record, worker.capabilities)) for sig, record in signatures.items()
            )
            fits = {sig: groups for sig, groups in judged if groups is not None}
        raise Unavailable("requirements come and go faster than this worker can judge them; try again")

    def commit(
        self, ending: AnyEnding, next_claim: Offer | None, outbox_needs: Iterable[Requirements]
    ) -> Committed:
        """Ends an attempt; what its outbox asks for is made known first where it is new."""
        needs = {r.signature: r for r in outbox_needs}
        return self._introducing(
            lambda: self.run(functions.commit(ending, next_claim)),
            lambda answer: needs[answer.signature] if answer.verdict == "introduce" else None,
        )

    def table(self, side: str) -> tuple[str, dict[str, bytes]]:
        """The whole table of the other side ('signatures' or 'classes') at one version."""
        for _ in range(_ROUNDS):
            first = page = self.run(functions.match(side))
            rows = dict(page.rows)
            while page.cursor != "0":
                page = self.run(functions.match(side, page.cursor))
                rows.update(page.rows)
            if _same_version(first, page):
                return page.version, rows
        raise Unavailable("the namespace's tables change faster than they can be read; try again")

    # Plain reads ----------------------------------------------------------------------------------------------------

    def record(self, job_id: str) -> JobRecord:
        """The job's record without its result; JobNotFound where there is none."""
        found = self.records([job_id])[0]
        if found is None:
            raise JobNotFound.named(job_id)
        return found

    def records(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """The records in the order of the ids, None for a job that does not exist."""
        commands = [("HMGET", self.keys.job(job_id), *RECORD_FIELDS) for job_id in job_ids]
        out: list[JobRecord | None] = []
        for job_id, values in zip(job_ids, granted(self.link.pipeline(commands)), strict=True):
            out.append(decode_record(job_id, dict(zip(RECORD_FIELDS, values, strict=True))))
        return out

    def requirements(self, signature: str) -> bytes | None:
        """What a signature stands for, canonical; None once no open job has it."""
        found: bytes | None = self.link.call("HGET", self.keys.named("signatures"), signature)
        return found

    def newest(self, state: str, most: int, skip: int = 0) -> list[str]:
        """Ids of jobs in a state, newest first."""
        last = min(skip + most, MOST) - 1
        ids = self.link.call("ZREVRANGE", self.keys.jobs(state), skip, last)
        return [words(raw) for raw in ids]

    def waiting(self, logical_queue: str) -> Iterator[list[str]]:
        """Ids of a logical queue's jobs that wait, in any phase, oldest first, a page at a time."""
        key, after = self.keys.jobs(QUEUED), "-inf"
        while page := self.link.call(
            "ZRANGEBYSCORE", key, after, "+inf", "WITHSCORES", "LIMIT", 0, _PAGE_OF_IDS
        ):
            ids = [words(raw) for raw in page[::2]]
            queues = granted(self.link.pipeline([("HGET", self.keys.job(job_id), "queue") for job_id in ids]))
            yield [id_ for id_, queue in zip(ids, queues, strict=True) if queue == logical_queue.encode()]
            after = f"({page[-1].decode()}"

    def result(self, job_id: str) -> tuple[str, bytes | None]:
        """(kind, bytes) of the result; None where it was none or is no longer kept."""
        kind, data = self.link.call("HMGET", self.keys.job(job_id), "result_kind", "result")
        return (kind or b"").decode(), data

    def pages(self, array_id: str, known: Container[int] = ()) -> dict[int, bytes]:
        """First item → packed outcomes of each range of an array that has ended, but those that are `known`."""
        key = self.keys.pages(array_id)
        starts = [
            start
            for raw in self.link.call("HKEYS", key)
            if (start := whole(raw)) is not None and start not in known
        ]
        found: dict[int, bytes] = {}
        for at in range(0, len(starts), _PAGES_AT_ONCE):
            some = starts[at : at + _PAGES_AT_ONCE]
            pages = zip(some, self.link.call("HMGET", key, *some), strict=True)
            found.update((start, page) for start, page in pages if page is not None)
        return found

    def item_counts(self, array_id: str) -> tuple[int, int]:
        """How many items of an array have ended, and how many of these badly."""
        done, failed = self.link.call("HMGET", self.keys.array(array_id), "done", "failed")
        return whole(done) or 0, whole(failed) or 0

    def open_jobs(self, logical_queue: str) -> int:
        """Jobs of a logical queue that are not final: waiting, delayed and in flight.

        A signature belongs to one logical queue, so their counts by signature tell it.
        """
        flat = self.link.call("HGETALL", self.keys.named("sigjobs"))
        if not flat:
            return 0
        needs = self.link.call("HMGET", self.keys.named("signatures"), *flat[::2])
        queues = [_queue_of(raw) for raw in needs]
        return sum(
            whole(count) or 0
            for queue, count in zip(queues, flat[1::2], strict=True)
            if queue == logical_queue
        )


@lru_cache(maxsize=4096)
def _queue_of(needs: bytes | None) -> str:
    """The logical queue of the jobs that need this; the one of GPUlayer's own where nobody can read it."""
    try:
        return requirements.decode(needs or b"").queue
    except GpulayerError:
        return requirements.DEFAULT_QUEUE


def _parsed(calls: Sequence[Call[T]], replies: Sequence[Any]) -> list[T | GpulayerError]:
    return [
        reply if isinstance(reply, GpulayerError) else call.parse(reply)
        for call, reply in zip(calls, replies, strict=True)
    ]


def granted(answers: list[T | GpulayerError]) -> list[T]:
    """The answers of many calls; the first refusal among them is raised."""
    for answer in answers:
        if isinstance(answer, GpulayerError):
            raise answer
    return cast(list[T], answers)


def accepted(answer: Submitted, job: Submission | Stencilled) -> str:
    """The id of an accepted submit; the refusal as its error otherwise."""
    if answer.outcome == "full":
        raise QueueFull(f"the queue holds {answer.id} waiting jobs, its limit: try again when some have run")
    if answer.outcome == "missing":
        raise JobNotFound.named(answer.id)
    if answer.outcome == "conflict":
        raise IdempotencyConflict(
            f"idempotency key {job.idempotency_key!r} was used for another request (job {answer.id}): use a new key",
            job_id=answer.id,
            value=job.idempotency_key,
        )
    return answer.id or job.id


def _same_version(first: Page, last: Page) -> bool:
    return first.version == last.version


def _eligible(needs: Requirements, record: bytes) -> tuple[int, ...] | None:
    try:
        return eligible_groups(needs, capabilities.decode(record))
    except GpulayerError:  # written by a newer release: whoever can judge it will
        return None


def _eligible_text(record: bytes, caps: bytes) -> tuple[int, ...] | None:
    try:
        return eligible_groups(requirements.decode(record), capabilities.decode(caps))
    except GpulayerError:
        return None


def _kept_by_the_queue(settings: Settings) -> dict[str, str | int]:
    return {
        "max_queued": settings.queued_jobs,
        "lost_workers": settings.lost_workers,
        "log_tail": settings.log_tail_bytes,
        "placement": settings.placement,
        "lease_ms": int(settings.lease_s * 1000),
        "earmark_ms": int(settings.earmark_s * 1000),
        "job_keep_ms": int(settings.job_keep_s * 1000),
        "result_keep_ms": int(settings.result_keep_s * 1000),
    }
