"""What must hold of a namespace at every instant, whatever happened before: invariants I1 to I5, I7 and I9.

`violations` names each breach in one line. It knows the records and the indexes, and nothing of how they came about:
model tests, explorers, crash tests and rules share it. What concerns arrays, gates and barriers alone is in
`checker_gates.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from gpulayer_broker.job import ACTIVE, FINAL, QUEUED, RUNNING, STATES
from tests import checker_gates
from tests.snapshot import Snapshot, Stream, under

HELD, RETURNED = "held", "returned"
MAX_LOSSES = 3
MAX_EARMARKS = 64
SOME_ARE_KEPT = ""
Job = dict[str, str]


def violations(s: Snapshot) -> list[str]:
    """One line for each breach; empty where all is well."""
    checks = (
        _states,
        _finals,
        _places,
        _holders,
        _ledgers,
        _earmarks,
        _capacity,
        _counters,
        _streams,
        _heads,
        _waiters,
        _idle,
        _logs,
        _notices,
        *checker_gates.CHECKS,
    )
    return [f"{check.__name__[1:]}: {line}" for check in checks for line in check(s)]


def running(s: Snapshot) -> dict[str, Job]:
    """Attempts that a worker holds: jobs, and ranges of arrays; an array itself is held by nobody."""
    held = {
        job: j for job, j in s.jobs.items() if j["state"] in ("scheduled", "running") and "count" not in j
    }
    return held | s.chunks


def ref(job_id: str, j: Job) -> str:
    """How ledgers name an attempt, or the ride that it is one of."""
    return j.get("ride") or f"{job_id}/{j['token']}"


def slots(s: Snapshot) -> dict[str, Job]:
    """One attempt for each holding: those of a ride share theirs."""
    return {ref(job, j): j for job, j in running(s).items()}


def lots_of(j: Job) -> list[tuple[str, str]]:
    return [
        (uuid, share)
        for uuid, _, share in (lot.rpartition("/") for lot in j.get("lots", "").split(",") if lot)
    ]


def amounts(sig: str) -> tuple[str, int, int, int, int]:
    """letter, gpus, vram, cpus, memory of a signature's name."""
    found = re.match(r"([a-z])(\d+)\.(\d+)\.(\d+)\.(\d+)\.", sig)
    assert found, sig
    return found[1], int(found[2]), int(found[3]), int(found[4]), int(found[5])


def _states(s: Snapshot) -> Iterator[str]:
    """A job is in the index of its state and in no other; no index lists what is not there (I1, I9)."""
    listed = {state: s.zsets.get(f"jobs:{state}", {}) for state in STATES}
    for job, j in s.jobs.items():
        within = [state for state in STATES if job in listed[state]]
        if within != [j["state"]]:
            yield f"{job} is {j['state']} and listed in {within}"
        elif listed[j["state"]][job] != float(j["seq"]):
            yield f"{job} is listed at {listed[j['state']][job]}, its age is {j['seq']}"
    gone = {job for jobs in listed.values() for job in jobs} - set(s.jobs)
    if gone:
        yield f"listed without a record: {sorted(gone)}"


def _finals(s: Snapshot) -> Iterator[str]:
    """What is final holds nothing and is on the list that purge walks; nothing else is (I3, I7)."""
    final = s.zsets.get("jobs:final", {})
    expected = {job: float(j["ended_ms"]) for job, j in s.jobs.items() if j["state"] in FINAL}
    if final != expected:
        yield f"jobs:final is {final}, final are {expected}"
    most = int(s.hashes.get("config", {}).get("lost_workers", MAX_LOSSES))
    for job, j in s.jobs.items():
        losses, attempt = int(j.get("losses", 0)), int(j["attempt"])
        if losses > min(attempt, most) or (losses == most and j["state"] not in FINAL):
            yield f"{job} is {j['state']} after {losses} losses and {attempt} attempts"
        if j["state"] in FINAL and j.get("token"):
            yield f"{job} is {j['state']} with a token"
    failed = {(j["queue"], job) for job, j in s.jobs.items() if j["state"] == "failed"}
    dead = {(queue, job) for queue, jobs in under(s.zsets, "dead:") for job in jobs}
    if failed != dead:
        yield f"dead letters {dead}, failed {failed}"


