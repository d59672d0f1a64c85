"""Refusals that a client meets seldom: a full queue, too many kinds of needs, a wait that is too short."""

from __future__ import annotations

import pytest

import gpulayer as gl
from gpulayer_broker import queue as queues
from gpulayer_broker.errors import QueueFull, TooManyRequirements, Unavailable
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings
from tests.sdk.benches import Bench

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote
def double(n: int) -> int:
    return 2 * n


def test_a_full_queue_says_so_and_takes_more_when_some_have_begun(bench: Bench, namespace: str) -> None:
    Queue(bench.hand.link, namespace).configure(Settings(queued_jobs=1))
    first = double.delay(1)

    with pytest.raises(QueueFull, match="the queue holds 1 waiting jobs") as refused:
        double.delay(2)
    assert refused.value.exit_code == 69
    bench.take(first.id)
    double.delay(2)


def test_a_namespace_takes_so_many_different_needs_and_no_more(bench: Bench) -> None:
    others = {f"c0.0.1.64.0.{number:020x}": "{}" for number in range(1024)}
    key = bench.hand.key("signatures")
    bench.hand.link.call("HSET", key, *(part for pair in others.items() for part in pair))

    with pytest.raises(TooManyRequirements, match="already holds 1024 different requirements"):
        double.options(memory="7GB").delay(1)


def test_who_cannot_be_judged_for_all_the_change_is_told_to_try_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_ROUNDS", 0)

    with pytest.raises(Unavailable, match="try again"):
        double.delay(1)
