"""The outbox of a message: what middleware enqueued while the message was followed up, kept for its commit.

The message itself among them is a retry; what is enqueued as a group's callback waits for the group's other children;
anything else is a successor. All become real in the call that ends the attempt, or never.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dramatiq.message import Message

from gpulayer_broker.functions import Submission
from gpulayer_broker.requirements import Requirements

NORMAL = 2


@dataclass(frozen=True)
class Entry:
    """A message on its way into the queue: what it needs, when, and in which band."""

    message: Message[Any]
    needs: Requirements
    delay_ms: int = 0
    band: int = NORMAL

    def submission(self, owner: str = "local") -> Submission:
        return Submission(
            id=self.message.message_id,
            signature=self.needs.signature,
            spec=self.message.encode(),
            owner=owner,
            priority=self.band,
            queue=self.message.queue_name,
            delay_ms=self.delay_ms,
            kind="message",
            name=self.message.actor_name,
        )


@dataclass
class Outbox:
    """Held on the message's proxy. `barrier` names the group that `callbacks` wait for."""

    message_id: str
    retry: Entry | None = None
    successors: list[Entry] = field(default_factory=list)
    callbacks: list[Entry] = field(default_factory=list)
    barrier: str = ""
    _for_callbacks: bool = False

    def add(self, entry: Entry) -> None:
        if self._for_callbacks:
            self.callbacks.append(entry)
        elif entry.message.message_id == self.message_id:
            self.retry = entry
        else:
            self.successors.append(entry)

    @contextmanager
    def callbacks_of(self, barrier: str) -> Iterator[None]:
        """What is added meanwhile enters the queue once all children of the group have succeeded."""
        self.barrier, self._for_callbacks = barrier, True
        try:
            yield
        finally:
            self._for_callbacks = False

    @property
    def entries(self) -> list[Entry]:
        """What enters the queue beside the message, callbacks last."""
        return [*self.successors, *self.callbacks]

    @property
    def needs(self) -> list[Requirements]:
        return [entry.needs for entry in self.entries]


def band_of(priority: int) -> int:
    """The queue's band for a Dramatiq priority: 0 critical, 1 high, 2 normal, 3 low, 4 idle; lower goes first."""
    if priority == 0:
        return NORMAL
    if priority < 0:
        return 0 if priority <= -10 else 1
    return 4 if priority >= 10 else 3
