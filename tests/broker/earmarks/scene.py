"""What the tests of earmarks share: machines, and jobs that wait under a clock which the test sets.

`starve` lets a job wait for a minute while small ones run beside the room that it lacks, and looks.
"""

from __future__ import annotations

from typing import Any

from gpulayer_broker.answers import Grant
from gpulayer_broker.functions import DeviceLot
from tests import snapshot
from tests.queueing import Hand, Machine, signature
from tests.virtual import Clock

WAIT_MS, LOOK_MS = 60_000, 6_000
SMALL, LARGE, HALF = signature(), signature(cpus=4, tag="large"), signature(cpus=2, tag="half")
GPU, PAIR = signature(gpus=1, vram=1000, tag="gpu"), signature(gpus=2, vram=1000, tag="pair")
HEAVY = signature(memory=60_000, tag="heavy")
SIGNATURES = (SMALL, LARGE, HALF, GPU, PAIR, HEAVY)
FITS: dict[str, tuple[int, ...]] = {sig: (0,) if sig in (GPU, PAIR) else () for sig in SIGNATURES}
ONLY_SMALL: dict[str, tuple[int, ...]] = {SMALL: ()}
CARDS = tuple(DeviceLot(f"G{n}", 0, 0, 8000) for n in range(3))


def worker(hand: Hand, name: str = "w1", fits: dict[str, tuple[int, ...]] = FITS, **facts: Any) -> Machine:
    """A machine with four CPUs, unless said otherwise, that has claimed once."""
    machine = hand.machine(name, fits, **{"slots": 4, "node_cpus": 4, **facts})
    hand.claim(machine)
    return machine


def earmarks(hand: Hand) -> dict[str, str]:
    """Machine → the job that it is kept for."""
    return {
        node: text.split(" ")[0]
        for node, text in snapshot.read(hand.link, hand.root).hashes.get("earmarks", {}).items()
    }


def pass_time(hand: Hand, clock: Clock, machines: list[Machine], for_ms: int) -> None:
    """Everybody's heart goes on beating."""
    for _ in range(0, for_ms, LOOK_MS):
        clock.advance(LOOK_MS)
        for machine in machines:
            hand.renew(machine)
        hand.tick()


def run_two(hand: Hand, machine: Machine, **facts: Any) -> None:
    """Two small jobs, neither of whose ends alone makes room for a large one."""
    for _ in range(2):
        hand.submit(SMALL, **facts)
    assert len(hand.claim(machine, 2)) == 2


def starve(hand: Hand, clock: Clock, *machines: Machine, sig: str = LARGE, **facts: Any) -> str:
    """The id of a job that has waited long enough; on each of these machines two small jobs run."""
    for machine in machines:
        run_two(hand, machine)
    job = hand.submit(sig, **facts)
    pass_time(hand, clock, list(machines), WAIT_MS + LOOK_MS)
    return job


def end(hand: Hand, machine: Machine, count: int = 1) -> None:
    for grant in list(machine.held.values())[:count]:
        hand.commit(machine, grant)


def end_all(hand: Hand, machine: Machine) -> None:
    end(hand, machine, len(machine.held))


def ids(grants: tuple[Grant, ...]) -> list[str]:
    return [grant.id for grant in grants]
