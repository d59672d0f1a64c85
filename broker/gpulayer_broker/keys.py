"""Every Redis key of GPUlayer: its name, its type, how long it lives and what it hangs on.

All keys of a namespace start with its root, `gpulayer:{<namespace>}:`. The braces are the cluster's hash tag:
one namespace is one slot. `TABLE` is the data model of the queue; the tests fail on a key that it does not name.

lifetime: `permanent` one key a namespace · `bounded` as large as the live tables it indexes · `job`, `worker`,
`class`, `signature`, `node`, `device` leaves with its owner · `ttl` always carries an expiry · `waiting` exists
only while something waits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_NAMESPACE = "default"

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeyKind:
    """One row of the data model: `<x>` in the pattern stands for any text without a colon, `<x…>` for any text."""

    pattern: str
    type: str
    lifetime: str
    content: str

    def regex(self) -> re.Pattern[str]:
        text = re.escape(self.pattern)
        text = re.sub(r"<[a-z0-9]+…>", ".+", text)
        return re.compile(re.sub(r"<[a-z0-9]+>", "[^:]+", text))


TABLE = (
    KeyKind(
        "config",
        "hash",
        "permanent",
        "the namespace's own settings: placement, max_queued, lost_workers, log_tail, and how long a lease, "
        "a record, a result and the wait for an earmark last",
    ),
    KeyKind("seq", "string", "permanent", "counter: the age of everything"),
    KeyKind(
        "clock",
        "hash",
        "permanent",
        "last tick, last look for earmarks, floor of leases after an outage, how far results were dropped",
    ),
    KeyKind("job:<id>", "hash", "job", "the record: spec, signature, state, token, times, result"),
    KeyKind(
        "queue:<sig>:<owner>:<prio>", "stream", "waiting", "jobs that can run now or are held; id = `<age>-0`"
    ),
    KeyKind("heads:<prio>:<owner>", "zset", "waiting", "signature → age of its oldest waiting entry"),
    KeyKind("waiting:<prio>", "set", "waiting", "owners with a head"),
    KeyKind("signatures", "hash", "bounded", "signature → canonical requirements"),
    KeyKind("signatures_version", "string", "permanent", "counts introductions of signatures"),
    KeyKind("idlesigs", "zset", "bounded", "signature without an open job → since when"),
    KeyKind("sigjobs", "hash", "bounded", "signature → jobs that are not final"),
    KeyKind("classcaps", "hash", "bounded", "class → canonical capabilities"),
    KeyKind("classes_version", "string", "permanent", "counts introductions of classes"),
    KeyKind("classseen", "zset", "bounded", "class → last sign of a worker of it"),
    KeyKind(
        "fits:<class>",
        "hash",
        "class",
        "signature → groups of devices that may serve it ('-' for none needed)",
    ),
    KeyKind("classes:<sig>", "set", "signature", "classes that satisfy it"),
    KeyKind("worker:<worker>", "hash", "worker", "node, incarnation, class, capacity, state, last claim"),
    KeyKind("workers", "zset", "bounded", "worker → last sign of life"),
    KeyKind("running:<worker>", "set", "waiting", "jobs that the worker holds"),
    KeyKind("siblings:<node>", "set", "node", "workers of one machine"),
    KeyKind(
        "held:<node>", "hash", "waiting", "job/token → worker, CPU and memory lots; earmark → what is kept"
    ),
    KeyKind("earmarks", "hash", "waiting", "node that is kept for a job → that job, since when it has room"),
    KeyKind("device:<uuid…>", "hash", "waiting", "share → job/token and declared memory"),
    KeyKind("rides", "hash", "waiting", "ride (id/token of its first call) → calls that hold its slot"),
    KeyKind(
        "lane:<lane>",
        "string",
        "ttl",
        "mean microseconds of a call of the lane, '-' for one that is not quiet",
    ),
    KeyKind("owners", "hash", "waiting", "owner → slots held: fair share"),
    KeyKind("idle:<class>", "zset", "waiting", "worker with room → how many jobs it runs"),
    KeyKind("idleclasses", "set", "waiting", "classes with an idle worker"),
    KeyKind("room", "hash", "waiting", "idle worker → its room"),
    KeyKind("rung", "zset", "waiting", "worker → until when it must have claimed"),
    KeyKind(
        "rungsig",
        "hash",
        "waiting",
        "worker → signature it was rung for; a field '' while an earmark is there",
    ),
    KeyKind("inbox:<worker>", "stream", "worker", "bell and mail in one"),
    KeyKind("samples:<worker>", "stream", "worker", "what its machine used, over time, capped"),
    KeyKind("deaths:<worker>", "set", "ttl", "jobs whose worker died under them, since its last success"),
    KeyKind("leases", "zset", "waiting", "job → when its attempt counts as lost"),
    KeyKind("delayed", "zset", "waiting", "job → when it is due"),
    KeyKind("jobs:<state>", "zset", "job", "job → age, a page at a time"),
    KeyKind("jobs:final", "zset", "job", "job → when it ended: what purge walks"),
    KeyKind(
        "expiring",
        "zset",
        "job",
        "when a Dramatiq message's record goes, or the result of a job that said so",
    ),
    KeyKind("barrier:<id>", "hash", "ttl", "a group of messages: how many children, which have succeeded"),
    KeyKind("idem:<key…>", "string", "job", "idempotency key → job and digest of the request"),
    KeyKind("dead:<queue>", "zset", "job", "failed jobs of a logical queue"),
    KeyKind("after:<id>", "zset", "job", "jobs that wait for it to end, by age"),
    KeyKind(
        "releasing",
        "set",
        "waiting",
        "what one call left over: jobs whose dependents wait, keys (`:<key>`) with free permits",
    ),
    KeyKind("permits:<key>", "set", "waiting", "jobs that hold a permit of a concurrency key"),
    KeyKind("key:<key>", "zset", "waiting", "jobs that wait for one, by age"),
    KeyKind("rate:<key>", "zset", "ttl", "admission times under a rate, reserved ahead"),
    KeyKind("window:<key>", "string", "ttl", "the longest window that a job named with a rate's key"),
    KeyKind(
        "array:<id>", "hash", "job", "how far an array has come: cursor, done, failed, mean time of an item"
    ),
    KeyKind("ranges:<id>", "list", "job", "ranges of an array that came back, with their losses"),
    KeyKind("chunks:<id>", "set", "job", "chunks of an array that are out"),
    KeyKind("pages:<id>", "hash", "job", "first item → outcomes of a range of an array, packed"),
    KeyKind("watchers:<id>", "set", "job", "clients that wait for the job"),
    KeyKind("done:<client>", "stream", "ttl", "what this client waits for: job, state, small result"),
    KeyKind("log:<id>:<attempt>:<rank>", "stream", "job", "live tail; an entry's id is the offset behind it"),
    KeyKind("events", "stream", "permanent", "one entry a transition, capped: hints"),
    KeyKind("keeper", "string", "ttl", "the worker that keeps the clock"),
    KeyKind("blob:<sha>:<n>", "string", "ttl", "a chunk of a blob that travels through the queue"),
)


def root_of(namespace: str = DEFAULT_NAMESPACE) -> str:
    """The prefix of every key of a namespace; ValueError for a name that could break out of it."""
    if not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"namespace {namespace[:80]!r}: use letters, digits, '.', '_' and '-', 64 at most")
    return f"gpulayer:{{{namespace}}}:"


class Keys:
    """Names under one root, for the plain reads that need no function."""

    def __init__(self, root: str) -> None:
        self.root = root

    def job(self, job_id: str) -> str:
        return f"{self.root}job:{job_id}"

    def jobs(self, state: str) -> str:
        return f"{self.root}jobs:{state}"

    def worker(self, worker_id: str) -> str:
        return f"{self.root}worker:{worker_id}"

    def running(self, worker_id: str) -> str:
        return f"{self.root}running:{worker_id}"

    def inbox(self, worker_id: str) -> str:
        return f"{self.root}inbox:{worker_id}"

    def samples(self, worker_id: str) -> str:
        return f"{self.root}samples:{worker_id}"

    def done(self, client: str) -> str:
        return f"{self.root}done:{client}"

    def log(self, job_id: str, attempt: int, rank: int) -> str:
        return f"{self.root}log:{job_id}:{attempt}:{rank}"

    def dead(self, queue: str) -> str:
        return f"{self.root}dead:{queue}"

    def device(self, uuid: str) -> str:
        return f"{self.root}device:{uuid}"

    def held(self, node: str) -> str:
        return f"{self.root}held:{node}"

    def blob(self, sha256: str, chunk: int) -> str:
        return f"{self.root}blob:{sha256}:{chunk}"

    def array(self, job_id: str) -> str:
        return f"{self.root}array:{job_id}"

    def pages(self, job_id: str) -> str:
        return f"{self.root}pages:{job_id}"

    def named(self, name: str) -> str:
        """A key of which a namespace has one: `workers`, `sigjobs`, `classcaps`, …"""
        return f"{self.root}{name}"
