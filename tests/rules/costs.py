"""What one call costs inside the server, in commands run: INFO commandstats counts those inside functions too."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Call, Ending, Submission
from gpulayer_broker.job import new_job_id
from tests.queueing import Hand, Machine

_STAT = re.compile(r"cmdstat_([^:]+):calls=(\d+)")
_NOT_OURS = {"info", "config|resetstat"}


@dataclass(frozen=True)
class Costs:
    """Commands by name, for each of the three calls that every job makes."""

    submit: Counter[str]
    claim: Counter[str]
    commit: Counter[str]


def commands_of(hand: Hand, call: Call[Any]) -> Counter[str]:
    """The commands that the server runs for one call."""
    hand.link.call("CONFIG", "RESETSTAT")
    hand.run(call)
    return _counted(hand.link)


def costs_of_one_job(hand: Hand, machine: Machine, sig: str) -> Costs:
    """Submit, claim and commit of one job, each alone, by a worker that has just come and leaves again."""
    hand.register(machine)
    submit = commands_of(hand, fn.submit(Submission(new_job_id(), sig, b"spec")))
    nonce = secrets.token_hex(16)
    claim = commands_of(hand, fn.claim(machine.offer(1, nonce=nonce)))
    (grant,) = hand.claim(machine, 1, nonce=nonce)
    commit = commands_of(hand, fn.commit(Ending(grant.id, grant.token, "succeeded")))
    hand.run(fn.drain(machine.id, "offline"))
    return Costs(submit, claim, commit)


def fill(hand: Hand, sig: str, *, queued: int, finished: int) -> None:
    """So many more jobs of each kind, through the real functions, many in one send."""
    machine = Machine("filler", slots=1)
    hand.register(machine)
    submits = [fn.submit(Submission(new_job_id(), sig, b"spec")) for _ in range(queued + finished)]
    for start in range(0, len(submits), 5000):
        _send(hand, submits[start : start + 5000])
    grants = hand.claim(machine, 1)
    for left in range(finished, 0, -1):
        grants = hand.commit(machine, grants[0], claim_next=left > 1).claimed.grants
    hand.run(fn.drain(machine.id, "offline"))


def _send(hand: Hand, calls: list[Call[fn.Submitted]]) -> None:
    replies = hand.link.pipeline([call.command(hand.root) for call in calls], timeout_s=60)
    assert all(reply[0] == b"added" for reply in replies)


def _counted(link: Link) -> Counter[str]:
    text = link.call("INFO", "commandstats").decode()
    return Counter({name: int(calls) for name, calls in _STAT.findall(text) if name not in _NOT_OURS})
