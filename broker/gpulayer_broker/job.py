"""The job: its id, its states as one table, and its record as it is read back.

`TRANSITIONS` is the state machine. It drives the documentation and the tests; the Lua functions carry it out, each
transition in exactly one call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from gpulayer_broker.damage import LAST_MS, whole

# Of any byte one of Crockford's 32 letters, all of them equally often.
_LETTERS = b"0123456789abcdefghjkmnpqrstvwxyz" * 8

QUEUED, SCHEDULED, RUNNING = "queued", "scheduled", "running"
SUCCEEDED, FAILED, CANCELLED, TIMED_OUT = "succeeded", "failed", "cancelled", "timed_out"
ACTIVE = (QUEUED, SCHEDULED, RUNNING)
FINAL = (SUCCEEDED, FAILED, CANCELLED, TIMED_OUT)
STATES = ACTIVE + FINAL

# The kind of a job that is a message of a Dramatiq app: what it is to do is for that app alone to read.
MESSAGE = "message"


# Why a job ended: a lost machine must never look like a user's failure.
END_REASONS = {
    "": "it succeeded",
    "user_error": "the command exited non-zero, or the function raised",
    "signal": "the job's process was ended by a signal that GPUlayer did not send",
    "oom": "the job's memory limit, or the machine's, was exceeded",
    "disk": "it wrote more than the disk that it asked for",
    "timeout": "it ran past its timeout",
    "cancelled": "somebody asked for its end",
    "worker_lost": "three workers were lost while they ran it",
    "cannot_start": "its source, environment or program could not be prepared or started",
    "result_error": "its result could not be pickled, or is too large",
    "undecodable": "its record could not be read",
    "predecessor_failed": "a job that it was to run after did not succeed",
}

PRIORITIES = {"critical": 0, "high": 1, "normal": 2, "low": 3, "idle": 4}


@dataclass(frozen=True)
class Transition:
    """`function` moves a job from one state to another; `who` may call it so."""

    source: str
    event: str
    target: str
    function: str
    who: str


_COMMITS = "commit, commit_calls, commit_items"

TRANSITIONS = (
    Transition("", "submitted", QUEUED, "submit, commit", "client, attempt's holder"),
    Transition(QUEUED, "due", QUEUED, "tick", "anybody"),
    Transition(QUEUED, "granted, needs preparation", SCHEDULED, "claim, commit", "worker"),
    Transition(QUEUED, "granted", RUNNING, "claim, commit", "worker"),
    Transition(QUEUED, "cancelled", CANCELLED, "cancel", "client"),
    Transition(
        QUEUED,
        "what it was to run after did not succeed",
        CANCELLED,
        f"submit, {_COMMITS}, cancel, claim, release, tick, register",
        "whoever ends the other, or submits after it",
    ),
    Transition(QUEUED, "its record is damaged", FAILED, "claim, commit", "worker"),
    Transition(SCHEDULED, "started", RUNNING, "renew, log", "attempt's holder"),
    *(
        Transition(held, event, target, function, who)
        for held in (SCHEDULED, RUNNING)
        for event, target, function, who in (
            ("ended well", SUCCEEDED, _COMMITS, "attempt's holder"),
            ("ended badly", FAILED, _COMMITS, "attempt's holder"),
            ("ran out of time", TIMED_OUT, "commit, commit_calls", "attempt's holder"),
            (
                "cancelled and ended",
                CANCELLED,
                f"{_COMMITS}, release, tick, register",
                "attempt's holder, reaper",
            ),
            ("retried", QUEUED, "commit, commit_calls", "attempt's holder"),
            ("given back", QUEUED, "release, renew", "attempt's holder"),
            ("lost", QUEUED, "tick, register, release", "reaper, worker's next incarnation"),
            (
                "lost for the third time",
                FAILED,
                "tick, register, release",
                "reaper, worker's next incarnation",
            ),
        )
    ),
    # Final is final: what enters the queue anew, under the id of one that has ended, is a new record.
    Transition(FAILED, "requeued, a dead letter", QUEUED, "requeue", "client"),
    *(
        Transition(
            ended, "a Dramatiq message, enqueued again", QUEUED, "submit, commit", "client, attempt's holder"
        )
        for ended in FINAL
    ),
)


def new_job_id() -> str:
    """An id that no job has."""
    return new_id("j_")


def new_id(prefix: str) -> str:
    """The prefix and 60 random bits in Crockford's base 32: short enough to type."""
    return prefix + os.urandom(12).translate(_LETTERS).decode()


