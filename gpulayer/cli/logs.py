"""`gpulayer logs`: what a job has written, stdout to stdout and stderr to stderr."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from gpulayer.cli import options as opt
from gpulayer_broker.errors import BadSize, UsageError

if TYPE_CHECKING:
    from gpulayer.logs import Piece
    from gpulayer.session import Session


def show_logs(
    job: opt.JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", help="Only the last N lines (all).", min=0)
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only what came since: 10m ago, or 2027-01-31T08:00."),
    ] = None,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", help="The rank of a distributed job.", min=0)
    ] = 0,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON document for each line.")] = False,
) -> int:
    """Show a job's output; of a map with isolation="warm", that of all its calls.

    Example: gpulayer logs -f --since 10m j_0123456789ab
    """
    from gpulayer.cli.output import say
    from gpulayer.cli.terminal import Terminal, only
    from gpulayer.groups import refuse_group
    from gpulayer.logs import ERR, NOTE, OUT, PROGRESS, read_log
    from gpulayer.tailing import read_tail

    refuse_group(job)
    terminal = Terminal()
    with opt.open_client(target, redis) as client:
        progress = follow and not json and terminal.shows_progress
        session = client._session
        since_ms = _since_ms(session, since) if since is not None else 0
        if tail is None:
            pieces = read_log(session, job, rank=rank, follow=follow, progress=progress, since_ms=since_ms)
        else:
            pieces = read_tail(
                session, job, tail, rank=rank, follow=follow, progress=progress, since_ms=since_ms
            )
        try:
            if json:
                _print_documents(pieces)
                return 0
            for piece in only(pieces, (OUT, ERR, NOTE, PROGRESS)):
                terminal.write(piece)
        except KeyboardInterrupt:
            terminal.erase()
            say(f"no longer following: job {job} goes on")
            return 130
        terminal.erase()
    return 0


def _since_ms(session: Session, text: str) -> int:
    """The moment, in milliseconds since 1970 of the queue's clock; one without a time zone is this machine's."""
    from datetime import datetime

    from gpulayer_broker.units import parse_duration

    with suppress(BadSize):
        span_ms = int(1000 * parse_duration(text))
        seconds, micros = session.attempt(lambda queue: queue.link.call("TIME"))
        return max(0, int(seconds) * 1000 + int(micros) // 1000 - span_ms)
    try:
        return max(0, int(1000 * datetime.fromisoformat(text.strip()).timestamp()))
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"--since {text}: write a span such as 10m, or a moment such as 2027-01-31T08:00", value=text
        ) from None


def _print_documents(pieces: Iterable[Piece]) -> None:
    """A document a line of output: its stream and its text."""
    from gpulayer.logs import ERR, NOTE, OUT, Lines

    streams = {OUT: Lines(), ERR: Lines()}
    for piece in pieces:
        if piece.stream == NOTE:
            _print_document(NOTE, piece.data.decode())
        elif piece.stream in streams:
            for line in streams[piece.stream].feed(piece.data):
                _print_document(piece.stream, line)
    for stream, rest in streams.items():
        for line in rest.rest():
            _print_document(stream, line)


def _print_document(stream: str, text: str) -> None:
    from gpulayer.cli.output import print_json_line

    print_json_line({"stream": stream, "text": text})
