"""Whether any known worker can run what is about to be submitted: a warning if none can, a refusal if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulayer.cli.output import say
from gpulayer_broker.errors import MustFit

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer_broker.requirements import Requirements


def check_fit(client: Client, needs: Requirements, *, must_fit: bool) -> None:
    """Warns, or raises MustFit, with the reason. What every worker can run is not asked about."""
    from gpulayer_broker.requirements import Requirements

    if needs == Requirements() and not must_fit:
        return
    why = client._opened.submitter.adviser.unfit(needs)
    if why and must_fit:
        raise MustFit(f"not submitted: {why}")
    if why:
        say(f"gpulayer: warning: {why}; the job waits until one comes that can")
