"""Lines out of a log: redraws folded, both kinds of line ends, any pieces, and no cost that a job can drive up."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulayer.logs import NOTE, PROGRESS, STARTED, Lines, Piece, lines

# What matters to lines, and a character of several bytes in parts.
BYTES = st.lists(
    st.sampled_from([b"a", b"b", b"\r", b"\n", b"\r\n", b"\xc3", b"\xa9", b"\xff", b"\0", b"\x1b["]),
    max_size=30,
).map(b"".join)


def folded(data: bytes) -> list[str]:
    """The rule, said of a whole text: what stands behind the last carriage return that something follows."""
    *whole, rest = data.split(b"\n")
    ended = [*whole, rest] if rest else whole
    return [line.rstrip(b"\r").split(b"\r")[-1].decode("utf-8", "replace") for line in ended]


def in_pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return (data[begin:end] for begin, end in pairwise(edges))


@example(data=b"1%\r2%\n", cuts=[3])
@example(data=b"1%\r\r2%\r\n", cuts=[3, 4, 7])
@given(data=BYTES, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_lines_are_the_same_in_whatever_pieces_they_come(data: bytes, cuts: list[int]) -> None:
    assert list(lines(Piece("out", piece) for piece in in_pieces(data, cuts))) == folded(data)


def test_streams_do_not_mix_and_only_output_and_notes_are_lines() -> None:
    pieces = [
        Piece(STARTED, b"w_1"),
        Piece("out", b"one "),
        Piece("err", b"two\n"),
        Piece(PROGRESS, b"{}"),
        Piece(NOTE, b"something is lost"),
        Piece("out", b"three\n"),
    ]

    assert list(lines(pieces)) == ["two", "something is lost", "one three"]


def test_a_bar_that_is_drawn_for_ever_takes_the_room_of_one_drawing() -> None:
    read = Lines()
    tracemalloc.start()
    for step in range(20_000):
        assert list(read.feed(b"\r%6d of 20000 %s" % (step, b"#" * 200))) == []
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 100_000
    assert list(read.feed(b"\n")) == [f"{19_999:6d} of 20000 " + "#" * 200]


@pytest.mark.timeout(100)
def test_a_line_of_a_hundred_megabytes_is_one_line() -> None:
    chunk = b"x" * 4096
    read = Lines()
    count = 100_000_000 // len(chunk)
    for _ in range(count):
        assert list(read.feed(chunk)) == []

    [line] = read.feed(b"\n")
    assert len(line) == count * len(chunk)
