"""The last lines of a job's output, and what comes after them: both streams together, as they were written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gpulayer.logs import ERR, OUT, Piece, read_log
from gpulayer.session import Session

OUTPUT = (OUT, ERR)


def read_tail(
    session: Session, job_id: str, count: int, *, rank: int = 0, follow: bool = False, progress: bool = False
) -> Iterator[Piece]:
    """The last `count` lines of what is there; with `follow`, also what is written from then on."""
    last, seen_bytes = last_lines(read_log(session, job_id, rank=rank), count)
    yield from last
    if follow:
        pieces = read_log(session, job_id, rank=rank, follow=True, progress=progress)
        yield from behind(pieces, seen_bytes)


def last_lines(pieces: Iterable[Piece], count: int) -> tuple[list[Piece], int]:
    """The last lines of the pieces, an unfinished one among them, and how many bytes of output all of them have."""
    kept: deque[Piece] = deque()
    ends = seen_bytes = 0
    for piece in pieces:
        if piece.stream in OUTPUT and piece.data:
            kept.append(piece)
            ends += piece.data.count(b"\n")
            seen_bytes += len(piece.data)
            # What stands before is not needed, however long the log is: a piece that ended may be let go.
            while ends - kept[0].data.count(b"\n") > count:
                ends -= kept.popleft().data.count(b"\n")
    return _cut(list(kept), count), seen_bytes


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


def behind(pieces: Iterable[Piece], seen_bytes: int) -> Iterator[Piece]:
    """The pieces without the first so many bytes of output; GPUlayer's own pieces stay."""
    for piece in pieces:
        if piece.stream not in OUTPUT:
            yield piece
        elif len(piece.data) > seen_bytes:
            yield Piece(piece.stream, piece.data[seen_bytes:])
            seen_bytes = 0
        else:
            seen_bytes -= len(piece.data)
