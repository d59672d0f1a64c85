"""Options that several commands share, each with the one help text it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from gpulayer import ctrl_c
from gpulayer.cli import completing
from gpulayer_broker.errors import UsageError

if TYPE_CHECKING:
    from gpulayer.client import Client

TargetOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME", help="Where to go: local is this user's private set-up."),
]
RedisOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help="The address of a queue, such as redis://host:6379/0."),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JobArgument: TypeAlias = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
GroupArgument: TypeAlias = Annotated[str, typer.Argument(metavar="JOB", help="The id of a job or a group.")]
JobsArgument: TypeAlias = Annotated[list[str], typer.Argument(metavar="JOB…", help="Ids of jobs and groups.")]

Accelerator: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--accelerator",
        metavar="KIND",
        help="cpu, cuda, rocm, mps, gpu or any.",
        autocompletion=completing.one_of(completing.accelerators),
    ),
]
Gpus: TypeAlias = Annotated[int | None, typer.Option("--gpus", metavar="N", help="How many GPUs.")]
GpuMemory: TypeAlias = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 24GB.")
]
GpuModel: TypeAlias = Annotated[
    str | None, typer.Option("--gpu-model", metavar="NAMES", help="Models that will do, such as A100,H100.")
]
Framework: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--framework", metavar="NAME[RANGE]", help="What must be installed, such as 'torch>=2.4'."),
]
Profile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="A common combination: gpulayer profiles.",
        autocompletion=completing.one_of(completing.profiles),
    ),
]
Cpus: TypeAlias = Annotated[int | None, typer.Option("--cpus", metavar="N", help="How many CPUs (1).")]
Memory: TypeAlias = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="Main memory, such as 8GB.")
]
Disk: TypeAlias = Annotated[
    str | None, typer.Option("--disk", metavar="SIZE", help="Free scratch space, such as 50GB.")
]
Python: TypeAlias = Annotated[
    str | None, typer.Option("--python", metavar="RANGE", help="The job's Python, such as '>=3.11'.")
]
Label: TypeAlias = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label that the worker has.")
]

After: TypeAlias = Annotated[
    list[str] | None, typer.Option("--after", metavar="JOB", help="A job that has to end first.")
]
AfterPolicy: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--after-policy",
        metavar="P",
        help="succeeded: else it is cancelled; ended: however it ended.",
        autocompletion=completing.one_of(completing.policies),
    ),
]
ConcurrencyKey: TypeAlias = Annotated[
    str | None, typer.Option("--concurrency-key", metavar="KEY", help="Jobs of one key take turns.")
]
Concurrency: TypeAlias = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="How many jobs of the key run at once (1).")
]
RateLimit: TypeAlias = Annotated[
    str | None,
    typer.Option("--rate-limit", metavar="N/TIME", help="How many jobs of the key begin, as 100/1m."),
]
Priority: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--priority",
        metavar="P",
        help="critical, high, normal, low or idle (normal).",
        autocompletion=completing.one_of(completing.priorities),
    ),
]
RetryOn: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--retry-on",
        metavar="WHAT",
        help="Retry only this: an exit code, an exception, oom, timeout, signal.",
        autocompletion=completing.one_of(completing.failures),
    ),
]
Eta: TypeAlias = Annotated[
    str | None, typer.Option("--eta", metavar="TIME", help="Begin no sooner than then: 2027-01-31T08:00.")
]
ResultTtl: TypeAlias = Annotated[
    str | None, typer.Option("--result-ttl", metavar="TIME", help="How long the result is kept (7d).")
]
Delay: TypeAlias = Annotated[
    str | None, typer.Option("--delay", metavar="TIME", help="Begin no sooner than that, such as 10m.")
]


def open_client(target: str | None, redis: str | None) -> Client:
    """The client of a command; its errors are the command's."""
    ctrl_c.leave_at_once()
    from gpulayer.client import Client
    from gpulayer_broker import dialing  # noqa: F401 - whatever a command does, it connects

    ctrl_c.raise_it()
    return Client(target, redis=redis)


def duration_s(flag: str, text: str) -> float:
    """The seconds of a span, such as 10m, that an option was given."""
    from gpulayer_broker.errors import BadSize
    from gpulayer_broker.units import parse_duration

    try:
        return parse_duration(text)
    except BadSize as error:
        raise UsageError(f"{flag} {text}: {error}", value=text) from None


def environment(texts: Sequence[str]) -> dict[str, str]:
    """`K=V` as given, `K` copied from here."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name:
            raise UsageError(f"--env {text}: write NAME=VALUE, or the NAME of what is set here", value=text)
        if not equals:
            if name not in os.environ:
                raise UsageError(f"--env {text}: {name} is not set here: write {name}=VALUE", value=text)
            value = os.environ[name]
        found[name] = value
    return found
