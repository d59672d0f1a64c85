"""The one actor of GPUlayer's own jobs: its body runs the job in a process of its own and says what it came to.

Dramatiq's middleware (retries, back-off, age limits, …) then applies to it as to any actor. Calls of a lane, which have
no retries, are told together: their message ends well, whatever became of them.
"""

from __future__ import annotations

from typing import cast

import dramatiq
from dramatiq.middleware import CurrentMessage

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.consumer import CapabilityMessage, Outcome, loads
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.failures import is_one_of
from gpulayer_broker.requirements import DEFAULT_QUEUE
from gpulayer_broker.spec import ACTOR
from gpulayer_worker.choosing import run_of
from gpulayer_worker.outcomes import failed
from gpulayer_worker.running import spec_of
from gpulayer_worker.workshop import Workshop

MIN_BACKOFF_MS = 1000
MAX_BACKOFF_MS = 300_000


class Unsuccessful(Exception):
    """The job ended badly: what Dramatiq's middleware looks at to decide on a retry."""


class Final(Exception):
    """No retry follows: the attempt was cancelled, handed back, no longer this worker's, or no retry was asked for."""


def declare(broker: CapabilityBroker, shop: Workshop) -> None:
    """Declares the actor on this worker's broker."""
    broker.add_middleware(CurrentMessage())

    @dramatiq.actor(
        broker=broker,
        actor_name=ACTOR,
        queue_name=DEFAULT_QUEUE,
        max_retries=0,
        min_backoff=MIN_BACKOFF_MS,
        max_backoff=MAX_BACKOFF_MS,
        time_limit=float("inf"),
        throws=Final,
    )
    def run(**arguments: object) -> None:
        message = cast(CapabilityMessage, CurrentMessage.get_current_message())
        message.outcome = _outcome(shop, broker, message, arguments)
        if message.outcome.verdict in ("cancelled", "released"):
            raise Final(message.outcome.verdict)
        if message.outcome.verdict != "succeeded":
            error = Unsuccessful if may_be_mended(message.outcome, arguments) else Final
            raise error(message.outcome.reason)


def may_be_mended(outcome: Outcome, arguments: dict[str, object]) -> bool:
    """Whether it failed in one of the ways that the job wants to be tried again after."""
    job = arguments.get("job")
    names = job.get("retry_on") if isinstance(job, dict) else None
    code = _told(outcome).get("exit_code")
    return is_one_of(names or (), outcome.reason, code if isinstance(code, int) else None, outcome.kinds)


def _told(outcome: Outcome) -> dict[str, object]:
    error = outcome.fields.get("error")
    return loads(error) if isinstance(error, bytes) else {}


def _outcome(
    shop: Workshop, broker: CapabilityBroker, message: CapabilityMessage, arguments: dict[str, object]
) -> Outcome:
    try:
        spec = spec_of(arguments["job"])  # type: ignore[arg-type]
    except (GpulayerError, KeyError, TypeError) as error:
        return failed("undecodable", type(error).__name__, str(error))
    return run_of(shop, message.attempt, spec, broker.delivery).outcome()
