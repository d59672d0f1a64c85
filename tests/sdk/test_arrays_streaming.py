"""A map of an input without a length: it may have no end, so what was read is kept by nobody."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

import gpulayer as gl
from gpulayer.arrays import ArrayResult, Part
from gpulayer.client import Client
from gpulayer.slots import Slot
from gpulayer_broker.answers import Grant
from tests.sdk.benches import Bench
from tests.sdk.test_arrays import bench_serve, doubled, working
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")

WINDOW = 4


@gl.remote(isolation="warm")
def double(n: int) -> int:
    return 2 * n


def read_in_order(results: gl.MapResult[int], count: int) -> Iterator[int]:
    return itertools.islice(results, count)


def read_as_ended(results: gl.MapResult[int], count: int) -> Iterator[int]:
    return (item.result() for item in itertools.islice(results.as_completed(), count))


def parts_alive() -> int:
    return sum(isinstance(each, Part) for each in gc.get_objects())


@pytest.mark.parametrize("read", [read_in_order, read_as_ended])
def test_what_was_read_of_an_endless_map_is_forgotten(
    bench: Bench, read: Callable[[gl.MapResult[int], int], Iterator[int]]
) -> None:
    results = double.map(itertools.count(), max_in_flight=WINDOW, progress=False)
    most_alive = 0
    seen: list[int] = []

    with working(lambda: bench_serve(bench)):
        for value in read(results, 60):
            seen.append(value)
            if len(seen) % 10 == 0:
                most_alive = max(most_alive, parts_alive())
    assert sorted(seen) == [2 * n for n in range(60)]
    # As many as may be open, and one whose last item is being given.
    assert most_alive <= WINDOW + 1
    assert results._ended() >= 60


@pytest.mark.parametrize("read", [read_in_order, read_as_ended])
def test_each_array_of_an_endless_map_is_listened_to_once(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[gl.MapResult[int], int], Iterator[int]],
) -> None:
    results = double.map(itertools.count(), max_in_flight=WINDOW, progress=False)
    waiter = results._opened.waiter
    heard: list[str] = []
    listen = waiter.listen

    def counted(slot: Slot, callback: Callable[[Slot], None]) -> None:
        heard.append(slot.job_id)
        listen(slot, callback)

    monkeypatch.setattr(waiter, "listen", counted)
    with working(lambda: bench_serve(bench)):
        assert len(list(read(results, 40))) == 40

    assert len(heard) == len(set(heard))
    assert not waiter._wanted


def test_one_slow_item_holds_up_none_but_its_own_array(bench: Bench) -> None:
    results = double.map(itertools.count(), max_in_flight=WINDOW, progress=False)
    ended = results.as_completed()
    slow: list[Grant] = []

    def serve() -> None:
        if slow:
            bench_serve(bench)
        else:
            slow.extend(bench.hand.claim(bench.machine, most=1))

    with working(serve):
        seen = [next(ended).index for _ in range(30)]
    assert slow[0].start not in seen
    assert isinstance(results, ArrayResult)
    assert len(results._parts) <= WINDOW


def test_a_miss_that_is_told_while_pages_are_taken_in_is_not_lost(client: Client) -> None:
    tellers: list[threading.Thread] = []

    class Raced(Part):
        """It is told of another miss in the moment in which it looks whether there was one."""

        @property
        def _unsure(self) -> bool:
            told = bool(vars(self)["unsure"])
            if told and not tellers:
                tellers.append(threading.Thread(target=self.missed))
                tellers[0].start()
                tellers[0].join(0.2)
            return told

        @_unsure.setter
        def _unsure(self, value: bool) -> None:
            vars(self)["unsure"] = value

    part = Raced(client.submit(doubled), 0, 2, threading.Condition())
    part.missed()
    part.take(client._opened)
    tellers[0].join(PATIENCE_S)

    assert part.has_news


def test_pages_that_could_not_be_read_are_read_at_the_next_try(
    bench: Bench, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise gl.QueueUnreachable("nobody answers")

    results = double.map([1, 2])
    assert isinstance(results, ArrayResult)
    (part,) = results._parts
    bench.serve_array(part.job.id, doubled, chunks=1)
    part.missed()
    with monkeypatch.context() as patched:
        patched.setattr(client._session, "attempt", away)
        with pytest.raises(gl.QueueUnreachable, match="nobody answers"):
            part.take(client._opened)

    assert part.has_news
    part.take(client._opened)
    assert part.order == [0]
