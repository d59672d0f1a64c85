"""What must hold of arrays, gates and barriers at every instant: each item in one place, each permit with one job.

`CHECKS` are part of `checker.violations`. They know the records and the indexes, and nothing of how they came about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpulayer_broker.job import ACTIVE, FINAL, QUEUED
from tests.snapshot import Snapshot, under

Job = dict[str, str]


def waiting(s: Snapshot) -> set[str]:
    """Jobs before a gate: a predecessor that is open, or a permit."""
    blocked = {job for job, j in s.jobs.items() if j["state"] == QUEUED and j.get("phase") == "blocked"}
    return blocked | {job for _, jobs in under(s.zsets, "key:") for job in jobs}


def _arrays(s: Snapshot) -> Iterator[str]:
    """Each item of an array is in exactly one place: not begun, come back, out, or with an outcome (I1, I3)."""
    for array, j in s.jobs.items():
        if "count" not in j or (j["state"] not in ACTIVE and j["state"] not in FINAL):
            continue
        facts = s.hashes.get(f"array:{array}", {})
        count, cursor = int(j["count"]), int(facts.get("cursor", 0))
        back, out = ranges(s, array), {c: (int(r["from"]), int(r["to"])) for c, r in chunks(s, array).items()}
        pages = _page_ranges(s, array)
        if j["state"] == "succeeded" and sorted(pages) != sorted(_cover(pages, count)):
            yield f"{array} succeeded with the pages {sorted(pages)} of {count} items"
        placed = Counter(n for start, stop in [*back, *out.values(), *pages] for n in range(start, stop))
        doubled = [n for n, times in placed.items() if times > 1 or n >= cursor]
        if doubled:
            yield f"{array}: items {sorted(doubled)} are in two places, or in one and not begun"
        lost = set(range(cursor)) - set(placed)
        if lost and not j.get("cancel"):
            yield f"{array}: items {sorted(lost)} are nowhere"
        if int(facts.get("done", 0)) != sum(stop - start for start, stop in pages):
            yield f"{array} counts {facts.get('done', 0)} outcomes, its pages are {sorted(pages)}"
        if s.sets.get(f"chunks:{array}", set()) != set(out):
            yield f"{array} lists the ranges {s.sets.get(f'chunks:{array}')}, out are {sorted(out)}"
        if j["state"] in FINAL and out:
            yield f"{array} is {j['state']} and has {sorted(out)} out"
        more = bool(back) or cursor < count
        if j["state"] == "running" and bool(j.get("entry")) != (more and not j.get("cancel")):
            yield f"{array} has items to hand out: {more}, its entry is {j.get('entry')!r}"
    orphans = [chunk for chunk, c in s.chunks.items() if s.job(c["parent"]).get("state") != "running"]
    if orphans:
        yield f"out without an array that runs: {orphans}"


def ranges(s: Snapshot, array: str) -> list[tuple[int, int]]:
    """What came back, oldest first."""
    return [(int(r.split()[0]), int(r.split()[1])) for r in s.lists.get(f"ranges:{array}", [])]


def chunks(s: Snapshot, array: str) -> dict[str, Job]:
    return {chunk: c for chunk, c in s.chunks.items() if c["parent"] == array}


def _page_ranges(s: Snapshot, array: str) -> list[tuple[int, int]]:
    """Items with outcomes: the tests' own pages say `<from>-<to>`, the queue's own `!<to> …`."""
    out = []
    for start, page in s.hashes.get(f"pages:{array}", {}).items():
        stop = page[1:].split(" ")[0] if page.startswith("!") else page.partition("-")[2]
        if not stop.isdigit():  # pages of real workers are packed: they tell nothing here
            return []
        out.append((int(start), int(stop)))
    return out


def _cover(pages: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The pages, where each begins at the end of the one before and the last ends at `count`; else what is missing."""
    at = 0
    for start, stop in sorted(pages):
        if start != at:
            return [(at, start)]
        at = stop
    return pages if at == count else [(at, count)]


def _permits(s: Snapshot) -> Iterator[str]:
    """No more hold a permit than there are, and whoever waits does so for want of one (rule 7)."""
    limits = {job: j["permit"].rpartition("=") for job, j in s.jobs.items() if j.get("permit")}
    holders: dict[str, set[str]] = dict(under(s.sets, "permits:"))
    for name, jobs in holders.items():
        strange = [j for j in jobs if s.job(j).get("state") not in ACTIVE or limits[j][0] != name]
        if strange or len(jobs) > max(int(limits[j][2]) for j in jobs):
            yield f"permits of {name} are with {sorted(jobs)}"
    for name, waiters in under(s.zsets, "key:"):
        first = min(waiters, key=lambda job: (waiters[job], job))
        due = f":{name}" in s.sets.get("releasing", ())
        if int(limits[first][2]) > len(holders.get(name, ())) and not due:
            yield f"{first} waits for a permit of {name}, which {sorted(holders.get(name, ()))} hold"
        for job in waiters:
            j = s.job(job)
            if (j["state"], j.get("phase"), waiters[job]) != (QUEUED, "limited", float(j["seq"])):
                yield f"{job} waits for a permit of {name} and is {j['state']}, {j.get('phase')}"
    for job, (name, _, _) in limits.items():
        j = s.job(job)
        beyond = j["state"] in ("scheduled", "running") or (j["state"] == QUEUED and j["phase"] == "ready")
        if beyond and job not in holders.get(name, ()):
            yield f"{job} is {j['state']} without a permit of {name}"


def _predecessors(s: Snapshot) -> Iterator[str]:
    """A job that is open hangs on each of its predecessors that is open, and on nothing else (I1, I9)."""
    expected: dict[str, set[str]] = {}
    releasing = s.sets.get("releasing", set())
    for job, j in s.jobs.items():
        before = j.get("after", "").split(",")
        untold = {p for p in before if p in releasing and job in s.zsets.get(f"after:{p}", {})}
        open_ones = untold | {p for p in before if s.job(p).get("state") in ACTIVE}
        if j["state"] == QUEUED and int(j["attempt"]) == 0:
            for p in open_ones:
                expected.setdefault(p, set()).add(job)
            blocked = j.get("phase") == "blocked"
            if int(j.get("waits", 0)) != len(open_ones) or (blocked and not open_ones):
                yield f"{job} waits for {j.get('waits')}, open are {sorted(open_ones)}, phase {j.get('phase')}"
        elif j["state"] in ("scheduled", "running") and open_ones:
            yield f"{job} is {j['state']} before its predecessors {sorted(open_ones)}"
    found = {p: set(jobs) for p, jobs in under(s.zsets, "after:") if p not in releasing}
    if found != {p: jobs for p, jobs in expected.items() if p not in releasing}:
        yield f"after: holds {found}, should hold {expected}"


def _barriers(s: Snapshot) -> Iterator[str]:
    """A barrier that is there still waits for somebody."""
    for name, facts in under(s.hashes, "barrier:"):
        if len(facts) - 1 >= int(facts["children"]):
            yield f"barrier {name} of {facts['children']} has all: {sorted(facts)}"


CHECKS = (_arrays, _permits, _predecessors, _barriers)
