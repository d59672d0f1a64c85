"""`gpulayer logs`: what a job has written, stdout to stdout and stderr to stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from gpulayer.cli import options as opt


def show_logs(
    job: opt.JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    rank: Annotated[
        int, typer.Option("--rank", metavar="N", help="The rank of a distributed job.", min=0)
    ] = 0,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
) -> int:
    """Show a job's output.

    Example: gpulayer logs -f j_0123456789ab
    """
    from gpulayer.cli.output import say
    from gpulayer.cli.terminal import Terminal, only
    from gpulayer.logs import ERR, NOTE, OUT, read_log

    terminal = Terminal()
    with opt.open_client(target, redis) as client:
        try:
            for piece in only(read_log(client._session, job, rank=rank, follow=follow), (OUT, ERR, NOTE)):
                terminal.write(piece)
        except KeyboardInterrupt:
            say(f"no longer following: job {job} goes on")
            return 130
    return 0
