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
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import dramatiq
from dramatiq import middleware as stock
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionFailed, QueueJoinTimeout, QueueNotFound
from dramatiq.message import Message
from dramatiq.middleware import Middleware

from gpulayer_broker import dead_letters, functions
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.consumer import CapabilityConsumer, Delivery, as_dramatiq
from gpulayer_broker.dead_letters import DeadLetter
from gpulayer_broker.groups import GroupCallbacks
from gpulayer_broker.interrupts import Interrupts
from gpulayer_broker.joining import Joiner
from gpulayer_broker.local_facts import own_capabilities
from gpulayer_broker.member import Callbacks, Identity, Member
from gpulayer_broker.outbox import Entry, Outbox, band_of
from gpulayer_broker.queue import Queue, granted
from gpulayer_broker.requirements import ASKED, Requirements, build_requirements
from gpulayer_broker.settings import Settings

REQUIREMENT_OPTIONS = frozenset(ASKED)


DEAD_MESSAGE_TTL_MS = 7 * 24 * 3600 * 1000


class Needs(Middleware):
    """Makes what a worker must have legal as options of an actor, and joins and leaves with the worker process."""

    @property
    def actor_options(self) -> set[str]:
        return set(REQUIREMENT_OPTIONS)

    def after_worker_boot(self, broker: Broker, worker: dramatiq.Worker) -> None:
        ours = cast(CapabilityBroker, broker)
        try:
            ours.join_namespace(worker.worker_threads, worker)
        except ConnectionFailed:
            ours.join_later(worker.worker_threads, worker)

    def after_declare_queue(self, broker: Broker, queue_name: str) -> None:
        cast(CapabilityBroker, broker).offer_queues()

    def before_worker_shutdown(self, broker: Broker, worker: dramatiq.Worker) -> None:
        cast(CapabilityBroker, broker).stop_claiming()

    def after_worker_shutdown(self, broker: Broker, worker: dramatiq.Worker) -> None:
        cast(CapabilityBroker, broker).leave_namespace()


