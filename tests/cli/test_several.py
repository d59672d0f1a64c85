"""Commands that take several ids: a few sends for however many, each told of, what is not there told at the end."""

from __future__ import annotations

import json
import re

import pytest

from gpulayer_broker import functions as fn
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench

MANY = 1200
# Pages of 500, the connection's own commands, the server's check.
FEW = 60


class Server:
    """What the server has been sent."""

    def __init__(self, bench: Bench) -> None:
        self._link = bench.hand.link
        self._link.call("CONFIG", "RESETSTAT")

    def reads(self) -> int:
        """How often it read from a client: a pipeline counts as one, or a few."""
        found = re.search(rb"total_reads_processed:(\d+)", self._link.call("INFO", "stats"))
        assert found is not None
        return int(found[1])


@pytest.fixture
def jobs(cli: Cli, bench: Bench) -> list[str]:
    """Plain jobs, which wait."""
    template = cli("submit", "-d", "--no-ship", "--", "true").out.strip()
    fields = bench.hand.link.call("HGETALL", bench.hand.key(f"job:{template}"))
    facts = dict(zip(fields[::2], fields[1::2], strict=True))
    signature, spec = facts[b"sig"].decode(), facts[b"spec"]
    made = [fn.Submission(f"j_m{number:011d}", signature, spec) for number in range(MANY)]
    answers = bench.queue.run_many([fn.submit(each) for each in made])
    assert all(getattr(answer, "outcome", "") == "added" for answer in answers)
    return [each.id for each in made]


def test_many_are_cancelled_in_a_few_sends_and_told_in_one_line(
    cli: Cli, bench: Bench, jobs: list[str]
) -> None:
    bench.end(jobs[0])
    bench.take(jobs[1])
    server = Server(bench)
    outcome = cli("cancel", *jobs)

    assert server.reads() < FEW
    assert outcome.code == 0
    assert outcome.err == (
        f"{MANY} jobs: it has ended already (succeeded): 1; its end is asked for: 1; cancelled: {MANY - 2}\n"
    )
    assert {bench.queue.record(job_id).state for job_id in jobs[2:]} == {"cancelled"}


def test_many_are_waited_for_in_a_few_sends(cli: Cli, bench: Bench, jobs: list[str]) -> None:
    cli("cancel", *jobs)
    server = Server(bench)
    outcome = cli("wait", *jobs)

    assert server.reads() < FEW
    assert outcome.code == 1
    assert len(outcome.out.splitlines()) == MANY


def test_many_are_interrupted_in_a_few_sends(cli: Cli, bench: Bench, jobs: list[str]) -> None:
    server = Server(bench)

    assert cli("interrupt", *jobs).err == f"{MANY} jobs: it does not run: {MANY}\n"
    assert server.reads() < FEW


def test_many_are_run_again_in_a_few_sends_and_in_their_order(
    cli: Cli, bench: Bench, jobs: list[str]
) -> None:
    cli("cancel", *jobs)
    server = Server(bench)
    outcome = cli("retry", *jobs, "--json")

    assert server.reads() < FEW
    again = json.loads(outcome.out)
    assert [each["retry_of"] for each in again] == jobs
    assert len({each["id"] for each in again}) == MANY


def test_what_is_not_there_keeps_nothing_else_from_being_cancelled(cli: Cli, bench: Bench) -> None:
    waiting = cli("submit", "-d", "--no-ship", "--", "true").out.strip()
    outcome = cli("cancel", "j_a", waiting, "j_b")

    assert outcome.code == 2
    assert outcome.err.splitlines() == [
        f"job {waiting}: cancelled",
        "gpulayer: no job 'j_a', nor 'j_b': gpulayer jobs lists them",
    ]


def test_nothing_is_interrupted_if_one_has_no_process_of_its_own(
    cli: Cli, bench: Bench, jobs: list[str]
) -> None:
    bench.take(jobs[0])
    bench.hand.link.call("HSET", bench.hand.key(f"job:{jobs[1]}"), "kind", "message")

    assert cli("interrupt", *jobs[:2]).code == 2
    assert "interrupt" not in bench.hand.mail(bench.machine.id)


def test_a_part_of_a_map_is_no_job_to_any_command(cli: Cli, bench: Bench) -> None:
    for command in ("show", "logs", "wait", "cancel", "retry", "interrupt", "outputs", "explain"):
        outcome = cli(command, "j_0123456789ab/3")
        assert outcome.code == 2
        assert "the calls of a map have one id, 'j_0123456789ab'" in outcome.err, command
