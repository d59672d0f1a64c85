"""What whoever submits should know, logged once: that no known worker can run it, that the queue is set up strangely.

Advice never keeps a submission from being made, and never waits for a worker that is just starting: where the private
set-up's worker has not told yet what it has, another thread looks again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpulayer.session import Session
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.recent import Recent
from gpulayer_broker.requirements import Requirements

if TYPE_CHECKING:
    from gpulayer_broker.workers import WorkerRecord

log = logging.getLogger("gpulayer")

# How long the private set-up's worker may take to tell what it has.
WORKER_START_S = 15.0
POLL_S = 0.05
KEPT = 256
# What every worker can run.
EVERYBODYS = Requirements()

# What was said of queues: of one that several clients use it is said once.
_strange: Recent[str, None] = Recent(KEPT)


class Adviser:
    """The advice of one client's session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told: Recent[str, bool] = Recent(KEPT)

    def submitted(self, needs: Requirements) -> None:
        """Logs what is to be said of a submission with these needs, and was not said yet."""
        while self._session.warnings:
            text = self._session.warnings.pop(0)
            _strange.get(text, partial(log.warning, "gpulayer: %s", text))
        if needs.signature != EVERYBODYS.signature:
            self._told.get(needs.signature, lambda: self._look(needs))

    def unfit(self, needs: Requirements) -> str:
        """Why no known worker can ever run this, which counts as said; nothing where one can."""
        self._told.get(needs.signature, lambda: True)
        return _unfit(needs, self.workers())

    def workers(self, patience_s: float = WORKER_START_S) -> Sequence[WorkerRecord]:
        """The known workers; of the private set-up that is one, which may just be starting."""
        from gpulayer_broker.workers import read_workers

        end_s = time.monotonic() + patience_s
        while True:
            workers = self._session.attempt(read_workers)
            if not self._is_starting(workers) or time.monotonic() >= end_s:
                return workers
            time.sleep(POLL_S)

    def _is_starting(self, workers: Sequence[WorkerRecord]) -> bool:
        """Whether the private set-up's worker is yet to say what it has: what it had in another life is not that."""
        return self._session.target.is_private and all(worker.state == "offline" for worker in workers)

    def _look(self, needs: Requirements) -> bool:
        try:
            workers = self.workers(0)
        except GpulayerError:
            return False
        if self._is_starting(workers):
            threading.Thread(target=self._look_again, args=(needs,), daemon=True).start()
        else:
            _warn(_unfit(needs, workers))
        return True

    def _look_again(self, needs: Requirements) -> None:
        try:
            _warn(_unfit(needs, self.workers()))
        except GpulayerError as error:
            log.debug("advice: %s", error)


def _unfit(needs: Requirements, workers: Sequence[WorkerRecord]) -> str:
    from gpulayer.explaining import explain

    found = explain(needs, workers)
    return found.summary if found.fits == "never" else ""


def _warn(summary: str) -> None:
    if summary:
        log.warning("gpulayer: warning: %s; the job waits until one comes that can", summary)
