"""`gpulayer run`: a Python function by its name, once or over the lines of a file; its result on stdout as JSON."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import completing
from gpulayer.cli import options as opt
from gpulayer.cli.job_options import Wanted, job_options
from gpulayer.cli.output import dumped, print_json, say, write_json
from gpulayer_broker.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer.options import Plan
    from gpulayer.payload import PackedFunction


@dataclass(frozen=True)
class Call:
    """What is to be called: a packed function, its arguments, and the items of a map."""

    packed: PackedFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    items: list[Any] | None


@job_options
def run_function(
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="The function, such as train:main.")
    ],
    arg: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="VALUE", help="A positional argument: JSON, or else text."),
    ] = None,
    kw: Annotated[
        list[str] | None,
        typer.Option("--kw", metavar="NAME=VALUE", help="A keyword argument: JSON, or else text."),
    ] = None,
    map_over: Annotated[
        str | None,
        typer.Option(
            "--map", metavar="FILE.jsonl", help="Call it once for each line, first argument; - is stdin."
        ),
    ] = None,
    isolation: Annotated[
        str | None,
        typer.Option(
            "--isolation",
            metavar="KIND",
            help="fresh: a process per call; warm: for tiny calls.",
            autocompletion=completing.one_of(completing.isolations),
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the ids and leave.")] = False,
    result_ttl: opt.ResultTtl = None,
    *,
    wanted: Wanted,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Run a function of a module here, where it fits; a map prints a line for each item, in order.

    What the function prints goes to stderr. Options add to those of the function's own gl.remote.

    Example: gpulayer run train:main --arg 3 --kw rate=0.1 --accelerator cuda
    """
    from gpulayer.options import plan_of

    own_words = {"isolation": isolation, "result_ttl": result_ttl}
    given = {**wanted, **{name: value for name, value in own_words.items() if value is not None}}
    plan_of(given, flags=True)
    if map_over is not None and wanted.get("idempotency_key"):
        raise UsageError("--idempotency-key names one job: a map has many")
    found = loaded(function)
    own = dict(getattr(found, "_options", {}))
    plan = plan_of({**own, **given}, flags=True)
    items = _items(map_over) if map_over is not None else None
    call = Call(_packed(found), tuple(map(_value, arg or [])), dict(map(_pair, kw or [])), items)
    with opt.open_client(target or own.get("target"), redis) as client:
        if items is None:
            return _run_once(client, call, plan, detach, json)
        return _run_map(client, call, plan, detach, json)


# What is to be called -----------------------------------------------------------------------------------------------


def loaded(text: str) -> Callable[..., Any]:
    """The function that `module:name` says; modules of the current folder are found."""
    module_name, colon, qualname = text.partition(":")
    if not colon or not module_name or not qualname:
        raise UsageError(f"'{text}': write MODULE:FUNCTION, such as train:main", value=text)
    if module_name.endswith(".py"):
        name = Path(module_name).stem
        raise UsageError(f"'{text}': write the module's name, {name}:{qualname}, in its folder", value=text)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = _imported(module_name, text)
    for part in qualname.split("."):
        if not hasattr(found, part):
            known = sorted(name for name in vars(found) if not name.startswith("_"))
            raise UsageError(f"{module_name} has no '{qualname}': {did_you_mean(part, known)}", value=text)
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{text} is no function but {type(found).__name__}", value=text)
    return found  # type: ignore[no-any-return]  # callable just now


def _imported(name: str, text: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        where = f"no module '{name}' here or installed" if error.name == name else str(error)
        raise UsageError(f"'{text}': {where}", value=text) from None
    except Exception as error:
        raise UsageError(
            f"'{text}': importing {name} raised {type(error).__name__}: {error}", value=text
        ) from error


def _packed(function: Any) -> PackedFunction:
    from gpulayer.payload import pack_function
    from gpulayer.remote_function import RemoteFunction

    return function._packed() if isinstance(function, RemoteFunction) else pack_function(function)


def _value(text: str) -> Any:
    """JSON where it is that, else the text itself."""
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--kw {text}: write NAME=VALUE", value=text)
    return name, _value(value)


def _items(path: str) -> list[Any]:
    """The values of a file with one JSON value a line; empty lines are left out."""
    import json

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--map {path}: cannot be read: {error}", value=path) from None
    items = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                items.append(json.loads(line))
            except ValueError:
                raise UsageError(f"--map {path}: line {number} is no JSON value", value=path) from None
    return items


# Running it ---------------------------------------------------------------------------------------------------------


def _run_once(client: Client, call: Call, plan: Plan, detach: bool, json: bool) -> int:
    from gpulayer.cli.documents import job_document
    from gpulayer.cli.fitting import check_fit
    from gpulayer.cli.follow import follow

    check_fit(client, plan.needs, must_fit=False)
    job = client.submit_call(call.packed, (call.args, call.kwargs), plan)
    if detach:
        print_json({"schema": 1, "id": job.id, "state": job.state}) if json else print(job.id)
        return 0
    say(f"job {job.id} submitted: {plan.name or call.packed.label}")
    code = follow(client, job, None, quiet_stdout=True)
    record = job.record
    value = job.result() if record.final and not code else None
    if json:
        print_json({**job_document(record), "result": plain_value(value)})
    elif record.final and not code:
        print_line(value)
    return code


def _run_map(client: Client, call: Call, plan: Plan, detach: bool, json: bool) -> int:
    from gpulayer.cli.fitting import check_fit

    check_fit(client, plan.needs, must_fit=False)
    calls = (((item, *call.args), call.kwargs) for item in call.items or ())
    total = len(call.items or ())
    results = client.submit_map(call.packed, calls, plan, total, return_exceptions=True)
    ids = results.ids
    if detach:
        print_json({"schema": 1, "ids": ids}) if json else print("\n".join(ids))
        return 0
    say(f"{len(results)} calls of {plan.name or call.packed.label} submitted")
    failed = 0
    documents: list[dict[str, Any]] = []
    for index, value in enumerate(results):
        document = _outcome(index, value)
        failed += not document["ok"]
        if json:
            documents.append(document)
        else:
            print_line(document["error"] if isinstance(value, Exception) else value)
    if failed:
        say(f"gpulayer: {failed} of {len(results)} calls failed")
    if json:
        reason = "user_error" if failed else None
        print_json({"schema": 1, "ids": ids, "failed": failed, "end_reason": reason, "results": documents})
    return int(failed > 0)


def _outcome(index: int, value: Any) -> dict[str, Any]:
    if isinstance(value, Exception):
        error = {
            "type": getattr(value, "type", type(value).__name__),
            "message": " ".join(str(value).split()),
            "end_reason": getattr(value, "end_reason", "user_error"),
        }
        tail = getattr(value, "log_tail", "")
        return {"index": index, "ok": False, "error": {**error, **({"log_tail": tail} if tail else {})}}
    return {"index": index, "ok": True, "result": plain_value(value)}


def plain_value(value: Any) -> Any:
    """The value as JSON has it; what JSON has not, as Python shows it."""
    import json

    return json.loads(dumped(value))


def print_line(value: Any) -> None:
    """One value on a line of stdout."""
    write_json(dumped(value))
