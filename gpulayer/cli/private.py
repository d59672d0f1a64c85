"""`gpulayer down`: ends this user's private set-up; its data stay."""

from __future__ import annotations

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say


def stop_private(json: opt.JsonOption = False) -> int:
    """Stop this user's private set-up: jobs that run are ended and come back when it is started again.

    Example: gpulayer down
    """
    from gpulayer.private import down

    stopped = down()
    if json:
        print_json({"schema": 1, "stopped": stopped})
    else:
        say(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")
    return 0
