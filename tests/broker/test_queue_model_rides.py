"""Random histories of calls that share slots, among plain jobs, beside the model of them.

A line is long enough for a ride of two when four wait in it: the histories are short.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import CallEnding, CallsEnding, Ending, Submission
from tests.broker.model_rides import LOUD, RideModel
from tests.broker.test_queue_model import FITS, GPU, MACHINES, PICK, SMALL, QueueMachine, run_histories
from tests.virtual import Clock

DIVISOR = 2
SHORT_LINES = {"'XLEN', line) / 8": f"'XLEN', line) / {DIVISOR}"}
TOOK_US = st.sampled_from([100, 100, 7_000, 30_000, -1, None])
LANE = st.sampled_from(["", "l", "l", "l", "m"])


class RideMachine(QueueMachine):
    """Calls of two lanes in the same world."""

    def __init__(self, link: Link, clock: Clock) -> None:
        super().__init__(link, clock)
        self.rides = self.model = RideModel(FITS, DIVISOR)

    @initialize(lanes=st.lists(LANE, min_size=4, max_size=12), took_us=TOOK_US)
    def set_up_lines(self, lanes: list[str], took_us: int | None) -> None:
        """The first call of a lane has told how long it took, and there are lines."""
        self._register_all()
        self.submit_calls(["l"], False, 1)
        self._claim(self.machines["w1"].offer(1))
        self._end([(j.s.id, j.token) for j in self.model.running()], ["succeeded"], took_us, False)
        self.submit_calls(lanes, False, 1)

    def set_up(self, waiting: list[str]) -> None:
        """Not here: `set_up_lines` does it."""

    @rule(lanes=st.lists(LANE, min_size=1, max_size=6), is_gpu=st.booleans(), pick=PICK)
    def submit_calls(self, lanes: list[str], is_gpu: bool, pick: int) -> None:
        for lane in lanes:
            job: Submission = replace(
                self._submission(pick, GPU if is_gpu and pick % 5 == 0 else SMALL), lane=lane
            )
            answer = self.hand.run(fn.submit(job))
            assert (answer.outcome, answer.id or job.id) == self.model.submit(job)

    @precondition(lambda self: self.model.running())
    @rule(
        first=PICK,
        count=st.integers(1, 8),
        verdicts=st.lists(st.sampled_from(["succeeded", "failed", "cancelled"]), min_size=1, max_size=8),
        took_us=TOOK_US,
        claims=st.booleans(),
    )
    def end_calls(
        self, first: int, count: int, verdicts: list[str], took_us: int | None, claims: bool
    ) -> None:
        """Some of what one worker runs, of one ride or of several."""
        mine = self.model.running(self._running(first).worker)
        chosen = [(j.s.id, j.token) for j in mine[first % len(mine) :][:count]]
        self._end(chosen, verdicts, took_us, claims)

    @precondition(lambda self: self.tokens)
    @rule(picks=st.lists(PICK, min_size=1, max_size=3), took_us=TOOK_US)
    def end_calls_with_any_tokens_there_were(self, picks: list[int], took_us: int | None) -> None:
        chosen = [self.tokens[pick % len(self.tokens)] for pick in picks]
        self._end(chosen, ["succeeded"], took_us, False)

    def _end(
        self, chosen: list[tuple[str, str]], verdicts: list[str], took_us: int | None, claims: bool
    ) -> None:
        ending = CallsEnding(
            tuple(
                CallEnding(
                    Ending(job, token, verdicts[n % len(verdicts)], "user_error", fields={"result": b"r"}),
                    took_us,
                )
                for n, (job, token) in enumerate(chosen)
            )
        )
        offer = self.machines[self.model.jobs[chosen[0][0]].worker or "w1"].offer(2) if claims else None
        answer = self.hand.run(fn.commit(ending, offer))
        assert answer.verdicts == self.rides.commit_calls(ending)
        self._claimed_next(answer, offer)

    @invariant()
    def lanes_agree(self) -> None:
        for lane, mean_us in self.rides.lanes.items():
            known = self.hand.link.call("GET", self.hand.key(f"lane:{lane}"))
            assert known == (b"-" if mean_us == LOUD else f"{mean_us:.1f}".encode())


def test_every_history_with_rides_goes_as_the_model_says(link: Link) -> None:
    assert len(MACHINES) == 3
    run_histories(link, RideMachine, SHORT_LINES)
