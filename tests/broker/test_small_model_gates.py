"""Every state of a small world with an array, and of one with a concurrency key, by the real functions.

The search is that of `test_small_model.py`. The worlds are an array of three items, two jobs of one key, a job and one
that comes after it, and an array and a job of one key.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Claimed, Committed
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Ending, ItemsEnding, Submission
from tests.broker.test_small_model import CPU, Event, Explorer, World, explored
from tests.snapshot import Snapshot, under

# The first item goes out alone, the other two as one range.
ARRAY = World({"ja": Submission("ja", CPU, b"s", count=3, client="c")}, most_attempts=4, most_at_once=1)
KEYED_ARRAY = World(
    {
        "ja": Submission("ja", CPU, b"s", count=2, permit="k=1"),
        "jb": Submission("jb", CPU, b"s", permit="k=1"),
    },
    most_at_once=1,
    once=frozenset({"jb"}),
)
KEY = World({job: Submission(job, CPU, b"s", permit="k=1") for job in ("ja", "jb")}, most_at_once=1)
AFTER = World(
    {"ja": Submission("ja", CPU, b"s"), "jb": Submission("jb", CPU, b"s", after=("ja",))}, most_at_once=1
)
NOTHING = Claimed("ok", ())


def _text(argument: bytes | str | int) -> str:
    return argument.decode() if isinstance(argument, bytes) else str(argument)


class GatedExplorer(Explorer):
    """Ranges of arrays as further attempts; gates as a part of the state."""

    def events(self, s: Snapshot) -> Iterator[Event]:
        for event in super().events(s):
            if event.name != "submit" or self._may_come(s, _text(event.call.args[0])):
                yield event
        room = self._room(s)
        for chunk, c in s.chunks.items():
            yield from self._range_events(s, chunk, c, room)
        for chunk, c in under(s.hashes, "job:"):
            if "/" in chunk:
                yield from self._late_events(chunk, c)

    def _may_come(self, s: Snapshot, job: str) -> bool:
        return all(before in s.jobs for before in self.world.jobs[job].after)

    def _range_events(self, s: Snapshot, chunk: str, c: dict[str, str], room: bool) -> Iterator[Event]:
        start, stop, array = int(c["from"]), int(c["to"]), c["parent"]
        # What the report hands back may be claimed in the same call.
        room = room and int(s.job(array)["attempt"]) < self.world.most(array)
        for upto in range(start, stop + 1):
            for failed in (0, 1) if upto > start else (0,):
                ending = self._report(chunk, c["token"], start, upto, failed)
                yield Event(f"commit items, {failed} failed", [], fn.commit_items(ending))
                if room:
                    offer = self.offer(s, c["worker"])
                    yield Event("commit items, claim", [], fn.commit_items(ending, offer))
        for verdict in ("failed", "cancelled", "retry"):
            yield Event(f"range {verdict}", [], fn.commit(Ending(chunk, c["token"], verdict, "oom")))
        for how in ("returned", "lost"):
            yield Event(f"release range {how}", [], fn.release(chunk, c["token"], how))
        yield self._tick("range's lease runs out", [("ZADD", self.hand.key("leases"), 1, chunk)])

    def _late_events(self, chunk: str, c: dict[str, str]) -> Iterator[Event]:
        """A range is no job; without its token nothing is reported of it, and nothing twice."""
        yield Event("cancel range", [], fn.cancel(chunk), (("missing", ""),))
        strange = self._report(chunk, "1:strange", 0, 1, 0)
        yield Event("strange items", [], fn.commit_items(strange), (Committed("stale", "", NOTHING),))
        ended = c.get("ended_token", "")
        if ended:
            again = self._report(chunk, ended, 0, 1, 0)
            yield Event("items twice", [], fn.commit_items(again), (Committed("already", "", NOTHING),))
            yield Event("release range twice", [], fn.release(chunk, ended, "lost"), ("already",))

    def _report(self, chunk: str, token: str, start: int, upto: int, failed: int) -> ItemsEnding:
        return ItemsEnding(chunk, token, upto, failed, 1000 * (upto - start), f"{start}-{upto}".encode())

    def _form(self, s: Snapshot, order: tuple[str, ...]) -> str:
        names = {worker: f"w{n}" for n, worker in enumerate(order)}
        out = sorted(
            (c["from"], c["to"], c["losses"], names[c["worker"]], bool(c.get("cancel")))
            for c in s.chunks.values()
        )
        arrays = [(n, h.get("cursor"), h.get("failed", "0")) for n, h in under(s.hashes, "array:")]
        pages = [(n, sorted(h)) for n, h in under(s.hashes, "pages:")]
        gates = [(n, sorted(h)) for n, h in under(s.sets, "permits:")]
        waiters = [(n, sorted(h)) for n, h in under(s.zsets, "key:")]
        return super()._form(s, order) + repr((out, arrays, pages, sorted(s.lists.items()), gates, waiters))


def test_every_state_of_an_array_keeps_the_invariants(link: Link) -> None:
    states, explorer = explored(link, GatedExplorer, ARRAY)

    assert states > 500
    assert {"commit items, 1 failed", "range's lease runs out", "items twice"} <= set(explorer.reached)


@pytest.mark.parametrize("world", [KEY, AFTER, KEYED_ARRAY], ids=["one key", "predecessor", "array and key"])
def test_every_state_of_two_that_wait_for_each_other_keeps_the_invariants(link: Link, world: World) -> None:
    states, explorer = explored(link, GatedExplorer, world)

    assert states > 100
    assert {"crash and return", "lease runs out", "commit twice"} <= set(explorer.reached)
