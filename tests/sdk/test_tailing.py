"""The last lines of a log: as many as asked for, whatever pieces they came in, and nothing twice when following on."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer.client import Client
from gpulayer.handle import Job
from gpulayer.logs import HERE, NOTE, OUT, STARTED, Piece
from gpulayer.tailing import last_lines, read_tail
from tests.sdk.benches import Bench
from tests.sdk.test_logs import Writer
from tests.support import PATIENCE_S

PIECES = st.lists(
    st.builds(Piece, st.sampled_from(["out", "err"]), st.lists(st.sampled_from([b"a", b"\n"])).map(b"".join)),
    max_size=12,
)


def whole(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data for piece in pieces)


def streams(pieces: list[Piece]) -> list[tuple[str, int]]:
    """The stream of every byte."""
    return [(piece.stream, byte) for piece in pieces for byte in piece.data]


@given(pieces=PIECES, count=st.integers(0, 6))
def test_the_last_lines_are_those_of_the_whole_text_with_their_streams(
    pieces: list[Piece], count: int
) -> None:
    last = list(last_lines(iter(pieces), count))

    lines = whole(pieces).splitlines(keepends=True)
    assert whole(last) == b"".join(lines[len(lines) - count :] if count <= len(lines) else lines)
    assert streams(last) == streams(pieces)[len(whole(pieces)) - len(whole(last)) :]


@given(before=PIECES, after=PIECES)
def test_all_that_comes_while_it_is_followed_stays(before: list[Piece], after: list[Piece]) -> None:
    followed = list(last_lines(iter([*before, Piece(HERE, b""), *after]), 2))

    assert followed == [*last_lines(iter(before), 2), *after]


def test_what_is_gpulayers_own_is_no_line_and_stays() -> None:
    pieces = [
        Piece(STARTED, b"w_1"),
        Piece("out", b"one\ntwo\n"),
        Piece(NOTE, b"something"),
        Piece("out", b"3"),
    ]

    assert list(last_lines(iter(pieces), 1)) == [pieces[0], pieces[2], pieces[3]]


@pytest.fixture
def job(client: Client) -> Job[None]:
    return client.submit(["true"])


def test_a_running_job_is_followed_from_its_last_lines_on(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    writer = Writer(bench, bench.take(job.id))
    writer.write("out", b"one\ntwo\nthree")
    pieces: list[Piece] = []

    def read() -> None:
        pieces.extend(read_tail(client._session, job.id, 2, follow=True))

    thread = threading.Thread(target=read)
    thread.start()
    writer.write("out", b" four\n")
    bench.end(job.id)
    thread.join(PATIENCE_S)

    assert b"".join(piece.data for piece in pieces if piece.stream == OUT) == b"two\nthree four\n"
