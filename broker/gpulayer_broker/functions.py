"""A typed stub per Lua function: it builds the call's arguments and reads its reply, and does no I/O.

A `Call` is sent by whoever has a connection: `queue.py`, or an event loop. Times are milliseconds of the
server's clock, amounts are MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from gpulayer_broker import answers
from gpulayer_broker.library import function
from gpulayer_broker.packing import Written, written_around

T = TypeVar("T")
Arg = bytes | str | int


class Call(NamedTuple, Generic[T]):
    """One FCALL under one root, and how to read what comes back; of a call that was `written` its args are all."""

    name: str
    args: tuple[Arg, ...]
    parse: Callable[[Any], T]
    written: bool = False

    def command(self, root: str) -> tuple[Arg, ...]:
        if self.written:
            return self.args
        return (b"FCALL", function(self.name), 1, root, *self.args)


# What callers give -------------------------------------------------------------------------------------------------


# Not frozen: of so many fields, that costs 2 µs a submit.
@dataclass(slots=True)
class Submission:
    """A job as it enters the queue, an array of `count` calls if that is not 0.

    `client` is told when it ends; `digest` is compared under one idempotency key; `after` are jobs that have to end
    first (`after_policy` succeeded or ended); `permit` is `key=limit`, `rate` is `key=limit/window_ms`; `keep_ms` is
    how long its result is kept, 0 for the namespace's own time; calls of one `lane` may be granted together;
    `timeout_ms` is what ends an attempt, 0 for nothing; `signed` is a signature of the spec, which is kept with it and
    which nobody verifies yet.
    """

    id: str
    signature: str
    spec: bytes
    owner: str = "local"
    priority: int = 2
    queue: str = "gpulayer"
    client: str = ""
    delay_ms: int = 0
    prepare: bool = False
    on_outage: str = ""
    idempotency_key: str = ""
    digest: str = ""
    kind: str = ""
    name: str = ""
    options: bytes = b""
    count: int = 0
    after: tuple[str, ...] = ()
    after_policy: str = "succeeded"
    permit: str = ""
    rate: str = ""
    keep_ms: int = 0
    lane: str = ""
    timeout_ms: int = 0
    signed: bytes = b""

    def block(self) -> tuple[Arg, ...]:
        """The twenty-four values of a submit block (lua/h_queueing.lua)."""
        return self._common() + self._rare()

    def short_block(self) -> tuple[Arg, ...]:
        """The block without its end where that says nothing, for a call that ends with it."""
        return self._common() if self._is_plain() else self.block()

    def _is_plain(self) -> bool:
        return not (
            self.delay_ms
            or self.prepare
            or self.on_outage
            or self.idempotency_key
            or self.digest
            or self.count
            or self.after
            or self.permit
            or self.rate
            or self.keep_ms
            or self.timeout_ms
            or self.signed
        )

    def _common(self) -> tuple[Arg, ...]:
        return (
            # As bytes: what is new in each call is not to be remembered as an element of the next.
            self.id.encode(),
            self.signature,
            self.owner,
            self.priority,
            self.queue,
            self.client,
            self.kind,
            self.name,
            self.options,
            self.spec,
            self.lane,
        )

    def _rare(self) -> tuple[Arg, ...]:
        return (
            self.delay_ms,
            int(self.prepare),
            self.on_outage,
            self.idempotency_key,
            self.digest,
            self.count,
            ",".join(self.after),
            self.after_policy if self.after else "",
            self.permit,
            self.rate,
            self.keep_ms,
            self.timeout_ms,
            self.signed,
        )


class Stencil(NamedTuple):
    """A submit under one root, written but for the job's id and its spec."""

    before: Written
    between: Written
    after: Written

    @classmethod
    def of(cls, job: Submission, root: str) -> Stencil:
        """Of all jobs that are submitted as this one."""

        def command(job_id: bytes, spec: bytes) -> tuple[Arg, ...]:
            return submit(replace(job, id=job_id.decode(), spec=spec)).command(root)

        return cls(*written_around(command))


class Stencilled(NamedTuple):
    """A job as it enters the queue by a stencil."""

    id: str
    spec: bytes
    stencil: Stencil

    @property
    def idempotency_key(self) -> str:
        """Empty: what has a key differs in more than its id and its spec."""
        return ""


@dataclass(frozen=True)
class DeviceLot:
    """One share of one usable device, with the memory that nobody outside the queue uses."""

    uuid: str
    share: int
    group: int
    free_mib: int