class CapabilityBroker(Broker):
    """A Dramatiq broker whose queues are keyed by what messages need.

    `url` is a Redis or Valkey (redis://, rediss://, unix://, Sentinel); without one, the queue of the settings.
    `member` makes the membership of a worker process; the default one has this Python's frameworks and no devices, and
    interrupts an actor whose message is cancelled. Dead letters live `dead_message_ttl` milliseconds.
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
        dead_message_ttl: int = DEAD_MESSAGE_TTL_MS,
    ) -> None:
        self._groups = GroupCallbacks(lambda: self.queue)
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
        self._plain: dict[str, Requirements] = {}
        self.member: Member | None = None
        self._joiner: Joiner | None = None
        self._worker: dramatiq.Worker | None = None
        self.delivery = Delivery(self.queues, keep_dead_ms=dead_message_ttl)
        self.add_middleware(Needs())
        self.add_middleware(self._groups)
        if member is None:
            self.add_middleware(Interrupts())

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
                    with as_dramatiq():
                        self._queue.load()
            return self._queue

    def close(self) -> None:
        if self._queue is not None:
            self._queue.link.close()
            self._queue = None

    # Declaring ------------------------------------------------------------------------------------------------------

    def add_middleware(
        self,
        middleware: Middleware,
        *,
        before: type[Middleware] | None = None,
        after: type[Middleware] | None = None,
    ) -> None:
        """As Dramatiq's; its own GroupCallbacks is left out, because the queue keeps barriers itself."""
        if type(middleware) is stock.GroupCallbacks:
            self._groups.barrier_ttl = middleware.barrier_ttl
            self.logger.info(
                "Group callbacks are kept by the queue: the given rate limiter backend is not used."
            )
        else:
            super().add_middleware(middleware, before=before, after=after)

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
        self.emit_before("enqueue", message, delay)
        entry = self._entry(message, delay or 0)
        if (outbox := self._open_outbox()) is not None:
            outbox.add(entry)
        else:
            with as_dramatiq():
                self.queue.submit(entry.submission(), entry.needs)
        self.emit_after("enqueue", message, delay)
        return message

    def _entry(self, message: Message[Any], delay_ms: int) -> Entry:
        """Each enqueue is told from every other, also of the same message: a lost reply repeats none."""
        needs = self.needs_of(message)
        message.options["enqueue_id"] = secrets.token_hex(8)
        actor = self.actors.get(message.actor_name)
        priority = message.options.get("priority", actor.priority if actor else 0)
        return Entry(message.copy(), needs, delay_ms, band_of(priority))

    def needs_of(self, message: Message[Any]) -> Requirements:
        """What the message needs: its own options, then its actor's; merged into it, so that it keeps them."""
        actor = self.actors.get(message.actor_name)
        if REQUIREMENT_OPTIONS.isdisjoint(message.options):
            if actor is None or REQUIREMENT_OPTIONS.isdisjoint(actor.options):
                return self._plain_needs(message.queue_name)
            told = {name: actor.options[name] for name in REQUIREMENT_OPTIONS & actor.options.keys()}
        else:
            both = {**(actor.options if actor else {}), **message.options}
            told = {name: both[name] for name in REQUIREMENT_OPTIONS & both.keys()}
        message.options.update(told)
        return build_requirements(**told, queue=message.queue_name, default_cpus=0)

    def _plain_needs(self, queue_name: str) -> Requirements:
        """What a message needs that asks for nothing: made once for each queue, for there are many such."""
        if (needs := self._plain.get(queue_name)) is None:
            needs = self._plain[queue_name] = build_requirements(queue=queue_name, default_cpus=0)
        return needs

    # Processing -----------------------------------------------------------------------------------------------------

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """As Dramatiq's; while a message's processing is followed up, what middleware enqueues goes to its outbox."""
        if signal in ("process_message", "skip_message") and isinstance(args[0], MessageProxy):
            self._processing.outbox = getattr(args[0], "outbox", None)
            try:
                super().emit_after(signal, *args, **kwargs)
            finally:
                self._processing.outbox = None
        else:
            super().emit_after(signal, *args, **kwargs)

    def _open_outbox(self) -> Outbox | None:
        return getattr(self._processing, "outbox", None)

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        return CapabilityConsumer(self.delivery, queue_name, timeout)

    def join_namespace(self, threads: int, worker: dramatiq.Worker | None = None) -> None:
        """A worker process of this broker starts to take messages, `threads` at once, but while it is paused."""
        self._worker = worker
        with as_dramatiq():
            self.queue.link.call("PING")
        callbacks = Callbacks(deliver=self.delivery.put)
        self.member = self._make_member(callbacks) if self._make_member else self._own_member(callbacks)
        self.delivery.open(self.member, self._is_paused)
        try:
            with as_dramatiq():
                self.member.join(threads)
        except BaseException:
            self.member = None  # one that never joined must not pass for a member
            raise

    def join_later(self, threads: int, worker: dramatiq.Worker) -> None:
        """The queue is away just now: the worker joins when it is there."""
        self._joiner = Joiner(lambda: self.join_namespace(threads, worker))
        self._joiner.start()

    @property
    def is_joining(self) -> bool:
        """Whether this process is to become a member and is none yet."""
        return self._joiner is not None and self._joiner.is_alive()

    @property
    def consumed_queues(self) -> tuple[str, ...]:
        """The queues whose messages this process takes: all, or those that its worker was started for."""
        return tuple(sorted(self._worker.consumers if self._worker else self.queues))

    def offer_queues(self) -> None:
        """A queue that is declared while the worker runs is served too."""
        if (member := self.member) is not None and set(self.consumed_queues) - set(
            member.capabilities.queues
        ):
            with as_dramatiq():
                member.change(replace(member.capabilities, queues=self.consumed_queues))

    def _is_paused(self) -> bool:
        return self._worker is not None and any(c.paused for c in self._worker.consumers.values())

    def use_member(self, make: Callable[[Callbacks], Member]) -> None:
        """Worker processes of this broker join by what this makes; `gpulayer_worker.offer_devices` is one such."""
        self._make_member = make

    def _own_member(self, callbacks: Callbacks) -> Member:
        name = f"{socket.gethostname()}-{os.getpid()}"
        identity = Identity(worker=f"w_{name}-{secrets.token_hex(3)}", node=socket.gethostname())
        caps = self._capabilities or own_capabilities(queues=self.consumed_queues)
        return Member(self.endpoint, self.settings, identity, caps, callbacks)

    def stop_claiming(self) -> None:
        """Nothing new is taken; what has not started goes back at once."""
        if self._joiner is not None:
            self._joiner.stop()
        if self.member is not None:
            self.delivery.stop()

    def leave_namespace(self) -> None:
        if self.member is not None:
            member, self.member, self._worker = self.member, None, None
            member.leave()

    # Waiting and cleaning -------------------------------------------------------------------------------------------

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Waits until nothing of the queue waits, is delayed or runs; `interval` and `timeout` in milliseconds."""
        deadline_s = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            with as_dramatiq():
                left = self.queue.open_jobs(queue_name)
            if left == 0:
                return
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    def flush(self, queue_name: str) -> None:
        """Drops everything of the queue that waits, delayed messages too; what runs goes on."""
        with as_dramatiq():
            for ids in self.queue.waiting(queue_name):
                granted(self.queue.run_many([functions.cancel(job_id) for job_id in ids]))

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def abort(self, message: Message[Any]) -> bool:
        """Ends a message: one that waits will not run, one that runs is interrupted. False where it had ended."""
        with as_dramatiq():
            return self.queue.run(functions.cancel(message.message_id))[0] in ("cancelled", "asked")

    # Dead letters ---------------------------------------------------------------------------------------------------

    def dead_letters(self, queue_name: str, *, most: int = 100, skip: int = 0) -> list[DeadLetter]:
        """Messages of the queue that ended badly, those that died first coming first."""
        with as_dramatiq():
            return dead_letters.read(self.queue, queue_name, most=most, skip=skip)

    def requeue_dead_letters(self, queue_name: str, message_ids: Collection[str] | None = None) -> int:
        """Sends dead letters of the queue once more, those with given ids or all; how many.

        Each keeps its id and gets all its retries and its full age anew. One that cannot be read stays.
        """
        with as_dramatiq():
            return sum(
                self._requeue(letter.id, letter.message)
                for letter in dead_letters.all_of(self.queue, queue_name)
                if letter.message is not None
                and (message_ids is None or letter.message.message_id in message_ids)
            )

    def _requeue(self, letter_id: str, message: Message[Any]) -> bool:
        entry = self._entry(message.copy(message_timestamp=int(time.time() * 1000)), 0)
        return self.queue.requeue(replace(entry.submission(), id=letter_id), entry.needs)


__all__ = ["REQUIREMENT_OPTIONS", "CapabilityBroker"]
