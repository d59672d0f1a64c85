"""A worker's inbox: bell and mail in one stream, read by one blocking call.

After each connect, and whenever nothing came for a while, the worker claims unasked, so that a lost bell costs at
most that while.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.queue import Queue

log = logging.getLogger("gpulayer")

Mail = Mapping[str, str]
PAUSE_S = 0.5


class Inbox(threading.Thread):
    """Reads until stopped; `on_mail` gets each piece of mail but the bell, `claim` is called for the bell."""

    def __init__(
        self,
        queue: Queue,
        worker: str,
        *,
        block_s: float,
        claim: Callable[[], object],
        on_mail: Callable[[Mail], None],
    ) -> None:
        super().__init__(name="gpulayer-inbox", daemon=True)
        self.queue = queue
        self.key = queue.keys.inbox(worker)
        self.block_s = block_s
        self._claim, self._on_mail = claim, on_mail
        self._stopped = threading.Event()

    def run(self) -> None:
        last = b"0-0"
        unasked, silent = True, False
        while not self._stopped.is_set():
            try:
                if unasked:
                    self._claim()
                entries = self._read(last)
                silent = False
                if entries:
                    last = entries[-1][0]
                unasked = self._sort(entries)
            except GpulayerError as error:
                if not (self._stopped.is_set() or silent):
                    log.warning("inbox: %s", error)
                unasked = silent = True
                self._stopped.wait(PAUSE_S)
            except Exception:  # the thread must go on: a worker without an inbox is connected and never works
                log.exception("inbox")
                unasked = True
                self._stopped.wait(PAUSE_S)

    def stop(self) -> None:
        self._stopped.set()
        self.queue.link.close()

    def _read(self, last: bytes) -> list[Any]:
        block_ms = int(self.block_s * 1000)
        reply = self.queue.link.block(
            "XREAD", "BLOCK", block_ms, "STREAMS", self.key, last, timeout_s=self.block_s
        )
        return list(reply[0][1]) if reply else []

    def _sort(self, entries: list[Any]) -> bool:
        """Hands mail on; whether a claim is due: the bell rang, or nothing came at all."""
        mails = [_mail(values) for _, values in entries]
        for mail in mails:
            if mail.get("kind") != "work":
                self._on_mail(mail)
        return not mails or any(mail.get("kind") == "work" for mail in mails)


def _mail(values: list[bytes]) -> Mail:
    texts = [value.decode("utf-8", "replace") for value in values]
    return dict(zip(texts[::2], texts[1::2], strict=False))
