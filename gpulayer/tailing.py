"""The last lines of a job's output, and what comes after them: both streams together, as they were written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from gpulayer.logs import ERR, HERE, OUT, Piece, read_log
from gpulayer.session import Session

OUTPUT = (OUT, ERR)


def read_tail(
    session: Session,
    job_id: str,
    count: int,
    *,
    rank: int = 0,
    follow: bool = False,
    progress: bool = False,
    since_ms: int = 0,
) -> Iterator[Piece]:
    """The last `count` lines of what is there; with `follow`, also what is written from then on."""
    pieces = read_log(
        session, job_id, rank=rank, follow=follow, progress=progress, marked=True, since_ms=since_ms
    )
    return last_lines(pieces, count)


def last_lines(pieces: Iterator[Piece], count: int) -> Iterator[Piece]:
    """The last lines of the pieces up to HERE, an unfinished one among them, and all behind it.

    GPUlayer's own pieces are no lines, and stay.
    """
    kept: deque[Piece] = deque()
    ends = 0
    for piece in pieces:
        if piece.stream == HERE:
            break
        if piece.stream not in OUTPUT:
            yield piece
        elif piece.data:
            kept.append(piece)
            ends += piece.data.count(b"\n")
            # What stands before is not needed, however long the log is: a piece that ended may be let go.
            while ends - kept[0].data.count(b"\n") > count:
                ends -= kept.popleft().data.count(b"\n")
    yield from _cut(list(kept), count)
    yield from pieces


def _cut(pieces: list[Piece], count: int) -> list[Piece]:
    """From the last `count` lines on."""
    if not pieces or not count:
        return []
    wanted = count + pieces[-1].data.endswith(b"\n")
    for at in range(len(pieces) - 1, -1, -1):
        data = pieces[at].data
        ends = data.count(b"\n")
        if ends >= wanted:
            for _ in range(wanted):
                data = data[: data.rindex(b"\n")]
            rest = pieces[at].data[len(data) + 1 :]
            return [Piece(pieces[at].stream, rest), *pieces[at + 1 :]] if rest else pieces[at + 1 :]
        wanted -= ends
    return pieces