def _places(s: Snapshot) -> Iterator[str]:
    """A queued job waits in exactly one place: its stream, the clock, or before a gate (I1)."""
    delayed, gated = s.zsets.get("delayed", {}), checker_gates.waiting(s)
    for job, j in s.jobs.items():
        stream = s.streams.get(_stream_name(j), Stream({}, {}))
        entry = j.get("entry", "") if stream.entries.get(j.get("entry", "")) == {"j": job} else ""
        copies = [e for e, fields in stream.entries.items() if fields == {"j": job}]
        consumer = stream.pending.get(entry, "")
        in_stream, in_clock = bool(entry), job in delayed
        if len(copies) != in_stream:
            yield f"{job} has entries {copies}, knows {j.get('entry')}"
        places, array = in_stream + in_clock + (job in gated), "count" in j
        if j["state"] == QUEUED and (places != 1 or consumer == HELD or j.get("token")):
            yield f"{job} is queued: entry {entry!r} of {consumer!r}, delayed {in_clock}, token {j.get('token')!r}"
        if j["state"] in ("scheduled", "running") and (consumer != HELD or places != 1) and not array:
            yield f"{job} is {j['state']}: entry {entry!r} of {consumer!r}, delayed {in_clock}"
        if j["state"] == RUNNING and array and (places != in_stream or consumer == HELD):
            yield f"array {job} runs: entry {entry!r} of {consumer!r}, delayed {in_clock}"
        if j["state"] in FINAL and places:
            yield f"{job} is {j['state']} and still in its stream, on the clock or before a gate"
    if unknown := set(delayed) - set(s.jobs):
        yield f"delayed without a record: {sorted(unknown)}"


def _holders(s: Snapshot) -> Iterator[str]:
    """Each running attempt has a token of its number, a lease and a known worker; nothing else has a lease (I2, I9)."""
    alive = running(s)
    if set(s.zsets.get("leases", {})) != set(alive):
        yield f"leases of {sorted(s.zsets.get('leases', {}))}, running are {sorted(alive)}"
    for job, j in alive.items():
        if not j["token"].startswith(j["attempt"] + ":"):
            yield f"{job} at attempt {j['attempt']} has token {j['token']!r}"
        if f"worker:{j['worker']}" not in s.hashes:
            yield f"{job} runs on {j['worker']!r}, which nobody knows"
    tokens = Counter(j["token"] for j in alive.values())
    yield from (f"token {token} is held {n} times" for token, n in tokens.items() if n > 1)


def _ledgers(s: Snapshot) -> Iterator[str]:
    """What is held is what running attempts hold, by worker, node, device and owner (I4, I9)."""
    alive = running(s)
    yield from _differ(
        "running:", set(_members(s.sets, "running:")), {(j["worker"], job) for job, j in alive.items()}
    )
    held = {
        (node, r): text
        for node, refs in under(s.hashes, "held:")
        for r, text in refs.items()
        if r != "earmark"
    }
    expected = {(j["node"], name): _holding(j) for name, j in slots(s).items()}
    yield from _differ("held:", set(held.items()), set(expected.items()))
    devices = {
        (uuid, share): text for uuid, shares in under(s.hashes, "device:") for share, text in shares.items()
    }
    granted = {lot: f"{ref(job, j)} {amounts(j['sig'])[2]}" for job, j in alive.items() for lot in lots_of(j)}
    yield from _differ("device:", set(devices.items()), set(granted.items()))
    rides = Counter(j["ride"] for j in alive.values() if j.get("ride"))
    yield from _differ("rides", _numbers(s, "rides"), dict(rides))
    owners = Counter(j["owner"] for j in slots(s).values())
    yield from _differ("owners", _numbers(s, "owners"), dict(owners))


