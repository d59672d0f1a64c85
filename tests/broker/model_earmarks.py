"""The plain model of the queue with earmarks: what they withhold, and when they go.

Who gets one is decided by `tick` from a choice that the protocol leaves open (which machine is nearest to having room),
so `adopt` takes it from the server and checks that it was allowed; everything else is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpulayer_broker.functions import Offer
from gpulayer_broker.job import CANCELLED, FINAL
from tests.broker.model import Job, Model, Worker
from tests.checker import amounts
from tests.queueing import Machine

Lots = tuple[tuple[str, int], ...]


@dataclass
class Kept:
    """What a machine is kept for, and at which worker."""

    job: str
    worker: str
    devices: tuple[str, ...] = ()


class EarmarkModel(Model):
    """Jobs, workers, and the machines that are kept for a job."""

    def __init__(self, fits: dict[str, dict[str, tuple[int, ...]]]) -> None:
        super().__init__(fits)
        self.kept: dict[str, Kept] = {}
        self.made = 0

    # What withholds -------------------------------------------------------------------------------------------------

    def _take(self, w: Worker, o: Offer) -> None:
        kept = self.kept.get(w.machine.node)
        if kept and kept.worker == w.machine.id:
            devices = self._choice(self.jobs[kept.job], w, o)
            if devices is None:
                del self.kept[w.machine.node]
            else:
                kept.devices = devices
        super()._take(w, o)

    def _choice(self, j: Job, w: Worker, o: Offer) -> tuple[str, ...] | None:
        """The devices that the job is to have: what is free for it by name, then what others hold."""
        groups = self.fits[w.machine.class_id].get(j.s.signature)
        letter, gpus, vram, _, _ = amounts(j.s.signature)
        if groups is None:
            return None
        free = {uuid for uuid, _ in self._devices(o.lots, 99, vram, groups)}
        able = {lot.uuid for lot in o.lots if lot.group in groups and lot.free_mib >= vram}
        found = (*sorted(free), *sorted(able - free))
        wanted = gpus if letter == "g" else 0
        return found[:wanted] if len(found) >= wanted else None

    def _next(self, w: Worker, o: Offer) -> tuple[Job, Lots] | None:
        kept = self.kept.get(w.machine.node)
        if kept is None:
            return super()._next(w, o)
        j = self.jobs[kept.job]

        def important(other: Job) -> bool:
            return other.s.priority < j.s.priority

        return (
            self._first(w, o, important)
            or self._head(j, w, o)
            or self._first(w, o, lambda other: not important(other), kept)
        )

    def _first(
        self, w: Worker, o: Offer, which: Callable[[Job], bool], kept: Kept | None = None
    ) -> tuple[Job, Lots] | None:
        return self._best(
            [
                (j, lots)
                for j in self.jobs.values()
                if j.waits and which(j) and (lots := self._fit_beside(j, w, o, kept)) is not None
            ]
        )

    def _head(self, j: Job, w: Worker, o: Offer) -> tuple[Job, Lots] | None:
        """The oldest of the job's line, if there is room for it."""
        line = [other for other in self.jobs.values() if other.waits and _line(other) == _line(j)]
        head = min(line, key=lambda other: other.entry or 0)
        lots = self._fit(head, w, o)
        return None if lots is None else (head, lots)

    def _fit_beside(self, j: Job, w: Worker, o: Offer, kept: Kept | None) -> Lots | None:
        if kept is None:
            return self._fit(j, w, o)
        return self._fit(j, w, o, amounts(self.jobs[kept.job].s.signature)[3:], kept.worker, kept.devices)

    # When they go ---------------------------------------------------------------------------------------------------

    def _hold(self, j: Job, w: Worker, lots: Lots, token: str) -> None:
        here = self.kept.get(w.machine.node)
        node = self._node_of(j)
        if node is not None:
            kept = self.kept.pop(node)
            if here and node != w.machine.node and _line(self.jobs[here.job]) == _line(j):
                del self.kept[w.machine.node]
                self.kept[node] = Kept(here.job, kept.worker, kept.devices)
        super()._hold(j, w, lots, token)

    def _finish(self, j: Job, state: str) -> None:
        node = self._node_of(j)
        if node is not None:
            del self.kept[node]
        super()._finish(j, state)

    def drain(self, worker: str, state: str) -> None:
        super().drain(worker, state)
        if state != "online":
            self._leaves(worker)

    def register(self, machine: Machine) -> None:
        self._leaves(machine.id)
        super().register(machine)

    def _leaves(self, worker: str) -> None:
        self.kept = {node: kept for node, kept in self.kept.items() if kept.worker != worker}

    def _node_of(self, j: Job) -> str | None:
        return next((node for node, kept in self.kept.items() if kept.job == j.s.id), None)

    # Who gets one ---------------------------------------------------------------------------------------------------

    def adopt(self, seen: Mapping[str, Kept], waited_ms: int) -> None:
        """What a tick has made of them: each new one is for a job that has waited, at a worker that could hold it."""
        for node, kept in seen.items():
            if self.kept.get(node) != kept:
                self._check(node, kept, waited_ms)
                self.made += 1
        self.kept = dict(seen)

    def _check(self, node: str, kept: Kept, waited_ms: int) -> None:
        j, w = self.jobs[kept.job], self.workers[kept.worker]
        _, _, _, cpus, memory = amounts(j.s.signature)
        assert j.waits
        assert j.state not in (*FINAL, CANCELLED)
        assert self.now_ms - j.queued_ms >= waited_ms
        assert (w.machine.node, w.state) == (node, "online")
        assert w.quarantined_until_ms <= self.now_ms
        assert j.s.signature in self.fits[w.machine.class_id]
        assert cpus <= min(w.machine.slots, w.machine.node_cpus)
        assert memory <= w.machine.memory_mib


def _line(j: Job) -> tuple[str, str, int]:
    return j.s.signature, j.s.owner, j.s.priority
