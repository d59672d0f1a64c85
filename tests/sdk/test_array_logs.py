"""Logs of a warm map: the output of all its calls, every byte once, at a few commands a turn."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.array_logs import NOT_KEPT, TURN_S
from gpulayer.client import Client
from gpulayer.logs import ERR, NOTE, OUT, PROGRESS, Piece, read_log
from gpulayer.tailing import read_tail
from gpulayer_broker.answers import Grant
from gpulayer_broker.errors import UsageError
from tests.sdk.benches import Bench, good
from tests.sdk.test_logs import Writer, output
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote(isolation="warm")
def double(n: int) -> int:
    return 2 * n


def array(count: int) -> str:
    (array_id,) = double.map(range(count)).ids
    return array_id


def chunk(bench: Bench, array_id: str) -> tuple[Grant, Writer]:
    grant = bench.chunk(array_id)
    assert grant is not None
    return grant, Writer(bench, grant)


def end(bench: Bench, grant: Grant) -> None:
    bench.end_chunk(grant, [good(number) for number in range(grant.start, grant.stop)])


def say(bench: Bench, array_id: str, text: bytes, stream: str = OUT) -> None:
    """The next range writes something and ends."""
    grant, writer = chunk(bench, array_id)
    writer.write(stream, text)
    end(bench, grant)


class Followed:
    """What a follower in a thread of its own has been given."""

    def __init__(self, client: Client, array_id: str, tail: int | None = None, **wanted: Any) -> None:
        self.pieces: list[Piece] = []
        session = client._session

        def read() -> None:
            if tail is None:
                self.pieces.extend(read_log(session, array_id, follow=True, **wanted))
            else:
                self.pieces.extend(read_tail(session, array_id, tail, follow=True, **wanted))

        self.thread = threading.Thread(target=read, daemon=True)
        self.thread.start()

    def shows(self, data: bytes, *streams: str) -> None:
        wait_until(lambda: data in self.text(*streams), PATIENCE_S, f"{data!r} is followed")

    def text(self, *streams: str) -> bytes:
        wanted = streams or (OUT, ERR)
        return b"".join(piece.data for piece in list(self.pieces) if piece.stream in wanted)

    def ends(self) -> list[tuple[str, bytes]]:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return output(self.pieces)


def test_the_output_of_all_calls_is_read_in_their_order(client: Client, bench: Bench) -> None:
    array_id = array(3)
    say(bench, array_id, b"one\n")
    end(bench, chunk(bench, array_id)[0])
    say(bench, array_id, b"three\n", ERR)

    assert output(list(read_log(client._session, array_id))) == [(OUT, b"one\n"), (ERR, b"three\n")]
    assert output(list(read_tail(client._session, array_id, 1))) == [(ERR, b"three\n")]
    assert list(client.logs(array_id)) == ["one", "three"]


def test_what_runs_still_is_read_too(client: Client, bench: Bench) -> None:
    array_id = array(2)
    say(bench, array_id, b"one\n")
    chunk(bench, array_id)[1].write(OUT, b"so far")

    assert list(client.logs(array_id)) == ["one", "so far"]


def test_it_is_followed_while_it_runs_and_to_its_end(client: Client, bench: Bench) -> None:
    array_id = array(4)
    say(bench, array_id, b"before\n")
    followed = Followed(client, array_id)
    followed.shows(b"before\n")
    (first, writer), (second, other) = chunk(bench, array_id), chunk(bench, array_id)
    writer.write(OUT, b"a")
    followed.shows(b"before\na")
    other.write(ERR, b"b")
    followed.shows(b"before\nab")
    writer.write(OUT, b"c\n")
    end(bench, first)
    followed.shows(b"before\nabc\n")
    end(bench, second)
    say(bench, array_id, b"last")

    assert followed.ends()[-1] == (OUT, b"last")
    assert followed.text() == b"before\nabc\nlast"


def test_the_last_lines_are_followed_on(client: Client, bench: Bench) -> None:
    array_id = array(3)
    say(bench, array_id, b"one\ntwo\n")
    grant, writer = chunk(bench, array_id)
    writer.write(OUT, b"thr")
    followed = Followed(client, array_id, tail=2)
    followed.shows(b"two\nthr")
    writer.write(OUT, b"ee\n")
    end(bench, grant)
    say(bench, array_id, b"four\n")

    followed.ends()
    assert followed.text() == b"two\nthree\nfour\n"


def test_one_that_has_ended_is_followed_like_any_ended_job(client: Client, bench: Bench) -> None:
    array_id = array(1)
    say(bench, array_id, b"one\n")

    assert output(list(read_log(client._session, array_id, follow=True))) == [(OUT, b"one\n")]


def test_one_that_is_cancelled_while_it_waits_is_followed_to_its_end(client: Client, bench: Bench) -> None:
    array_id = array(3)
    followed = Followed(client, array_id)
    client.cancel(array_id)

    assert followed.ends() == []


def test_how_many_calls_have_ended_is_its_progress(client: Client, bench: Bench) -> None:
    array_id = array(3)
    followed = Followed(client, array_id, progress=True)
    for told in (b'"done": 0, "total": 3', b'"done": 1, "total": 3', b'"done": 2, "total": 3'):
        followed.shows(told, PROGRESS)
        end(bench, chunk(bench, array_id)[0])
    followed.ends()


def reads(bench: Bench) -> int:
    """How many XREADs the server has had."""
    stats = bench.hand.link.call("INFO", "commandstats").decode()
    found = re.search(r"^cmdstat_xread:calls=(\d+)", stats, re.MULTILINE)
    return int(found[1]) if found else 0


def test_following_costs_a_few_commands_and_not_a_hot_loop(client: Client, bench: Bench) -> None:
    count = 40
    array_id = array(count)

    followed = Followed(client, array_id)
    say(bench, array_id, b"begun\n")
    followed.shows(b"begun\n")
    bench.hand.link.call("CONFIG", "RESETSTAT")
    begun_s = time.monotonic()
    # Every end of a range is a notice. Without a silence between the turns each would be read again and again.
    for _ in range(count // 2):
        say(bench, array_id, b".")
    followed.shows(b"begun\n" + b"." * (count // 2))
    for _ in range(count // 2 - 1):
        say(bench, array_id, b".")
    followed.ends()
    turns = (time.monotonic() - begun_s) / TURN_S + 2
    assert reads(bench) <= 2 * count + 4 * turns
    (notices,) = bench.hand.link.call("KEYS", bench.hand.key("done:follow-*"))
    assert bench.hand.link.call("XLEN", notices) < count


def test_what_was_written_long_ago_may_be_gone_and_that_is_said(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    array_id = array(1)
    say(bench, array_id, b"one\n")
    assert not [piece for piece in read_log(client._session, array_id) if piece.stream == NOTE]
    bench.hand.link.call("HINCRBY", bench.hand.key(f"job:{array_id}"), "created_ms", -3_700_000)

    notes = [piece.data for piece in read_log(client._session, array_id) if piece.stream == NOTE]
    assert notes == [NOT_KEPT.encode()]


def test_a_range_of_calls_and_a_rank_have_no_log_of_their_own(client: Client, bench: Bench) -> None:
    array_id = array(2)
    say(bench, array_id, b"one\n")

    with pytest.raises(UsageError, match=f"the calls of a map have one id, '{array_id}'"):
        list(read_log(client._session, f"{array_id}/1"))
    with pytest.raises(UsageError, match="has no rank 1: it has 1, counted from 0"):
        list(read_log(client._session, array_id, rank=1))
