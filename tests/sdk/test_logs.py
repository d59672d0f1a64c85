"""Reading output: live, afterwards, across attempts, every byte once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from gpulayer.client import Client
from gpulayer.handle import Job
from gpulayer.logs import HELD_BACK, NOTE, STARTED, Piece, lines, read_log
from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Grant
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until


class Writer:
    """Writes a job's output as its worker does."""

    def __init__(self, bench: Bench, grant: Grant) -> None:
        self.bench, self.grant = bench, grant
        self.offset = 0

    def write(self, stream: str, data: bytes) -> None:
        call = fn.log(self.grant.id, self.grant.token, 0, stream, self.offset, data)
        assert self.bench.hand.run(call) == "ok"
        self.offset += len(data)


@pytest.fixture
def job(client: Client) -> Job[None]:
    return client.submit(["true"])


def followed(client: Client, job: Job[None], *, whole: bool = False) -> tuple[threading.Thread, list[Piece]]:
    pieces: list[Piece] = []

    def read() -> None:
        pieces.extend(read_log(client._session, job.id, follow=True, whole=whole))

    thread = threading.Thread(target=read)
    thread.start()
    return thread, pieces


def output(pieces: list[Piece]) -> list[tuple[str, bytes]]:
    return [(piece.stream, piece.data) for piece in pieces if piece.stream in ("out", "err")]


def test_what_is_written_is_followed_to_the_end(client: Client, bench: Bench, job: Job[None]) -> None:
    thread, pieces = followed(client, job)
    writer = Writer(bench, bench.take(job.id))
    writer.write("out", b"one\n")
    writer.write("err", b"two\n")
    writer.write("out", b"last without newline")
    bench.end(job.id)
    thread.join(PATIENCE_S)

    assert output(pieces) == [("out", b"one\n"), ("err", b"two\n"), ("out", b"last without newline")]
    assert [piece.data for piece in pieces if piece.stream == STARTED] == [b"w_bench"]


def test_who_follows_after_the_end_is_told_where_it_ran(client: Client, bench: Bench, job: Job[None]) -> None:
    Writer(bench, bench.take(job.id)).write("out", b"one\n")
    bench.end(job.id)

    pieces = list(read_log(client._session, job.id, follow=True))

    assert [piece.data for piece in pieces if piece.stream == STARTED] == [b"w_bench"]


def test_a_silent_job_is_followed_to_its_end(client: Client, bench: Bench, job: Job[None]) -> None:
    thread, pieces = followed(client, job)
    bench.end(job.id)
    thread.join(PATIENCE_S)

    assert not thread.is_alive()
    assert output(pieces) == []


def test_a_retry_is_followed_into_its_next_attempt(client: Client, bench: Bench, job: Job[None]) -> None:
    thread, pieces = followed(client, job)
    Writer(bench, bench.take(job.id)).write("out", b"first\n")
    bench.end(job.id, "retry")
    bench.hand.tick()
    Writer(bench, bench.take(job.id)).write("out", b"second\n")
    bench.end(job.id)
    thread.join(PATIENCE_S)

    assert output(pieces) == [("out", b"first\n"), ("out", b"second\n")]


