"""A group's completion callbacks, released by the commit of its last child.

The barrier is the set of the children that have succeeded, kept by the queue: a child counts by its id, in the call
that ends it, and the callbacks enter the queue in the very call that completes the set. Neither a message that runs
twice nor a crash at any point releases them twice, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dramatiq import middleware
from dramatiq.broker import Broker, MessageProxy
from dramatiq.message import Message
from dramatiq.rate_limits import RateLimiterBackend

from gpulayer_broker import functions
from gpulayer_broker.consumer import CapabilityMessage, as_dramatiq
from gpulayer_broker.queue import Queue


class Barriers(RateLimiterBackend):
    """What `group.run` makes its barrier with. It limits no rates: Dramatiq's own backends do."""

    def __init__(self, queue: Callable[[], Queue]) -> None:
        self._queue = queue

    def add(self, key: str, value: int, ttl: int) -> bool:
        with as_dramatiq():
            return self._queue().run(functions.barrier(key, value, ttl)) == "ok"


class GroupCallbacks(middleware.GroupCallbacks):
    """Dramatiq's middleware of this name, on the queue's barrier; every CapabilityBroker has one."""

    def __init__(self, queue: Callable[[], Queue]) -> None:
        super().__init__(Barriers(queue))

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        barrier = message.options.get("group_completion_uuid")
        callbacks = message.options.get("group_completion_callbacks")
        if exception is None and barrier and callbacks and isinstance(message, CapabilityMessage):
            with message.outbox.callbacks_of(barrier):
                for callback in callbacks:
                    broker.enqueue(Message(**callback))


__all__ = ["GroupCallbacks"]
