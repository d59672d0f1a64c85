"""The outbox of a message: what middleware enqueued while the message was followed up, kept for its commit.

The message itself among them is a retry; anything else is a successor. Both become real in the call that ends the
attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dramatiq.message import Message

from gpulayer_broker.functions import Submission
from gpulayer_broker.requirements import Requirements


@dataclass
class Outbox:
    """Held on the message's proxy."""

    message_id: str
    retry: Message[Any] | None = None
    retry_delay_ms: int = 0
    successors: list[tuple[Message[Any], Requirements, int]] = field(default_factory=list)

    def add(self, message: Message[Any], needs: Requirements, delay_ms: int) -> None:
        if message.message_id == self.message_id:
            self.retry, self.retry_delay_ms = message, delay_ms
        else:
            self.successors.append((message, needs, delay_ms))

    @property
    def needs(self) -> list[Requirements]:
        return [needs for _, needs, _ in self.successors]


def submission(message: Message[Any], needs: Requirements, delay_ms: int, owner: str = "local") -> Submission:
    """A message as it enters the queue."""
    return Submission(
        id=message.message_id,
        signature=needs.signature,
        spec=message.encode(),
        owner=owner,
        queue=message.queue_name,
        delay_ms=delay_ms,
        kind="message",
        name=message.actor_name,
    )
