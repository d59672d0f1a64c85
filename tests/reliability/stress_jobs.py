"""What the stress run submits, and what it reports."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

KINDS = ("job", "fork server", "worker", "server", "supervisor")
# What a job writes of itself: begin or end, the attempt, its process id.
Mark = tuple[str, int, int]


@dataclass
class Job:
    """What was asked for, and what must come of it."""

    number: int
    id: str
    kind: str
    retried: bool

    @property
    def words(self) -> bytes:
        return b"result %d\n" % self.number


@dataclass
class Report:
    """What happened, in numbers, and what must not have."""

    jobs: int
    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    killed_pids: set[int] = field(default_factory=set)
    restarts: int = 0
    took_s: float = 0.0
    standstill_s: float = 0.0
    states: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    losses: int = 0
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def text(self) -> str:
        kills = ", ".join(f"{self.kills[kind]} {kind}s" for kind in KINDS)
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        lines = [
            f"seed {self.seed}: {self.jobs} jobs in {self.took_s:.1f} s: {states}",
            f"killed {sum(self.kills.values())}: {kills}; {self.restarts} restarts of workers",
            f"{self.attempts} attempts, {self.losses} lost; longest time without an end {self.standstill_s:.1f} s",
            *self.notes,
            f"faults: {len(self.faults)}",
        ]
        return "\n".join(lines + [f"  {fault}" for fault in self.faults[:50]])


def make_job(dice: random.Random, number: int) -> Job:
    """Of each forty, ten in a row are quick calls of a warm function, and ten those of one with a process each."""
    kind = dice.choices(("command", "function", "outputs", "failing"), (45, 35, 10, 10))[0]
    retried = kind == "failing" or dice.random() < 0.3
    if number % 20 >= 10:
        kind, retried = "call" if number % 40 >= 30 else "quick", False
    return Job(number, f"j_stress{number:06d}", kind, retried)


def work(mark: str, number: int) -> list[int]:
    """The function of the jobs that are functions."""
    import os
    import time

    attempt = os.environ["GPULAYER_ATTEMPT"]
    with open(mark, "a") as file:
        file.write(f"begin {attempt} {os.getpid()}\n")
    time.sleep(number % 8 / 100)
    with open(mark, "a") as file:
        file.write(f"end {attempt}\n")
    return [number, number**2]


def call(mark: str, number: int) -> list[int]:
    """The function of the jobs that are quick calls."""
    import os

    attempt = os.environ["GPULAYER_ATTEMPT"]
    with open(mark, "a") as file:
        file.write(f"begin {attempt} {os.getpid()}\nend {attempt}\n")
    return [number, number**2]