def test_the_tail_of_a_running_job_is_read_without_waiting(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    Writer(bench, bench.take(job.id)).write("out", b"so far\n")

    assert list(job.logs()) == ["so far"]


def test_what_the_tail_has_lost_is_told(client: Client, bench: Bench, job: Job[None]) -> None:
    writer = Writer(bench, bench.take(job.id))
    for _ in range(3):
        writer.write("out", b"x" * 600_000)

    pieces = list(read_log(client._session, job.id))
    assert [piece.stream for piece in pieces] == [NOTE, "out", "out"]
    assert pieces[0].data == b"585.9 kB of output are not in the live tail"


def kept(client: Client, data: bytes, index: bytes) -> dict[str, str]:
    """The field of a commit that names a whole log, which is in the store."""
    store = client._session.store
    named = {"sha256": store.put_bytes(data), "size": len(data), "index_sha256": store.put_bytes(index)}
    return {"logs": json.dumps({"0": named})}


def test_who_follows_the_whole_output_gets_what_the_tail_has_lost_at_the_end(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    writer = Writer(bench, bench.take(job.id))
    parts = [letter * 600_000 for letter in (b"a", b"b", b"c")]
    for part in parts:
        writer.write("out", part)
    thread, pieces = followed(client, job, whole=True)
    wait_until(lambda: any(piece.stream == NOTE for piece in pieces), PATIENCE_S, "the cut was told")
    assert output(pieces) == []
    index = b'[0,600000,"out",1]\n[600000,600000,"out",1]\n[1200000,600000,"out",1]\n'
    bench.end(job.id, fields=kept(client, b"".join(parts), index))
    thread.join(PATIENCE_S)

    assert output(pieces) == [("out", part) for part in parts]
    assert [piece.data for piece in pieces if piece.stream == NOTE] == [HELD_BACK.encode()]


@pytest.mark.parametrize("shipped", [b"", b"one\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_could_not_be_shipped_before_the_end_comes_from_the_store(
    client: Client, bench: Bench, job: Job[None], whole: bool, shipped: bytes
) -> None:
    """The queue was away when the job wrote its last words, and back when its worker reported the end."""
    thread, pieces = followed(client, job, whole=whole)
    writer = Writer(bench, bench.take(job.id))
    if shipped:
        writer.write("out", shipped)
    bench.end(job.id, fields=kept(client, b"one\ntwo\n", b'[0, 4, "out", 1]\n[4, 4, "out", 2]\n'))
    thread.join(PATIENCE_S)

    assert b"".join(data for _, data in output(pieces)) == b"one\ntwo\n"


def test_behind_a_cut_the_whole_output_goes_on_where_it_stopped(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    writer = Writer(bench, bench.take(job.id))
    thread, pieces = followed(client, job, whole=True)
    writer.write("out", b"shown")
    wait_until(lambda: output(pieces) == [("out", b"shown")], PATIENCE_S, "the beginning was followed")
    writer.offset += len(b"skipped")
    writer.write("out", b"last")
    bench.end(job.id, fields=kept(client, b"shownskippedlast", b'[0,8,"out",1]\n[8,8,"err",1]\n'))
    thread.join(PATIENCE_S)

    assert output(pieces) == [("out", b"shown"), ("out", b"ski"), ("err", b"ppedlast")]


def test_of_an_attempt_that_was_lost_the_tail_is_all_that_is_behind_a_cut(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    writer = Writer(bench, bench.take(job.id))
    thread, pieces = followed(client, job, whole=True)
    writer.write("out", b"shown")
    writer.offset += len(b"lost")
    writer.write("out", b"tail")
    wait_until(lambda: any(piece.stream == NOTE for piece in pieces), PATIENCE_S, "the cut was told")
    bench.end(job.id, "retry")
    bench.hand.tick()
    Writer(bench, bench.take(job.id)).write("out", b"again")
    bench.end(job.id)
    thread.join(PATIENCE_S)

    assert output(pieces) == [("out", b"shown"), ("out", b"tail"), ("out", b"again")]
    assert b"4 B of output are not in the live tail" in [piece.data for piece in pieces]


def test_a_finished_job_s_whole_log_comes_from_the_store(
    client: Client, bench: Bench, job: Job[None]
) -> None:
    index = b'[0,4,"out",1000]\n[4,4,"err",1000]\n[8,6,"out",2000]\n'
    bench.end(job.id, fields=kept(client, b"one\ntwo\nthree\n", index))

    pieces = list(read_log(client._session, job.id))
    assert output(pieces) == [("out", b"one\n"), ("err", b"two\n"), ("out", b"three\n")]
    assert list(job.logs()) == ["one", "two", "three"]


def test_following_a_finished_job_reads_its_log(client: Client, bench: Bench, job: Job[None]) -> None:
    Writer(bench, bench.take(job.id)).write("out", b"done\n")
    bench.end(job.id)

    assert list(job.logs(follow=True)) == ["done"]


def pieces_of(*data: bytes) -> Iterator[Piece]:
    return (Piece("out", each) for each in data)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ((b"a\nb", b"c\n"), ["a", "bc"]),
        ((b" 10%\r 20%\r100%\n",), ["100%"]),
        ((b" 10%\r", b" 20%\r", b"100%\n"), ["100%"]),
        ((b"dos\r\nlines\r\n",), ["dos", "lines"]),
        ((b"no newline",), ["no newline"]),
        ((b"\xff\n",), ["\N{REPLACEMENT CHARACTER}"]),
        ((b"\xc3", b"\xa9\n"), ["é"]),
    ],
)
def test_lines_are_what_was_last_drawn(data: tuple[bytes, ...], expected: list[str]) -> None:
    assert list(lines(pieces_of(*data))) == expected