class Offer(NamedTuple):
    """What a worker could start now. The nonce (128 random bits) makes a repeated claim answer the same."""

    worker: str
    incarnation: str
    max: int
    nonce: str
    lease_ms: int
    disk_mib: int
    lots: tuple[DeviceLot, ...] = ()

    def args(self) -> tuple[Arg, ...]:
        head: list[Arg] = [
            self.worker,
            self.incarnation,
            self.max,
            self.nonce,
            self.lease_ms,
            self.disk_mib,
            len(self.lots),
        ]
        for lot in self.lots:
            head += (lot.uuid, lot.share, lot.group, lot.free_mib)
        return tuple(head)


@dataclass(frozen=True)
class Registration:
    """A worker as it joins: its class, its capacity and the facts that status shows (`info`, JSON)."""

    worker: str
    node: str
    incarnation: str
    class_id: str
    slots: int
    node_cpus: int
    memory_mib: int
    heartbeat_ms: int
    grace_ms: int
    info: bytes
    capabilities: bytes


@dataclass(frozen=True)
class Running:
    """An attempt as a heartbeat lists it; `started` once the job itself runs."""

    id: str
    token: str
    started: bool = True
    progress: str = ""


@dataclass(frozen=True)
class Ending:
    """How an attempt ends: verdict succeeded, failed, timed_out, cancelled or retry, and what the record takes."""

    id: str
    token: str
    verdict: str
    reason: str = ""
    delay_ms: int = 0
    fields: Mapping[str, Arg] = field(default_factory=dict)
    outbox: Sequence[Submission] = ()


@dataclass(frozen=True)
class ItemsEnding:
    """How a chunk ends: items [start, upto) have outcomes (`page`, packed), `failed` of them badly.

    What follows `upto` goes back uncounted.
    """

    id: str
    token: str
    upto: int
    failed: int
    took_us: int
    page: bytes


@dataclass(frozen=True)
class CallEnding:
    """How a call of a lane ends, and the microseconds that it took: None says nothing of the lane, -1 that it wrote
    something or left files, so that the lane's calls are granted one by one."""

    ending: Ending
    took_us: int | None = None


@dataclass(frozen=True)
class CallsEnding:
    """Calls of a lane that end together; none of them has an outbox."""

    calls: tuple[CallEnding, ...]


AnyEnding = Ending | ItemsEnding | CallsEnding


# The functions -----------------------------------------------------------------------------------------------------


def submit(job: Submission | Stencilled) -> Call[answers.Submitted]:
    if isinstance(job, Stencilled):
        before, between, after = job.stencil
        args = before, job.id.encode(), between, job.spec, after
        return Call("submit", args, answers.submitted, written=True)
    return Call("submit", job.short_block(), answers.submitted)


def introduce(
    signature: str, requirements: bytes, version: str, fits: Mapping[str, tuple[int, ...]]
) -> Call[answers.Matched]:
    """`fits`: class → groups of devices that may serve it (empty for a CPU job)."""
    args: tuple[Arg, ...] = (signature, requirements, version, len(fits), *_pairs(fits))
    return Call("introduce", args, answers.matched)


def register(
    worker: Registration, version: str, fits: Mapping[str, tuple[int, ...]]
) -> Call[answers.Matched]:
    """`fits`: signature → groups of devices of this class that may serve it."""
    w = worker
    args: tuple[Arg, ...] = (
        w.worker,
        w.node,
        w.incarnation,
        w.class_id,
        w.slots,
        w.node_cpus,
        w.memory_mib,
        w.heartbeat_ms,
        w.grace_ms,
        w.info,
        w.capabilities,
        version,
        len(fits),
        *_pairs(fits),
    )
    return Call("register", args, answers.matched)


def match(side: str, cursor: str = "0") -> Call[answers.Page]:
    """side: 'signatures' or 'classes'."""
    return Call("match", (side, cursor), answers.page)


def claim(offer: Offer) -> Call[answers.Claimed]:
    return Call("claim", offer.args(), lambda r: answers.claimed(r[0], r[1] if len(r) > 1 else ()))


def renew(
    worker: str,
    incarnation: str,
    lease_ms: int,
    attempts: Sequence[Running],
    info: bytes = b"",
    known: str = "",
) -> Call[answers.Renewed]:
    """`info` replaces what status shows of the worker; empty, that stays. `known`: the last claim that was answered."""
    args: list[Arg] = [worker, incarnation, lease_ms, len(attempts)]
    for a in attempts:
        args += (a.id, a.token, int(a.started), a.progress)
    args += (info, known)
    return Call("renew", tuple(args), answers.renewed)


