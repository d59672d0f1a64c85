"""A queue under a clock that the test sets, which is sound at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulayer_broker.connection import Link
from tests import snapshot
from tests.checker import violations
from tests.queueing import Hand
from tests.virtual import Clock, virtual_library

from .scene import SIGNATURES


@pytest.fixture
def clock(link: Link) -> Iterator[Clock]:
    with virtual_library(link) as clock:
        clock.draw_in_order()
        yield clock


@pytest.fixture
def hand(link: Link, root: str, clock: Clock) -> Iterator[Hand]:
    hand = Hand(link, root)
    for sig in SIGNATURES:
        hand.introduce(sig, {})
    hand.tick()
    yield hand
    assert violations(snapshot.read(link, root)) == []
