"""The model of rides: quick calls of one lane that share a slot. On top of `model.py`, and as plain."""

from __future__ import annotations

from gpulayer_broker.functions import CallsEnding, Offer, Submission
from gpulayer_broker.job import QUEUED
from tests.broker.model import Job, Model, Worker

RIDE_US, TINY_US = 20_000, 2_000
LOUD = -1.0


class RideModel(Model):
    """A queue whose line is shared by as many calls as a ride has at most, for `divisor` rides."""

    def __init__(self, fits: dict[str, dict[str, tuple[int, ...]]], divisor: int) -> None:
        super().__init__(fits)
        self.divisor = divisor
        self.lanes: dict[str, float] = {}
        # The age at which each job was granted last: one that has it still was handed back.
        self.had: dict[str, int | None] = {}

    def commit_calls(self, ending: CallsEnding) -> tuple[str, ...]:
        verdicts = tuple(
            self._commit_call(call.ending.id, call.ending.token, call.ending.verdict, call.took_us)
            for call in ending.calls
        )
        self.lanes = {lane: round(mean_us, 1) for lane, mean_us in self.lanes.items()}
        return verdicts

    def _commit_call(self, job_id: str, token: str, verdict: str, took_us: int | None) -> str:
        answer = self.commit(job_id, token, verdict, 0, ())
        lane = self.jobs[job_id].s.lane
        if answer in ("ok", "cancelled") and lane and took_us is not None:
            old = self.lanes.get(lane)
            if took_us < 0 or old == LOUD:
                self.lanes[lane] = LOUD
            else:
                self.lanes[lane] = took_us if old is None else (old + took_us) / 2
        return answer

    def _give(self, j: Job, w: Worker, o: Offer, lots: tuple[tuple[str, int], ...]) -> None:
        line = self._line(j.s)
        is_new = not any(other.waits and self.had.get(other.s.id) == other.entry for other in line)
        super()._give(j, w, o, lots)
        self.had[j.s.id] = j.entry
        mean_us = self.lanes.get(j.s.lane, LOUD)
        if not is_new or j.losses or lots or not 0 <= mean_us < RIDE_US:
            return
        share = max(len(line) // self.divisor, int(TINY_US // max(1, mean_us)))
        most = max(1, min(32, share, int(RIDE_US // max(1, mean_us))))
        j.ride = f"{j.s.id}/{j.token}"
        behind = sorted(
            (o for o in line if o.waits and (o.entry or 0) > (j.entry or 0)), key=lambda o: o.entry or 0
        )
        for other in behind[: most - 1]:
            if other.state != QUEUED or other.s.lane != j.s.lane or other.losses:
                break
            super()._give(other, w, o, ())
            self.had[other.s.id], other.ride = other.entry, j.ride

    def _line(self, s: Submission) -> list[Job]:
        """All that stand in one line, those that run too."""
        return [
            j
            for j in self.jobs.values()
            if j.entry is not None
            and (j.s.signature, j.s.owner, j.s.priority) == (s.signature, s.owner, s.priority)
        ]
