"""Items and outcomes as bytes: what goes in comes out, and rubbish is one error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.items import (
    KINDS,
    DamagedItems,
    ItemOutcome,
    Items,
    pack_items,
    pack_outcomes,
    read_outcomes,
)

OUTCOMES = st.builds(ItemOutcome, st.booleans(), st.sampled_from(KINDS), st.binary(max_size=50))


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_items_come_back_by_their_number(items: list[bytes]) -> None:
    packed = Items(pack_items(items))

    assert [packed[n] for n in range(len(packed))] == items


@given(st.integers(0, 1000), st.lists(OUTCOMES, max_size=20))
def test_a_page_comes_back_in_order(start: int, outcomes: list[ItemOutcome]) -> None:
    assert list(read_outcomes(start, pack_outcomes(outcomes))) == list(enumerate(outcomes, start))


def test_items_that_failed_together_share_their_error() -> None:
    page = b'!7 worker_lost {"type":"WorkerLost"}'

    assert [(n, o.ok, o.data) for n, o in read_outcomes(5, page)] == [
        (5, False, b'{"type":"WorkerLost"}'),
        (6, False, b'{"type":"WorkerLost"}'),
    ]


@given(st.binary(max_size=60))
def test_rubbish_is_no_item(data: bytes) -> None:
    try:
        packed = Items(data)
    except DamagedItems:
        return
    assert pack_items([packed[n] for n in range(len(packed))]) == data


@given(st.binary(min_size=1, max_size=60).filter(lambda data: data[:1] != b"!"))
def test_a_damaged_page_is_refused_or_whole(data: bytes) -> None:
    try:
        outcomes = [outcome for _, outcome in read_outcomes(0, data)]
    except DamagedItems:
        return
    assert len(pack_outcomes(outcomes)) == len(data)


def test_a_page_that_is_cut_off_is_refused() -> None:
    page = pack_outcomes([ItemOutcome(True, "json", b"42")])

    with pytest.raises(DamagedItems):
        list(read_outcomes(0, page[:-1]))