@dataclass(frozen=True)
class JobRecord:
    """What the queue holds of a job. Times are milliseconds since 1970 of the server's clock, None if not reached."""

    id: str
    state: str
    phase: str
    kind: str
    name: str
    signature: str
    owner: str
    priority: int
    queue: str
    worker: str
    node: str
    lots: tuple[tuple[str, int], ...]
    attempt: int
    losses: int
    retries: int
    end_reason: str
    created_ms: int
    queued_ms: int | None
    granted_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    progress: str
    error: bytes
    outputs: str
    usage: bytes
    logs: bytes
    notes: bytes
    result_kind: str
    cancel_asked: bool
    options: bytes
    spec: bytes
    count: int = 0
    after: tuple[str, ...] = ()
    permit: str = ""
    rate: str = ""
    keep_ms: int = 0

    @property
    def is_array(self) -> bool:
        """Whether it stands for many calls, whose outcomes are kept in pages."""
        return self.count > 0

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def queue_wait_s(self) -> float | None:
        """From when it last became runnable to its grant."""
        return _span_s(self.queued_ms, self.granted_ms)

    @property
    def run_time_s(self) -> float | None:
        """Of a job that ended before its start was told, as short ones do: what its worker measured."""
        if self.started_ms is None and self.ended_ms is not None:
            return _measured_s(self.usage)
        return _span_s(self.started_ms, self.ended_ms)


def _span_s(start_ms: int | None, end_ms: int | None) -> float | None:
    """The server's clock may have been put back in between."""
    return None if start_ms is None or end_ms is None else max(0, end_ms - start_ms) / 1000


def _measured_s(usage: bytes) -> float | None:
    try:
        return float(json.loads(usage)["wall_s"])
    except (ValueError, KeyError, TypeError):
        return None


# Everything of the record but its result, which may be large.
RECORD_FIELDS = (
    "state",
    "phase",
    "kind",
    "name",
    "sig",
    "owner",
    "prio",
    "queue",
    "worker",
    "node",
    "lots",
    "attempt",
    "losses",
    "retries",
    "end_reason",
    "created_ms",
    "queued_ms",
    "granted_ms",
    "started_ms",
    "ended_ms",
    "progress",
    "error",
    "outputs",
    "usage",
    "logs",
    "notes",
    "result_kind",
    "cancel",
    "options",
    "spec",
    "count",
    "after",
    "permit",
    "rate",
    "rated",
    "keep_ms",
)


def decode_record(job_id: str, values: Mapping[str, bytes | None]) -> JobRecord | None:
    """The record from the fields of its hash (`RECORD_FIELDS`); None where there is no such job.

    What is damaged in it is left out, so that it keeps nobody from seeing the rest.
    """
    if values.get("state") is None:
        return None

    def text(name: str) -> str:
        return (values.get(name) or b"").decode("utf-8", "replace")

    def number(name: str) -> int:
        return whole(values.get(name)) or 0

    def time_ms(name: str) -> int | None:
        return whole(values.get(name), LAST_MS)

    pairs = (lot.rpartition("/") for lot in text("lots").split(",") if lot)
    return JobRecord(
        id=job_id,
        state=text("state"),
        phase=text("phase"),
        kind=text("kind"),
        name=text("name"),
        signature=text("sig"),
        owner=text("owner"),
        priority=number("prio"),
        queue=text("queue"),
        worker=text("worker"),
        node=text("node"),
        lots=tuple((uuid, whole(share) or 0) for uuid, _, share in pairs),
        attempt=number("attempt"),
        losses=number("losses"),
        retries=number("retries"),
        end_reason=text("end_reason"),
        created_ms=number("created_ms"),
        queued_ms=time_ms("queued_ms"),
        granted_ms=time_ms("granted_ms"),
        started_ms=time_ms("started_ms"),
        ended_ms=time_ms("ended_ms"),
        progress=text("progress"),
        error=values.get("error") or b"",
        outputs=text("outputs"),
        usage=values.get("usage") or b"",
        logs=values.get("logs") or b"",
        notes=values.get("notes") or b"",
        result_kind=text("result_kind"),
        cancel_asked=bool(values.get("cancel")),
        options=values.get("options") or b"",
        spec=values.get("spec") or b"",
        count=number("count"),
        after=tuple(filter(None, text("after").split(","))),
        permit=text("permit"),
        rate=text("rate") or text("rated"),
        keep_ms=number("keep_ms"),
    )
