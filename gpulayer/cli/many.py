"""`gpulayer submit --array` and `--each-line`: one command many times, as a group that is followed to its end.

In the command `{}` is the number, or the line; each job also has it in $GPULAYER_INDEX and $GPULAYER_LINE.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulayer.cli.output import print_json, say
from gpulayer_broker.errors import StoreError, UsageError
from gpulayer_broker.job import SUCCEEDED

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer.mapping import MapResult
    from gpulayer.options import Plan
    from gpulayer.submitting import Order
    from gpulayer_broker.job import JobRecord

PLACE = "{}"
# Failed jobs that `show` names, and those whose last words are shown as they fail.
SHOWN = 10
WITH_LAST_WORDS = 3
INDEX, LINE = "GPULAYER_INDEX", "GPULAYER_LINE"


@dataclass(frozen=True)
class Turn:
    """One of the many: its number, and what stands in the command's place."""

    index: int
    text: str
    is_line: bool

    @property
    def env(self) -> dict[str, str]:
        return {INDEX: str(self.index), **({LINE: self.text} if self.is_line else {})}


@dataclass(frozen=True)
class Turns:
    """All of them, and how many run at once if not all may."""

    all: Sequence[Turn]
    most: int | None = None

    def plan(self, plan: Plan) -> Plan:
        return plan if self.most is None else plan.taking_turns(self.most, "array")

    def orders(
        self, command: Sequence[str], plan: Plan, spec_of: Callable[[Sequence[str], Plan], Any]
    ) -> Iterator[Order]:
        """An order for each; `spec_of` makes the spec of one command."""
        from gpulayer.submitting import Order

        for turn in self.all:
            argv = [word.replace(PLACE, turn.text) for word in command]
            spec = spec_of(argv, plan)
            named = replace(spec, name=f"{spec.name}[{turn.index}]", env={**spec.env, **turn.env})
            yield Order(named, plan)


def turns_of(array: str | None, each_line: Path | None, idempotency_key: str | None) -> Turns:
    """What --array or --each-line ask for, of which one was given."""
    if array is not None and each_line is not None:
        raise UsageError("--array and --each-line: give one of them")
    if idempotency_key:
        raise UsageError("--idempotency-key names one job: an array has many")
    if array is not None:
        from gpulayer.groups import parsed_array

        numbers, most = parsed_array(array)
        return Turns([Turn(number, str(number), False) for number in numbers], most)
    assert each_line is not None
    lines = _lines(each_line)
    if not lines:
        raise UsageError(f"--each-line {each_line}: it has no lines")
    return Turns([Turn(number, line, True) for number, line in enumerate(lines, 1)])


def _lines(path: Path) -> list[str]:
    """The lines that are not empty."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--each-line {path}: cannot be read: {error}", value=str(path)) from None
    return [line for line in text.splitlines() if line.strip()]


# While they run ------------------------------------------------------------------------------------------------------


def follow_group(
    client: Client, result: MapResult[Any], outputs_to: Path | None, json: bool, submitted: str
) -> int:
    """Says what was submitted, waits for all, tells each failure and fetches what each returns; 1 if any did not
    succeed."""
    counts: Counter[str] = Counter()
    failed: list[str] = []
    group = result.ids[0]
    try:
        say(submitted)
        for item in result.as_completed():
            record = item.job.record
            counts[item.state] += 1
            if item.state != SUCCEEDED:
                failed.append(item.job.id)
                tell_failure(record, record.name, last=len(failed) <= WITH_LAST_WORDS)
            _fetch(client, record, outputs_to)
    except KeyboardInterrupt as interrupt:
        # It may come between two waits: while outputs are fetched, or before the first.
        from gpulayer.watching import detach

        detach(result, interrupt)
        raise
    if json:
        print_json(group_document(group, counts, failed))
    else:
        from gpulayer.groups import summary

        say(f"group {group}: {summary(counts)}")
    if failed:
        say(
            f"gpulayer logs {failed[0]} shows a log, gpulayer retry {group} --failed runs again what did not succeed"
        )
    return int(bool(failed))


def group_document(group: str, counts: Counter[str], failed: Sequence[str]) -> dict[str, Any]:
    """A group for scripts."""
    return {"schema": 1, "id": group, "total": counts.total(), "states": dict(counts), "failed": list(failed)}


def tell_failure(record: JobRecord, name: str, *, last: bool) -> None:
    """Says why a job failed, and with `last` the last lines of its log too if nothing else explains its death."""
    from gpulayer.cli.documents import last_words, why_it_failed

    say(f"{name}: {why_it_failed(record)}")
    for line in last_words(record) if last else ():
        say(f"    {line}")


def _fetch(client: Client, record: JobRecord, outputs_to: Path | None) -> None:
    if not record.outputs:
        return
    from gpulayer.fetching import fetch_outputs
    from gpulayer.handle import RUNS_FOLDER

    folder = (outputs_to or Path(RUNS_FOLDER)) / record.id
    try:
        fetch_outputs(client._session, record, folder)
    except StoreError as error:
        say(f"gpulayer: {error}; gpulayer outputs {record.id} tries again")


# Afterwards -----------------------------------------------------------------------------------------------------------


def group_now(client: Client, group: str) -> tuple[Counter[str], list[str]]:
    """How many jobs of a group are in each state, and which ended without success."""
    from gpulayer.groups import members, states
    from gpulayer_broker.job import FINAL

    found = client._session.attempt(lambda queue: list(states(queue, members(queue, group))))
    failed = [job_id for job_id, state in found if state in FINAL and state != SUCCEEDED]
    return Counter(state for _, state in found), failed


def show_group(client: Client, group: str, json: bool) -> int:
    """Prints how many are in which state, and which ended without success."""
    from gpulayer.cli.output import print_facts
    from gpulayer.groups import summary

    counts, failed = group_now(client, group)
    if json:
        print_json(group_document(group, counts, failed))
        return 0
    facts = [("group", group), ("jobs", str(counts.total())), ("states", summary(counts))]
    for record in client._opened.records(failed[:SHOWN]):
        facts.append(("failed", f"{record.id} {record.name}: {record.end_reason or record.state}"))
    if len(failed) > SHOWN:
        facts.append(("failed", f"and {len(failed) - SHOWN} more: --json has them all"))
    print_facts(facts)
    return 0


def cancelled_group(client: Client, group: str) -> dict[str, Any]:
    """Asks for the end of all jobs of a group that have not ended."""
    from gpulayer.groups import members

    asked = client._opened.cancel_many(client._session.attempt(lambda queue: members(queue, group)))
    counts, _ = group_now(client, group)
    return {"schema": 1, "id": group, "asked": asked, "states": dict(counts)}


def fetched_group(client: Client, group: str, folder: Path) -> list[str]:
    """Fetches what each job returned, into a folder by its id; the paths below `folder`."""
    from gpulayer.fetching import fetch_outputs
    from gpulayer.groups import members

    found: list[str] = []
    for record in client._opened.records(client._session.attempt(lambda queue: members(queue, group))):
        if record.outputs:
            paths = fetch_outputs(client._session, record, folder / record.id)
            found += [f"{record.id}/{path}" for path in paths]
    return found