def _earmarks(s: Snapshot) -> Iterator[str]:
    """What a machine is kept for waits, knows it, and is one job a machine, one machine a job, 64 at most; the worker
    is of that machine and takes jobs (I5, I9)."""
    listed = {node: text.split(" ")[0] for node, text in s.hashes.get("earmarks", {}).items()}
    kept = {node: refs["earmark"].split(" ") for node, refs in under(s.hashes, "held:") if "earmark" in refs}
    yield from _differ("earmarks", listed, {node: words[1] for node, words in kept.items()})
    yield from _differ(
        "earmark", listed, {j["earmark"]: job for job, j in s.jobs.items() if j.get("earmark")}
    )
    if len(listed) > MAX_EARMARKS:
        yield f"{len(listed)} machines are kept"
    for node, (_, job, sig, owner, prio, worker, *_) in kept.items():
        j, w = s.job(job), s.hashes.get(f"worker:{worker}", {})
        if (sig, owner, prio) != (j.get("sig"), j.get("owner"), j.get("prio")) or not _can_be_taken(j):
            yield f"{node} is kept for {job}, which is {j}"
        if (w.get("node"), w.get("state")) != (node, "online"):
            yield f"{node} is kept at {worker}, which is {w.get('state')} on {w.get('node')}"


def _can_be_taken(j: Job) -> bool:
    """Whether it waits for a worker: a job that is queued, an array with items left."""
    return bool(j.get("entry")) and (j.get("state") == QUEUED or "count" in j)


def _holding(j: Job) -> str:
    _, _, _, cpus, memory = amounts(j["sig"])
    return f"{j['worker']} {cpus} {memory}"


def _capacity(s: Snapshot) -> Iterator[str]:
    """Nobody holds more than there is, and a job has all its devices or none, each from one share (I4, I5)."""
    alive = running(s)
    for job, j in alive.items():
        letter, gpus, _, _, _ = amounts(j["sig"])
        lots = lots_of(j)
        if len({uuid for uuid, _ in lots}) != len(lots) or (
            len(lots) != gpus and not (letter == "a" and not lots)
        ):
            yield f"{job} asked for {gpus} devices and holds {lots}"
    shares = Counter(lot for j in alive.values() for lot in lots_of(j))
    yield from (f"share {lot} is granted {n} times" for lot, n in shares.items() if n > 1)
    for name, w in under(s.hashes, "worker:"):
        mine = sum(amounts(j["sig"])[3] for j in slots(s).values() if j["worker"] == name)
        on_node = [amounts(j["sig"]) for j in slots(s).values() if j["node"] == w["node"]]
        cpus, memory = sum(a[3] for a in on_node), sum(a[4] for a in on_node)
        if mine > int(w["slots"]) or cpus > int(w["cpus"]) or memory > int(w["memory"]):
            yield f"{name} holds {mine} of {w['slots']} slots, its node {cpus} of {w['cpus']} cpus, {memory} MiB"


def _counters(s: Snapshot) -> Iterator[str]:
    """Counted is what there is (I9)."""
    active = [j for j in s.jobs.values() if j["state"] in ACTIVE]
    yield from _differ("sigjobs", _numbers(s, "sigjobs"), dict(Counter(j["sig"] for j in active)))
    idem = {key: text.split(" ")[0] for key, text in under(s.strings, "idem:")}
    yield from _differ("idem:", idem, {j["idem"]: job for job, j in s.jobs.items() if j.get("idem")})


def _streams(s: Snapshot) -> Iterator[str]:
    """A stream holds entries of living jobs only, and none is empty; what is pending is in it (I9, rule 3)."""
    for name, stream in under(s.streams, "queue:"):
        if not stream.entries:
            yield f"{name} is empty"
        if lost := set(stream.pending) - set(stream.entries):
            yield f"{name} has pending entries that left: {sorted(lost)}"
        if strange := set(stream.pending.values()) - {HELD, RETURNED}:
            yield f"{name} has consumers {sorted(strange)}"
        for entry, fields in stream.entries.items():
            j = s.job(fields.get("j", ""))
            if j.get("entry") != entry or j.get("state") not in ACTIVE:
                yield f"{name} {entry} is of {fields}, whose record says {j.get('entry')}, {j.get('state')}"


