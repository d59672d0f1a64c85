"""Every state of a small world of calls that share slots, by the real functions.

The search is that of `test_small_model.py`. The world is two calls of one lane, of which one is tried once; they ride
together whenever both wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Claimed, Committed
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import CallEnding, CallsEnding, Ending, Submission
from tests.broker.test_small_model import CPU, Event, Explorer, Found, World, explored
from tests.snapshot import Snapshot

ALL_RIDE = {"'XLEN', line) / 8": "'XLEN', line) / 1"}
PAIR = World(
    {job: Submission(job, CPU, b"s", lane="l") for job in ("ja", "jb")},
    most_at_once=1,
    once=frozenset({"jb"}),
)


class RideExplorer(Explorer):
    """Calls end alone, in pairs and all together, with and without the next claim."""

    def start(self) -> Found:
        self.hand.link.call("SET", self.hand.key("lane:l"), "100")
        return super().start()

    def events(self, s: Snapshot) -> Iterator[Event]:
        yield from super().events(s)
        room = self._room(s)
        for worker in ("w1", "w2"):
            mine = [
                (job, j["token"]) for job, j in s.jobs.items() if j.get("token") and j["worker"] == worker
            ]
            for count in range(1, len(mine) + 1):
                for some in combinations(mine, count):
                    yield from self._ends(s, worker, some, room)

    def _ends(
        self, s: Snapshot, worker: str, some: tuple[tuple[str, str], ...], room: bool
    ) -> Iterator[Event]:
        for verdict, took_us in (("succeeded", None), ("failed", -1)):
            calls = tuple(CallEnding(Ending(job, token, verdict), took_us) for job, token in some)
            yield Event(f"end {len(some)} calls", [], fn.commit(CallsEnding(calls)))
            if room:
                offer = self.offer(s, worker)
                yield Event(f"end {len(some)} calls, claim", [], fn.commit(CallsEnding(calls), offer))
        twice = tuple(CallEnding(Ending(job, "1:strange", "succeeded"), -1) for job, _ in some)
        stale = Committed("ok", "", Claimed("ok", ()), ("stale",) * len(some))
        yield Event("strange calls", [], fn.commit(CallsEnding(twice)), (stale,))

    def _form(self, s: Snapshot, order: tuple[str, ...]) -> str:
        rides = [s.job(job).get("ride", "").partition("/")[0] for job in self.world.jobs]
        is_loud = s.strings.get("lane:l") == "-"
        return super()._form(s, order) + repr((rides, is_loud))


def test_every_state_of_calls_that_ride_together_keeps_the_invariants(link: Link) -> None:
    states, explorer = explored(link, RideExplorer, PAIR, ALL_RIDE)

    assert states > 1000
    assert {"end 2 calls", "end 2 calls, claim", "lease runs out", "crash and return"} <= set(
        explorer.reached
    )
