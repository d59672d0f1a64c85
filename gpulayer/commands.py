"""A command as a job's spec: a list of words, or a text that is split as a shell would, but run by none."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from gpulayer.options import FRESH, Plan
from gpulayer_broker.errors import UsageError
from gpulayer_broker.spec import Spec


def command_spec(command: str | Sequence[str], plan: Plan) -> Spec:
    """The spec of a command; UsageError for an empty one."""
    argv = tuple(_split(command) if isinstance(command, str) else map(str, command))
    if not argv or not argv[0].strip():
        raise UsageError("the command is empty: give a program and its arguments")
    if any("\0" in argument for argument in argv):
        raise UsageError("an argument of the command holds a NUL byte, which no process can be given")
    if plan.isolation != FRESH:
        raise UsageError(f"isolation={plan.isolation!r} belongs to functions: a command has its own process")
    return Spec(
        kind="command",
        name=plan.name or argv[0].rpartition("/")[2],
        argv=argv,
        requirements=plan.needs.canonical(),
        env=plan.env,
        timeout_s=plan.timeout_s,
        on_outage=plan.on_outage,
        retry_on=plan.retry_on,
    )


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the command cannot be split: {error}; give a list") from None