def log(job_id: str, token: str, rank: int, stream: str, offset: int, data: bytes) -> Call[str]:
    """'ok', 'already' or 'stale'; `stream` is out or err, `offset` where `data` starts in the rank's log."""
    return Call("log", (job_id, token, rank, stream, offset, data), answers.first)


def checkpoint(job_id: str, token: str, digest: str) -> Call[str]:
    return Call("checkpoint", (job_id, token, digest), answers.first)


def commit(
    ending: AnyEnding, next_claim: Offer | None = None, *, claim_follows: bool = False
) -> Call[answers.Committed]:
    """`next_claim` claims for the freed place in the same call; where a claim follows at once, no bell is rung."""
    if isinstance(ending, ItemsEnding):
        return commit_items(ending, next_claim, claim_follows=claim_follows)
    if isinstance(ending, CallsEnding):
        return commit_calls(ending, next_claim, claim_follows=claim_follows)
    e = ending
    args: list[Arg] = [e.id, e.token, e.verdict, e.reason, e.delay_ms, len(e.fields)]
    for name, value in e.fields.items():
        args += (name, value)
    args.append(len(e.outbox))
    for job in e.outbox:
        args += job.block()
    return Call("commit", (*args, *_claiming(next_claim, claim_follows)), answers.committed)


def commit_items(
    ending: ItemsEnding, next_claim: Offer | None = None, *, claim_follows: bool = False
) -> Call[answers.Committed]:
    e = ending
    args: tuple[Arg, ...] = (e.id, e.token, e.upto, e.failed, e.took_us, e.page)
    return Call("commit_items", (*args, *_claiming(next_claim, claim_follows)), answers.committed)


def commit_calls(
    ending: CallsEnding, next_claim: Offer | None = None, *, claim_follows: bool = False
) -> Call[answers.Committed]:
    args: list[Arg] = [len(ending.calls)]
    for call in ending.calls:
        e, took_us = call.ending, "" if call.took_us is None else call.took_us
        args += (e.id, e.token, e.verdict, e.reason, took_us, len(e.fields))
        for name, value in e.fields.items():
            args += (name, value)
    return Call("commit_calls", (*args, *_claiming(next_claim, claim_follows)), answers.committed_calls)


def _claiming(next_claim: Offer | None, claim_follows: bool) -> tuple[Arg, ...]:
    if next_claim:
        return (1, *next_claim.args())
    return (2,) if claim_follows else (0,)


def release(job_id: str, token: str, how: str) -> Call[str]:
    """'ok', 'already' or 'stale'; how: returned, lost, unfit."""
    return Call("release", (job_id, token, how), answers.first)


def cancel(job_id: str) -> Call[tuple[str, str]]:
    """('cancelled' | 'asked' | 'too_late' | 'missing', state if too late)."""
    return Call("cancel", (job_id,), answers.with_state)


def interrupt(job_id: str) -> Call[tuple[str, str]]:
    """('asked' | 'not_running' | 'missing', state if it does not run)."""
    return Call("interrupt", (job_id,), answers.with_state)


def tick(*, older_than_ms: int | None = None, results_older_than_ms: int = 0) -> Call[answers.Ticked]:
    """With an age, records and results that ended so long ago leave now; else by the namespace's own times."""
    ages = () if older_than_ms is None else (older_than_ms, results_older_than_ms)
    return Call("tick", ages, lambda r: answers.Ticked(*map(int, r)))


def barrier(name: str, children: int, life_ms: int) -> Call[str]:
    """'ok' or 'existing'."""
    return Call("barrier", (name, children, life_ms), answers.first)


def requeue(dead: Submission) -> Call[answers.Submitted]:
    """added, existing, missing (it is no dead letter) or introduce (id: signature)."""
    return Call("requeue", dead.short_block(), answers.submitted)


def watch(client: str, job_ids: Sequence[str]) -> Call[dict[str, str]]:
    """job → final state (or 'missing') of those that need no waiting."""
    return Call("watch", (client, *job_ids), answers.states)


def drain(worker: str, state: str, incarnation: str = "") -> Call[str]:
    """'ok', 'missing' or 'superseded'; state: online, draining, offline; a worker itself names its incarnation."""
    return Call("drain", (worker, state, incarnation), answers.first)


def _pairs(fits: Mapping[str, tuple[int, ...]]) -> Iterable[str]:
    for name, groups in fits.items():
        yield name
        yield ",".join(map(str, groups)) or "-"
