"""Whether any known worker can run what is about to be submitted: a warning if none can, a refusal if asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulayer.cli.output import say
from gpulayer_broker.errors import MustFit

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer_broker.requirements import Requirements
    from gpulayer_broker.workers import WorkerRecord

# How long the private set-up's worker may take to tell what it has.
WORKER_START_S = 15.0
POLL_S = 0.05


def check_fit(client: Client, needs: Requirements, *, must_fit: bool) -> None:
    """Warns, or raises MustFit, with the reason. What every worker can run is not asked about."""
    from gpulayer_broker.requirements import Requirements

    if needs == Requirements() and not must_fit:
        return
    from gpulayer.explaining import explain

    found = explain(needs, known_workers(client))
    if found.fits != "never":
        return
    if must_fit:
        raise MustFit(f"not submitted: {found.summary}")
    say(f"gpulayer: warning: {found.summary}; the job waits until one comes that can")


def known_workers(client: Client) -> Sequence[WorkerRecord]:
    """The workers; the private set-up has one, which may just be starting."""
    end = time.monotonic() + WORKER_START_S
    while not (workers := client.workers()) and client.target.is_private and time.monotonic() < end:
        time.sleep(POLL_S)
    return workers