def _heads(s: Snapshot) -> Iterator[str]:
    """The index of heads is the oldest entry of each stream that waits; its owners are those who wait (I9, rule 7)."""
    expected: dict[tuple[str, str, str], float] = {}
    for name, stream in under(s.streams, "queue:"):
        sig, owner, prio = name.split(":")
        waiting = [float(e.split("-")[0]) for e in stream.entries if stream.pending.get(e) != HELD]
        if waiting:
            expected[prio, owner, sig] = min(waiting)
    heads = {
        (*name.split(":"), sig): age for name, sigs in under(s.zsets, "heads:") for sig, age in sigs.items()
    }
    yield from _differ("heads:", heads, expected)
    waiters = set(_members(s.sets, "waiting:"))
    yield from _differ("waiting:", waiters, {(prio, owner) for prio, owner, _ in expected})


def _waiters(s: Snapshot) -> Iterator[str]:
    """Nobody waits for a job that is final or gone (I9)."""
    for job, _ in under(s.sets, "watchers:"):
        if s.job(job).get("state") not in ACTIVE:
            yield f"{job} is watched and {s.job(job).get('state')}"


def _idle(s: Snapshot) -> Iterator[str]:
    """A worker with room is in one idle index and has its room written down; one that was rung is in none (I9)."""
    idle = {(c, w) for c, workers in under(s.zsets, "idle:") for w in workers}
    yield from _differ("idleclasses", s.sets.get("idleclasses", set()), {c for c, _ in idle})
    yield from _differ("room", set(s.hashes.get("room", {})), {w for _, w in idle})
    rung = set(s.zsets.get("rung", {}))
    kept = {SOME_ARE_KEPT} if "earmarks" in s.hashes else set()
    yield from _differ("rungsig", set(s.hashes.get("rungsig", {})), rung | kept)
    if both := rung & {w for _, w in idle}:
        yield f"rung and idle: {sorted(both)}"
    for c, w in idle:
        facts = s.hashes.get(f"worker:{w}", {})
        if (facts.get("class"), facts.get("state")) != (c, "online"):
            yield f"{w} is idle in {c} and {facts.get('state')} in {facts.get('class')}"


def _logs(s: Snapshot) -> Iterator[str]:
    """A log has its end exactly when its attempt has ended (rule 8)."""
    for name, stream in under(s.streams, "log:"):
        job, attempt, _ = name.split(":")
        j = s.job(job)
        ended = "end" in stream.entries[max(stream.entries, key=_entry_order)] if stream.entries else False
        current = j.get("attempt") == attempt and j.get("state") in ("scheduled", "running")
        if ended == current:
            yield f"{name} has its end: {ended}, and its attempt runs: {current}"


def _notices(s: Snapshot) -> Iterator[str]:
    """A client is told of a job once, with the state that it has (I3)."""
    for client, stream in under(s.streams, "done:"):
        ends = [fields for fields in stream.entries.values() if fields["state"] != "items"]
        told = Counter(fields["job"] for fields in ends)
        yield from (f"{client} was told {n} times of {job}" for job, n in told.items() if n > 1)
        for fields in ends:
            state = s.job(fields["job"]).get("state", fields["state"])
            if state != fields["state"]:
                yield f"{client} was told that {fields['job']} is {fields['state']}, it is {state}"


def _stream_name(j: Job) -> str:
    return f"queue:{j['sig']}:{j['owner']}:{j['prio']}"


def _members(sets: dict[str, set[str]], prefix: str) -> Iterator[tuple[str, str]]:
    return ((name, member) for name, members in under(sets, prefix) for member in members)


def _numbers(s: Snapshot, name: str) -> dict[str, int]:
    return {k: int(v) for k, v in s.hashes.get(name, {}).items()}


def _entry_order(entry: str) -> tuple[int, int]:
    high, low = entry.split("-")
    return int(high), int(low)


def _differ(name: str, found: object, expected: object) -> Iterator[str]:
    if found != expected:
        yield f"{name} holds {found}, should hold {expected}"
