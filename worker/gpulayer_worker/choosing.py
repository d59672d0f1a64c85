"""Which kind of run an attempt needs: by itself or in company, in a process of its own or in one that serves many."""

from __future__ import annotations

from gpulayer_broker.attempts import Attempt
from gpulayer_broker.spec import Spec
from gpulayer_worker.fresh_rides import FreshRide, SingleFresh
from gpulayer_worker.running import Run
from gpulayer_worker.tally import Teller
from gpulayer_worker.warm_rides import WarmRide
from gpulayer_worker.warm_runs import ChunkRun, SingleRun, WarmRun
from gpulayer_worker.workshop import Workshop


def run_of(shop: Workshop, attempt: Attempt, spec: Spec, teller: Teller) -> Run | FreshRide:
    """The run, not begun yet."""
    if attempt.grant.is_chunk:
        return ChunkRun(shop, attempt, spec)
    # What other jobs returned is given to a process of the call's own.
    if spec.isolation != "warm" or spec.call is None or spec.call.given or not shop.warm.available:
        if attempt.grant.ride:
            return FreshRide(shop, attempt, spec, teller)
        return SingleFresh(shop, attempt, spec) if attempt.grant.lane else Run(shop, attempt, spec)
    if attempt.grant.ride:
        return WarmRide(shop, attempt, spec, teller)
    return SingleRun(shop, attempt, spec) if attempt.grant.lane else WarmRun(shop, attempt, spec)
