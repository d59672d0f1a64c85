"""`CapabilityBroker`: a Dramatiq broker on the capability queue.

Messages, actors and middleware behave as Dramatiq documents them. Three things differ:

- an actor, or a message, may say what it needs (`accelerator=`, `gpus=`, `frameworks=`, …), and reaches only a worker
  that has it; what it needs is merged into the message, so that a retry keeps it;
- what middleware enqueues while a message is being processed (a retry, a pipeline's next step) is held in the message's
  outbox and committed together with the acknowledgement: a crash leaves the original or its successor, never both and
  never neither;
- delayed messages stay in the queue, not in a worker's memory.

A worker process joins the namespace when `dramatiq.Worker` boots, with the capabilities of its own Python unless others
are given.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import dramatiq
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionFailed, QueueJoinTimeout, QueueNotFound
from dramatiq.message import Message
from dramatiq.middleware import Middleware

from gpulayer_broker import functions
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.consumer import CapabilityConsumer, Delivery
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.job import QUEUED
from gpulayer_broker.local_facts import own_capabilities
from gpulayer_broker.member import Callbacks, Identity, Member
from gpulayer_broker.outbox import Outbox, submission
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements, build_requirements
from gpulayer_broker.settings import Settings

REQUIREMENT_OPTIONS = frozenset(
    {
        "accelerator",
        "gpus",
        "gpu_memory",
        "gpu_model",
        "frameworks",
        "profile",
        "cpus",
        "memory",
        "disk",
        "python",
        "labels",
    }
)


class Needs(Middleware):
    """Makes what a worker must have legal as options of an actor, and joins and leaves with the worker process."""

    @property
    def actor_options(self) -> set[str]:
        return set(REQUIREMENT_OPTIONS)

    def after_worker_boot(self, broker: Broker, worker: dramatiq.Worker) -> None:
        cast(CapabilityBroker, broker).join_namespace(worker.worker_threads)

    def before_worker_shutdown(self, broker: Broker, worker: dramatiq.Worker) -> None:
        cast(CapabilityBroker, broker).stop_claiming()

    def after_worker_shutdown(self, broker: Broker, worker: dramatiq.Worker) -> None:
        cast(CapabilityBroker, broker).leave_namespace()


class CapabilityBroker(Broker):
    """A Dramatiq broker whose queues are keyed by what messages need.

    `url` is a Redis or Valkey (redis://, rediss://, unix://, Sentinel); without one, the queue of the settings.
    `member` makes the membership of a worker process; the default one has this Python's frameworks and no devices.
    """

    def __init__(
        self,
        url: str | Endpoint | None = None,
        *,
        settings: Settings | None = None,
        middleware: list[Middleware] | None = None,
        capabilities: Capabilities | None = None,
        member: Callable[[Callbacks], Member] | None = None,
        load_functions: bool = True,
    ) -> None:
        super().__init__(middleware=middleware)
        self.settings = settings or Settings()
        self.endpoint = (
            Endpoint.parse(url) if isinstance(url, str) else url or Endpoint.parse(self._address())
        )
        self.queues: set[str] = set()
        self._capabilities, self._make_member = capabilities, member
        self._load_functions = load_functions
        self._queue: Queue | None = None
        self._queue_pid = 0
        self._connecting = threading.Lock()
        self._processing = threading.local()
        self.member: Member | None = None
        self.delivery = Delivery(self.queues)
        self.add_middleware(Needs())

    def _address(self) -> str:
        return self.settings.redis_url or "redis://127.0.0.1:6379"

    # Connections ----------------------------------------------------------------------------------------------------

    @property
    def queue(self) -> Queue:
        """This process's road for submits and plain reads; opened by its first use, and anew after a fork."""
        with self._connecting:
            if self._queue is None or self._queue_pid != os.getpid():
                link = Link(self.endpoint)
                self._queue = Queue(link, self.settings.namespace, deadline_s=self.settings.lease_s / 4)
                self._queue_pid = os.getpid()
                if self._load_functions:
                    with _as_dramatiq():
                        self._queue.load()
            return self._queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.link.close()
            self._queue = None

    # Declaring ------------------------------------------------------------------------------------------------------

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        return self.queues.copy()

    # Sending --------------------------------------------------------------------------------------------------------

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        if message.queue_name not in self.queues:
            raise QueueNotFound(message.queue_name)
        needs = self.needs_of(message)
        self.emit_before("enqueue", message, delay)
        if (outbox := self._open_outbox()) is not None:
            outbox.add(message.copy(), needs, delay or 0)
        else:
            with _as_dramatiq():
                self.queue.submit(submission(message, needs, delay or 0), needs)
        self.emit_after("enqueue", message, delay)
        return message

    def needs_of(self, message: Message[Any]) -> Requirements:
        """What the message needs: its own options, then its actor's; merged into it, so that it keeps them."""
        actor = self.actors.get(message.actor_name)
        for name in REQUIREMENT_OPTIONS:
            if name not in message.options and actor is not None and name in actor.options:
                message.options[name] = actor.options[name]
        told = {name: message.options[name] for name in REQUIREMENT_OPTIONS if name in message.options}
        return build_requirements(**told, queue=message.queue_name, default_cpus=0)

    # Processing -----------------------------------------------------------------------------------------------------

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """As Dramatiq's; while a message's processing is followed up, what middleware enqueues goes to its outbox."""
        if signal in ("process_message", "skip_message") and isinstance(args[0], MessageProxy):
            with self._outbox_of(args[0]):
                super().emit_after(signal, *args, **kwargs)
        else:
            super().emit_after(signal, *args, **kwargs)

    @contextmanager
    def _outbox_of(self, message: MessageProxy) -> Iterator[None]:
        self._processing.outbox = getattr(message, "outbox", None)
        try:
            yield
        finally:
            self._processing.outbox = None

    def _open_outbox(self) -> Outbox | None:
        return getattr(self._processing, "outbox", None)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        return CapabilityConsumer(self.delivery, queue_name, timeout)

    def join_namespace(self, threads: int) -> None:
        """A worker process of this broker starts to take messages, `threads` at once."""
        with _as_dramatiq():
            self.queue.link.call("PING")
        callbacks = Callbacks(deliver=self.delivery.put)
        self.member = self._make_member(callbacks) if self._make_member else self._own_member(callbacks)
        self.delivery.open(self.member)
        try:
            with _as_dramatiq():
                self.member.join(threads)
        except BaseException:
            self.member = None  # one that never joined must not pass for a member
            raise

    def use_member(self, make: Callable[[Callbacks], Member]) -> None:
        """Worker processes of this broker join by what this makes; `gpulayer_worker.offer_devices` is one such."""
        self._make_member = make

    def _own_member(self, callbacks: Callbacks) -> Member:
        name = f"{socket.gethostname()}-{os.getpid()}"
        identity = Identity(worker=f"w_{name}-{secrets.token_hex(3)}", node=socket.gethostname())
        caps = self._capabilities or own_capabilities(queues=tuple(self.queues))
        return Member(self.endpoint, self.settings, identity, caps, callbacks)

    def stop_claiming(self) -> None:
        """Nothing new is taken; what has not started goes back at once."""
        if self.member is not None:
            self.member.drain()

    def leave_namespace(self) -> None:
        if self.member is not None:
            member, self.member = self.member, None
            member.leave()

    # Waiting and cleaning -------------------------------------------------------------------------------------------

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Waits until nothing of the queue waits, is delayed or runs; `interval` and `timeout` in milliseconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            with _as_dramatiq():
                left = self.queue.open_jobs(queue_name)
            if left == 0:
                return
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    def flush(self, queue_name: str) -> None:
        """Drops everything of the queue that waits; what runs goes on."""
        with _as_dramatiq():
            for job_id in self._waiting(queue_name):
                self.queue.run(functions.cancel(job_id))

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def _waiting(self, queue_name: str) -> list[str]:
        ids = self.queue.newest(QUEUED, self.settings.queued_jobs)
        pages = (ids[i : i + 1000] for i in range(0, len(ids), 1000))
        records = (record for page in pages for record in self.queue.records(page))
        return [record.id for record in records if record and record.queue == queue_name]


@contextmanager
def _as_dramatiq() -> Iterator[None]:
    """A queue that cannot be reached is what Dramatiq calls a failed connection; it knows how to retry that."""
    try:
        yield
    except QueueUnreachable as error:
        raise ConnectionFailed(str(error)) from error


__all__ = ["REQUIREMENT_OPTIONS", "CapabilityBroker"]
