"""`gpulayer submit`: a command, with what it needs and the files that go along, followed until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.job_options import Wanted, job_options
from gpulayer.cli.output import print_json, say

if TYPE_CHECKING:
    from gpulayer.cli.many import Turns
    from gpulayer.client import Client
    from gpulayer.options import Plan
    from gpulayer_broker.spec import Spec


@dataclass(frozen=True)
class Files:
    """What goes along and what is to come back."""

    source: Path | None
    inputs: list[str]
    outputs: list[str]
    ship: bool


@job_options
def submit_command(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD…", help="The command and its arguments.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="DIR", help="A folder whose files become the job's folder."),
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SRC[:DEST]", help="A file or folder to send along."),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option("--output", metavar="GLOB", help="Files to return beside those of $GPULAYER_OUTPUTS."),
    ] = None,
    outputs_to: Annotated[
        Path | None, typer.Option("--outputs-to", metavar="DIR", help="Where outputs go (gpulayer_runs/JOB).")
    ] = None,
    no_ship: Annotated[
        bool, typer.Option("--no-ship", help="Send no files that the command merely names.")
    ] = False,
    array: Annotated[
        str | None,
        typer.Option(
            "--array", metavar="0-99%4", help="A job for each number, at most 4 at once; {} is the number."
        ),
    ] = None,
    each_line: Annotated[
        Path | None,
        typer.Option("--each-line", metavar="FILE", help="A job for each line; {} is the line; - is stdin."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and leave.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which workers could take it, and submit nothing.")
    ] = False,
    must_fit: Annotated[
        bool, typer.Option("--must-fit", help="Refuse what no known worker can ever run.")
    ] = False,
    *,
    wanted: Wanted,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Run a command where it fits, and follow it; its exit code is this command's.

    Its stdin is empty: what it is to read goes along as a file, by --source, by --input, or named by the command.

    Example: gpulayer submit --accelerator cuda --output '*.pt' -- python train.py --epochs 3
    """
    from gpulayer.options import plan_of

    turns = _turns(array, each_line, wanted)
    plan = plan_of(wanted, flags=True)
    files = Files(source, input or [], output or [], not no_ship)
    with opt.open_client(target, redis) as client:
        if explain:
            from gpulayer.cli.explain import explain_plan

            return explain_plan(client, plan, json)
        ending = _Ending(detach, json, outputs_to)
        if turns is not None:
            return _submit_many(client, command or [], plan, files, must_fit, ending, turns)
        return _submit(client, command or [], plan, files, must_fit, ending)


def _turns(array: str | None, each_line: Path | None, wanted: Wanted) -> Turns | None:
    if array is None and each_line is None:
        return None
    from gpulayer.cli.many import turns_of

    return turns_of(array, each_line, wanted.get("idempotency_key"))


@dataclass(frozen=True)
class _Ending:
    """What is done once the job is submitted."""

    detach: bool
    json: bool
    outputs_to: Path | None


def _submit(
    client: Client, command: list[str], plan: Plan, files: Files, must_fit: bool, ending: _Ending
) -> int:
    from gpulayer.cli.fitting import check_fit
    from gpulayer.submitting import Order

    spec = _Packer(client, files).spec_of(command, plan)
    check_fit(client, plan.needs, must_fit=must_fit)
    job = client.submit_order(Order(spec, plan))
    if ending.detach:
        print_json({"schema": 1, "id": job.id, "state": job.state}) if ending.json else print(job.id)
        return 0
    from gpulayer.cli.documents import job_document
    from gpulayer.cli.follow import follow

    say(f"job {job.id} submitted: {spec.name}")
    code = follow(client, job, ending.outputs_to, quiet_stdout=ending.json)
    if ending.json:
        print_json(job_document(job.record))
    return code


def _submit_many(
    client: Client,
    command: list[str],
    plan: Plan,
    files: Files,
    must_fit: bool,
    ending: _Ending,
    turns: Turns,
) -> int:
    from gpulayer.cli.fitting import check_fit
    from gpulayer.cli.many import follow_group
    from gpulayer.manner import Manner

    check_fit(client, plan.needs, must_fit=must_fit)
    orders = turns.orders(command, turns.plan(plan), _Packer(client, files).spec_of)
    # The first is looked at before any is submitted: what is wrong with it is wrong with all.
    first = next(orders)
    name = first.spec.name.rpartition("[")[0]
    result = client.submit_group(chain([first], orders), len(turns.all), Manner(name))
    (group,) = result.ids
    if ending.detach:
        print_json({"schema": 1, "id": group, "total": len(result)}) if ending.json else print(group)
        return 0
    submitted = f"group {group} submitted: {len(result)} jobs of {name}"
    return follow_group(client, result, ending.outputs_to, ending.json, submitted)


class _Packer:
    """Makes specs of commands, with their files; what several commands share is sent once."""

    def __init__(self, client: Client, files: Files) -> None:
        self._client, self._files = client, files
        self._known: dict[frozenset[str], Spec] = {}

    def spec_of(self, command: Sequence[str], plan: Plan) -> Spec:
        from gpulayer.commands import command_spec
        from gpulayer.shipping import files_named, parsed_inputs, with_files

        spec, files = command_spec(command, plan), self._files
        named = files_named(spec.argv, Path.cwd()) if files.source is None and files.ship else {}
        if files.source is None and not files.inputs and not named and not files.outputs:
            return spec
        packed = self._known.get(frozenset(named))
        if packed is None:
            self._tell(sorted(named))
            inputs = parsed_inputs(files.inputs)
            packed = with_files(spec, self._client._session, files.source, inputs, files.outputs, named=named)
            self._known[frozenset(named)] = packed
        return replace(spec, source=packed.source, inputs=packed.inputs, outputs=packed.outputs)

    def _tell(self, named: list[str]) -> None:
        if not named:
            return
        if not self._known:
            say(f"shipping {', '.join(named)} (--no-ship sends none, --source DIR a folder)")
        elif len(self._known) == 1:
            say("shipping with each job the files that its own command names")
