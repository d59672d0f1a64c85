"""The last lines of a log as a failure carries them: few, short and safe, whatever was written."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpulayer_broker.log_lines import MOST_BYTES, MOST_LINES, last_lines, safe_line


def test_the_last_lines_of_both_streams_stand_in_the_order_in_which_they_ended() -> None:
    pieces = [("out", b"one "), ("err", b"two\n"), ("out", b"three\n"), ("err", b"four")]
    assert last_lines(pieces) == "two\none three\nfour"


def test_of_many_lines_the_last_are_told() -> None:
    told = last_lines([("out", b"".join(b"line %d\n" % n for n in range(1000)))])
    assert told.splitlines() == [f"line {n}" for n in range(1000 - MOST_LINES, 1000)]


def test_a_progress_bar_is_told_as_it_was_drawn_last() -> None:
    bar = b"".join(b"\r%3d%% %s" % (n, b"#" * (n // 10)) for n in range(100))
    assert last_lines([("err", b"begins\n"), ("err", bar), ("err", b"\nKilled\n")]) == (
        "begins\n 99% #########\nKilled"
    )


def test_lines_without_a_sign_take_no_room() -> None:
    assert last_lines([("out", b"why\n" + b"  \n\x1b[0m\n\x00\n" * 100)]) == "why"


def test_a_line_that_is_too_long_keeps_its_beginning_and_its_end() -> None:
    told = last_lines([("out", b"an error: " + "é".encode() * 100_000 + b" at the end\n")])
    assert len(told.encode()) <= MOST_BYTES
    assert told.startswith("an error: é")
    assert told.endswith("é at the end")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a title\x07behind it", "behind it"),
        ("\x1b]0;a title that never ends", ""),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("a\tb\x07\x08c", "a b  c"),
        ("turned \u202eround", "turned  round"),
        ("half \x1b", "half"),
    ],
)
def test_what_would_move_the_cursor_or_mislead_is_taken_out(written: str, told: str) -> None:
    assert safe_line(written) == told


PIECES = st.lists(
    st.tuples(
        st.sampled_from(["out", "err"]),
        st.lists(
            st.sampled_from(
                [b"ab", b"\r", b"\n", b"\xc3", b"\xa9", b"\xff", b"\0", b"\x1b[", b"\x1b]", b"x" * 900]
            ),
            max_size=12,
        ).map(b"".join),
    ),
    max_size=40,
)


@example(pieces=[("out", b"x" * 2046 + b"\n"), ("err", b"y\n")])
@given(pieces=PIECES)
def test_whatever_was_written_few_safe_lines_are_told(pieces: list[tuple[str, bytes]]) -> None:
    told = last_lines(pieces)
    assert len(told.encode()) <= MOST_BYTES
    assert len(told.splitlines()) <= MOST_LINES
    assert all(line.isprintable() and line.strip() for line in told.split("\n") if told)
