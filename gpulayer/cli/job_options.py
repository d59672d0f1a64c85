"""The options of a job on the command line, said once for the commands that submit: `@job_options`.

The command has one parameter `wanted`; in its place stand the options, and it is given those that were set, by the
names that `gpulayer.options` has for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer_broker.errors import UsageError

# As the SDK calls what is given once for each.
PLURALS = {"framework": "frameworks", "label": "labels"}
Wanted = dict[str, Any]


def _options(
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="What the job is called.")
    ] = None,
    priority: opt.Priority = None,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="When to end it, such as 90s or 2h.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", metavar="N", help="Tries after a failure (0).")
    ] = None,
    retry_on: opt.RetryOn = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option("--idempotency-key", metavar="KEY", help="The same key submits the same job once."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K[=V]", help="A variable of the job; without =V it is copied."),
    ] = None,
    accelerator: opt.Accelerator = None,
    gpus: opt.Gpus = None,
    gpu_memory: opt.GpuMemory = None,
    gpu_model: opt.GpuModel = None,
    framework: opt.Framework = None,
    profile: opt.Profile = None,
    cpus: opt.Cpus = None,
    memory: opt.Memory = None,
    disk: opt.Disk = None,
    python: opt.Python = None,
    label: opt.Label = None,
    delay: opt.Delay = None,
    eta: opt.Eta = None,
    after: opt.After = None,
    after_policy: opt.AfterPolicy = None,
    concurrency_key: opt.ConcurrencyKey = None,
    concurrency: opt.Concurrency = None,
    rate_limit: opt.RateLimit = None,
) -> None:
    """What a job can ask for."""


def job_options(command: Callable[..., int]) -> Callable[..., int]:
    """The command with the options of a job in the place of its parameter `wanted`."""
    own = inspect.signature(command, eval_str=True).parameters
    shared = inspect.signature(_options, eval_str=True).parameters
    parameters = [
        each for name, one in own.items() for each in (shared.values() if name == "wanted" else (one,))
    ]

    def called(**given: Any) -> int:
        rest = {name: value for name, value in given.items() if name not in shared}
        return command(**rest, wanted=_wanted({name: given[name] for name in shared}))

    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # as functions may have
    return called


def _wanted(given: Wanted) -> Wanted:
    """Those that were set; an option that can be given several times is empty where it was not."""
    found = {PLURALS.get(name, name): value for name, value in given.items() if value not in (None, [], ())}
    if found.get("idempotency_key") == "":
        raise UsageError("--idempotency-key: it is empty, and would submit a new job each time")
    if "env" in found:
        found["env"] = opt.environment(found["env"])
    return found
