"""Every state that two jobs and two workers can reach, by the real functions on a real server.

A breadth-first search: from each distinct state every event is tried (submit, claim, commits, repeated and stale ones,
crash and return, lease and bell that run out, release, cancel, delay that is due), until no new state is left. In each
state the invariants hold; each step is a transition of the table in `job.py` with one event; what is final or refused
changes nothing.
Attempts are bounded (a job that had two is not claimed again) and two losses end a job, so the space is finite.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Claimed, Committed, Submitted
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.functions import Call, DeviceLot, Ending, Offer, Submission
from gpulayer_broker.job import FINAL
from tests import snapshot
from tests.checker import violations
from tests.moves import MOVES
from tests.queueing import LEASE_MS, Hand, Machine, signature
from tests.snapshot import Snapshot
from tests.virtual import virtual_library

LOST_WORKERS = 2
GPU, CPU = signature(gpus=1, tag="gpu"), signature(tag="cpu")
LOTS = (DeviceLot("G1", 0, 0, 1000),)
WORKERS = ("w1", "w2")

# Where to go on: all keys but the hints (events, mail) are put back as they were.
_RESTORE = """
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do redis.call('DEL', key) end
for i = 2, #ARGV, 2 do redis.call('RESTORE', ARGV[1] .. ARGV[i], 0, ARGV[i + 1]) end
"""
_SAVE = """
local out = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local name = string.sub(key, #ARGV[1] + 1)
  if name ~= 'events' and string.sub(name, 1, 6) ~= 'inbox:' then
    out[#out + 1] = name
    out[#out + 1] = redis.call('DUMP', key)
  end
end
return out
"""

Command = tuple[bytes | str | int, ...]


@dataclass
class Event:
    """A call, and what happens `before` it. `inert`: it must change nothing, and answer so."""

    name: str
    before: list[Command]
    call: Call[Any]
    inert: tuple[Any, ...] = ()


@dataclass(frozen=True)
class World:
    """What may be submitted, how often each may be tried (some only once), how much a worker asks for at once."""

    jobs: dict[str, Submission]
    most_attempts: int = 2
    most_at_once: int = 2
    once: frozenset[str] = frozenset()

    def most(self, job: str) -> int:
        return 1 if job in self.once else self.most_attempts


PLAIN = World(
    {
        "ja": Submission("ja", GPU, b"s", owner="ann", client="c"),
        "jb": Submission("jb", CPU, b"s", owner="ann", prepare=True),
    }
)


@dataclass
class Found:
    """A state: its canonical form, and the bytes to return to it."""

    seen: Snapshot
    saved: list[bytes]


class Explorer:
    """The search over one namespace."""

    def __init__(self, link: Link, world: World = PLAIN) -> None:
        self.world = world
        self.hand = Hand(link, f"gpulayer:{{x{secrets.token_hex(6)}}}:")
        self.steps = 0
        self.reached: Counter[str] = Counter()

    def start(self) -> Found:
        hand = self.hand
        hand.link.call("HSET", hand.key("config"), "lost_workers", LOST_WORKERS)
        hand.introduce(GPU, {})
        hand.introduce(CPU, {})
        hand.tick()
        for worker in WORKERS:
            hand.register(Machine(worker, "i0", "k1", "n1", 2, 2, 1000, 2, LOTS), {GPU: (0,), CPU: ()})
        saved = hand.link.call("EVAL", _SAVE, 0, hand.root)
        return Found(snapshot.read(hand.link, hand.root), saved)

    def run(self) -> int:
        """How many distinct states there are."""
        first = self.start()
        known, frontier = {self.canonical(first.seen)}, deque([first])
        while frontier:
            state = frontier.popleft()
            for event, found in self.after(state):
                form = self.canonical(found.seen)
                if form not in known:
                    known.add(form)
                    assert violations(found.seen) == [], event.name
                    frontier.append(found)
        self.hand.link.call("EVAL", _RESTORE, 0, self.hand.root)
        return len(known)

    def after(self, state: Found) -> Iterator[tuple[Event, Found]]:
        """Each event from this state, in one exchange, and where it leads."""
        events = list(self.events(state.seen))
        inert, moving = [e for e in events if e.inert], [e for e in events if not e.inert]
        root = self.hand.root
        restore: Command = ("EVAL", _RESTORE, 0, root, *state.saved)
        commands = [restore, *(e.call.command(root) for e in inert), snapshot.command(root)]
        for event in moving:
            commands += [
                restore,
                *event.before,
                event.call.command(root),
                snapshot.command(root),
                ("EVAL", _SAVE, 0, root),
            ]
        replies = self.hand.link.pipeline(commands, timeout_s=60)
        broken = [reply for reply in replies if isinstance(reply, GpulayerError)]
        assert not broken, (broken, [e.name for e in events])
        self.steps += len(events)
        self.reached.update(e.name for e in events)
        nothing, replies = replies[1 : len(inert) + 2], replies[len(inert) + 2 :]
        self._nothing_changed(inert, nothing[:-1], state.seen, snapshot.parse(nothing[-1]))
        for event in moving:
            got, replies = replies[: len(event.before) + 4], replies[len(event.before) + 4 :]
            seen = snapshot.parse(got[-2])
            self._judge(event, event.call.parse(got[-3]), state.seen, seen)
            yield event, Found(seen, got[-1])

    # Events ---------------------------------------------------------------------------------------------------------

    def events(self, s: Snapshot) -> Iterator[Event]:
        for job, submission in self.world.jobs.items():
            known = job in s.jobs
            yield Event("submit", [], fn.submit(submission), (Submitted("existing", job),) if known else ())
        room = self._room(s)
        for worker in WORKERS:
            yield from self._worker_events(s, worker, room)
        for job, j in s.jobs.items():
            yield Event(
                "cancel", [], fn.cancel(job), (("too_late", j["state"]),) if j["state"] in FINAL else ()
            )
            yield from self._stale_events(job, j)
            if j["state"] in ("scheduled", "running") and "count" not in j:
                yield from self._holder_events(s, job, j, room)
        yield self._tick("tick", [])

    def _room(self, s: Snapshot) -> bool:
        """Whether a claim takes nothing that had its attempts."""
        return all(int(j["attempt"]) < self.world.most(job) for job, j in s.jobs.items() if waits(j))

    def _worker_events(self, s: Snapshot, worker: str, room: bool) -> Iterator[Event]:
        facts = s.hashes[f"worker:{worker}"]
        if room:
            yield Event("claim", [], fn.claim(self.offer(s, worker)))
        if facts["nonce"]:
            yield Event("claim again", [], fn.claim(self.offer(s, worker, facts["nonce"])))
        incarnation = "i1" if facts["incarnation"] == "i0" else "i0"
        machine = fn.Registration(worker, "n1", incarnation, "k1", 2, 2, 1000, 10_000, 10_000, b"{}", b"{}")
        yield Event("crash and return", [], fn.register(machine, "0", {}))
        if worker in s.zsets.get("rung", {}):
            yield self._tick("bell runs out", [("ZADD", self.hand.key("rung"), 1, worker)])

    def _holder_events(self, s: Snapshot, job: str, j: dict[str, str], room: bool) -> Iterator[Event]:
        for verdict in ("succeeded", "retry"):
            ending = Ending(job, j["token"], verdict)
            yield Event(f"commit {verdict}", [], fn.commit(ending))
            if room:
                yield Event(f"commit {verdict}, claim", [], fn.commit(ending, self.offer(s, j["worker"])))
        for how in ("returned", "lost"):
            yield Event(f"release {how}", [], fn.release(job, j["token"], how))
        if j["state"] == "scheduled":
            yield Event("log", [], fn.log(job, j["token"], 0, "out", 0, b"x"))
        yield self._tick("lease runs out", [("ZADD", self.hand.key("leases"), 1, job)])

    def _stale_events(self, job: str, j: dict[str, str]) -> Iterator[Event]:
        """Every verb with the token that ended last, and with one that never was."""
        ended = j.get("ended_token", "")
        if ended:
            already = (Committed("already", "", Claimed("ok", ())),)
            yield Event("commit twice", [], fn.commit(Ending(job, ended, "failed")), already)
            yield Event("release twice", [], fn.release(job, ended, "lost"), ("already",))
            yield Event("late log", [], fn.log(job, ended, 0, "out", 9, b"x"), ("stale",))
        stale = (Committed("stale", "", Claimed("ok", ())),)
        yield Event("strange commit", [], fn.commit(Ending(job, "1:strange", "succeeded")), stale)
        yield Event("strange checkpoint", [], fn.checkpoint(job, "1:strange", "d"), ("stale",))

    def _tick(self, name: str, before: list[Command]) -> Event:
        return Event(name, before, fn.tick())

    def offer(self, s: Snapshot, worker: str, nonce: str = "") -> Offer:
        """A few nonces a worker, in turn: none that is its last one, or in a token."""
        facts = s.hashes[f"worker:{worker}"]
        tokens = [j.get("token", "") for j in (s.jobs | s.chunks).values()]
        used = [facts["nonce"], *(token.partition(":")[2][:-1] for token in tokens)]
        fresh = next(f"{worker}{n}" for n in "xyzuv" if f"{worker}{n}" not in used)
        return Offer(
            worker, facts["incarnation"], self.world.most_at_once, nonce or fresh, LEASE_MS, 1000, LOTS
        )

    # Judging one step -----------------------------------------------------------------------------------------------

    def _judge(self, event: Event, answer: Any, before: Snapshot, after: Snapshot) -> None:
        """The step was a legal one, and changed nothing that is final."""
        moved = list(after.streams["events"].entries.values()) if "events" in after.streams else []
        path: dict[str, list[str]] = {}
        for entry in moved:
            path.setdefault(entry["job"], []).append(entry["state"])
        for job, j in after.jobs.items():
            old = before.job(job)
            states = [old.get("state", ""), *path.get(job, [])]
            assert states[-1] == j["state"], (event.name, job, states, j["state"])
            assert all(move in MOVES for move in pairwise(states)), (event.name, job, states)
            if old.get("state") in FINAL:
                assert j == old, (event.name, job, old, j)
            if j.get("token") and j["token"] != old.get("token"):
                assert int(j["attempt"]) > int(old["attempt"]), (event.name, job)
        if event.name == "claim again":
            held = before.jobs | before.chunks
            assert {g.token for g in answer.grants} <= {j.get("token") for j in held.values()}
            assert self.canonical(before) == self.canonical(after), event.name

    def _nothing_changed(
        self, events: list[Event], replies: list[Any], before: Snapshot, after: Snapshot
    ) -> None:
        """Each answered as it should, and all together they left the state as it was."""
        for event, reply in zip(events, replies, strict=True):
            assert event.call.parse(reply) == event.inert[0], event.name
        assert "events" not in after.streams
        assert self.canonical(before) == self.canonical(after), [e.name for e in events]

    def canonical(self, s: Snapshot) -> str:
        """The state but for ages, incarnations, nonces, bells and notes of why; the two workers are alike."""
        return min(self._form(s, WORKERS), self._form(s, WORKERS[::-1]))

    def _form(self, s: Snapshot, order: tuple[str, ...]) -> str:
        names = {worker: f"w{n}" for n, worker in enumerate(order)}
        ages = sorted(e for name, stream in snapshot.under(s.streams, "queue:") for e in stream.entries)
        return repr([self._job_form(s, job, names, ages) for job in self.world.jobs if job in s.jobs])

    def _job_form(self, s: Snapshot, job: str, names: dict[str, str], ages: list[str]) -> tuple[object, ...]:
        j = s.job(job)
        runs = j["state"] in ("scheduled", "running")
        facts = tuple(j.get(name, "") for name in ("state", "attempt", "losses", "lots" if runs else ""))
        cancel, ended = bool(j.get("cancel")), j.get("ended_token", "").split(":")[0]
        entry = ages.index(j["entry"]) if j.get("entry") in ages else -1
        worker = names[j["worker"]] if runs and "count" not in j else ""
        return (job, *facts, cancel, ended, entry, worker, job in s.zsets.get("delayed", {}))


def waits(j: dict[str, str]) -> bool:
    """Whether a claim could take it, now or later."""
    return j["state"] == "queued" or ("count" in j and j["state"] == "running" and bool(j.get("entry")))


def explored(
    link: Link, explorer: type[Explorer], world: World, patches: dict[str, str] | None = None
) -> tuple[int, Explorer]:
    """How many states there are, and the explorer that has been in each."""
    with virtual_library(link, patches) as clock:
        clock.draw_in_order()
        found = explorer(link, world)
        states = found.run()
    print(f"{states} states, {found.steps} steps, each event: {dict(found.reached)}")
    return states, found


def test_every_reachable_state_keeps_the_invariants(link: Link) -> None:
    states, explorer = explored(link, Explorer, PLAIN)

    assert states > 1000
    assert len(explorer.reached) >= 20
