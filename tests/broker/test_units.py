"""Sizes and durations: 24GB is what the card's box says, and what cannot be read is told with examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.errors import BadSize
from gpulayer_broker.units import (
    GIB,
    format_duration,
    format_size,
    format_unlike,
    mib_up,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("24GB", 24_000_000_000),
        ("24GiB", 24 * 2**30),
        ("24 gb", 24_000_000_000),
        ("1.5TB", 1_500_000_000_000),
        ("0.1kB", 100),
        ("1KB", 1000),
        ("3KiB", 3072),
        ("512MiB", 512 * 2**20),
        ("2TiB", 2**41),
        ("17", 17),
        ("17B", 17),
        (17, 17),
        ("1.5", 2),
        (0, 0),
    ],
)
def test_a_size_is_read_in_its_unit(written: str | int, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(
    "written",
    ["", "GB", "24G", "-1GB", "1e9", "24 GB GB", "½GB", "٣GB", "9999999TB", "1" * 5000, -1, True, None],
)
def test_what_is_no_size_is_refused_in_one_line_with_examples(written: str) -> None:
    with pytest.raises(BadSize) as caught:
        parse_size(written)

    message = str(caught.value)
    assert "24GB" in message
    assert str(written)[:50] in message
    assert len(message) < 200
    assert "\n" not in message


def test_a_card_sold_as_24_gb_holds_24gb_and_not_24gib() -> None:
    card_bytes = 24564 * 2**20

    assert parse_size("24GB") <= card_bytes < parse_size("24GiB")


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h 30m 5s", 5405),
        ("2d", 172800),
        ("500ms", 0.5),
        ("1.5h", 5400),
        (3, 3),
        (0.25, 0.25),
    ],
)
def test_a_duration_is_read_in_its_units(written: str | float, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "s",
        "5x",
        "30m1h",
        "1h1h",
        "5 m 3",
        "-5s",
        "inf",
        "nan",
        float("nan"),
        float("inf"),
        -1,
        True,
        None,
        "99999d",
    ],
)
def test_what_is_no_duration_is_refused_with_examples(written: str) -> None:
    with pytest.raises(BadSize, match="1h30m"):
        parse_duration(written)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (15 * GIB, "15.0 GB"),
        (2000 * GIB, "2000.0 GB"),
        (GIB - 1, "1.0 GB"),
        (300 * 2**20, "300.0 MB"),
        (1536, "1.5 kB"),
        (12, "12 B"),
        (0, "0 B"),
    ],
)
def test_a_size_is_shown_as_vendors_write_it(size_bytes: int, shown: str) -> None:
    assert format_size(size_bytes) == shown


@given(st.integers(min_value=0, max_value=2**60))
def test_no_shown_size_has_more_than_a_thousand_of_a_smaller_unit(size_bytes: int) -> None:
    number, unit = format_size(size_bytes).split()

    assert unit == "GB" or float(number) < 1024


@given(st.integers(min_value=0, max_value=2**50), st.integers(min_value=0, max_value=2**50))
def test_two_different_sizes_never_look_the_same(one: int, other: int) -> None:
    shown = format_unlike(one, other)

    assert (shown[0] == shown[1]) == (one == other)


def test_sizes_close_to_each_other_are_shown_with_the_digits_that_differ() -> None:
    assert format_unlike(24 * GIB, 24564 * 2**20) == ("24.00 GB", "23.99 GB")
    assert format_unlike(24 * GIB, 15 * GIB) == ("24.0 GB", "15.0 GB")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(40.7, "40 s"), (119, "119 s"), (200, "3 min"), (10_000, "2 h"), (400_000, "4 days")],
)
def test_a_duration_is_shown_in_one_unit(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_mib_are_rounded_up() -> None:
    assert [mib_up(size) for size in (0, 1, 2**20, 2**20 + 1)] == [0, 1, 1, 2]
