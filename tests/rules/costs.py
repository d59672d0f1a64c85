"""What one call costs inside the server: commands run, keys touched and words handed over, those inside functions too.

INFO commandstats counts the commands; MONITOR shows which keys they name and how much they are given.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.functions import Call, Ending, Submission
from gpulayer_broker.job import new_job_id
from tests.queueing import Hand, Machine
from tests.support import PATIENCE_S

_STAT = re.compile(r"cmdstat_([^:]+):calls=(\d+)")
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')
# A function asks the clock where no event's id tells the time for sure: whether that is so is the millisecond's affair.
_NOT_OURS = {"info", "config|resetstat", "time"}


@dataclass(frozen=True)
class Cost:
    """Of one call: how often each command ran, how many keys were named, how many words the commands had in all."""

    commands: Counter[str]
    keys: int
    words: int


@dataclass(frozen=True)
class Costs:
    """Of the three calls that every job makes."""

    submit: Cost
    claim: Cost
    commit: Cost


def cost_of(hand: Hand, call: Call[Any]) -> Cost:
    """What the server does for one call; nobody else may use it meanwhile."""
    with _watched(hand.link.endpoint) as lines:
        hand.link.call("CONFIG", "RESETSTAT")
        hand.run(call)
        commands = _counted(hand.link)
        seen = [_WORD.findall(line) for line in lines(hand.link)]
    inside = [words for words in seen if words[0].upper() not in ("CONFIG", "INFO", "FCALL", "TIME")]
    keys = {word for words in inside for word in words[1:] if word.startswith(hand.root)}
    assert keys, "MONITOR shows what functions do"
    return Cost(commands, len(keys), sum(len(_but_for_the_trim(words)) for words in inside))


def _but_for_the_trim(words: list[str]) -> list[str]:
    """One event in 64 also says how many are kept, whichever call it falls to."""
    is_event = words[0].upper() == "XADD" and words[1].endswith(":events")
    return [word for word in words if word not in ("MAXLEN", "~", "10000")] if is_event else words


@contextmanager
def _watched(endpoint: Endpoint) -> Iterator[Callable[[Link], list[str]]]:
    """What MONITOR says from now on, up to the moment of the call."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(endpoint.path)
        connection.sendall(b"MONITOR\r\n")
        with connection.makefile("r", errors="replace", newline="\n") as said:
            assert said.readline().startswith("+OK")

            def lines(link: Link) -> list[str]:
                mark = secrets.token_hex(16)
                link.call("ECHO", mark)
                return list(takewhile(lambda line: mark not in line, said))

            yield lines


def commands_during(link: Link, act: Callable[[], object]) -> Counter[str]:
    """The commands that the server runs meanwhile, whoever sends them."""
    link.call("CONFIG", "RESETSTAT")
    act()
    return _counted(link)


def costs_of_one_job(hand: Hand, machine: Machine, sig: str) -> Costs:
    """Submit, claim and commit of one job, each alone, by a worker that has just come and leaves again."""
    hand.register(machine)
    submit = cost_of(hand, fn.submit(Submission(new_job_id(), sig, b"spec")))
    nonce = secrets.token_hex(16)
    claim = cost_of(hand, fn.claim(machine.offer(1, nonce=nonce)))
    (grant,) = hand.claim(machine, 1, nonce=nonce)
    commit = cost_of(hand, fn.commit(Ending(grant.id, grant.token, "succeeded")))
    hand.run(fn.drain(machine.id, "offline"))
    return Costs(submit, claim, commit)


def fill(hand: Hand, sig: str, *, queued: int, finished: int) -> None:
    """So many more jobs of each kind, through the real functions, many in one send."""
    machine = Machine("filler", slots=500, node_cpus=500, memory_mib=10**9)
    hand.register(machine)
    submits = [fn.submit(Submission(new_job_id(), sig, b"spec")) for _ in range(queued + finished)]
    for start in range(0, len(submits), 5000):
        replies = _sent(hand, submits[start : start + 5000])
        assert all(reply == b"added" for reply in replies)
    left = finished
    while left:
        grants = hand.claim(machine, min(left, machine.slots))
        assert grants, "the filler's class fits the signature"
        replies = _sent(hand, [fn.commit(Ending(grant.id, grant.token, "succeeded")) for grant in grants])
        assert all(reply[0] == b"ok" for reply in replies)
        left -= len(grants)
    hand.run(fn.drain(machine.id, "offline"))


def cancel_all(hand: Hand, *, but: int) -> None:
    """What waits has ended, all but the oldest few."""
    jobs = hand.link.call("ZRANGE", hand.key("jobs:queued"), but, -1)
    for start in range(0, len(jobs), 5000):
        _sent(hand, [fn.cancel(job.decode()) for job in jobs[start : start + 5000]])


def _sent(hand: Hand, calls: Sequence[Call[Any]]) -> list[Any]:
    return hand.link.pipeline([call.command(hand.root) for call in calls], timeout_s=60)


def _counted(link: Link) -> Counter[str]:
    text = link.call("INFO", "commandstats").decode()
    return Counter({name: int(calls) for name, calls in _STAT.findall(text) if name not in _NOT_OURS})
