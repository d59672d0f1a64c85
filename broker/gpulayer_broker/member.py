"""A worker's membership of a namespace: it registers, beats, listens, claims, and leaves.

Three connections, each with one owner: claims and commits, the heartbeat (never retried, a quarter of the lease
long), and the inbox (blocking). Jobs come in through `deliver`; whoever runs them ends them through `claims`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from gpulayer_broker import functions
from gpulayer_broker.attempts import CANCELLED, Attempt, Attempts
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.claims import Claims
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.functions import DeviceLot, Registration
from gpulayer_broker.heartbeat import Heartbeat
from gpulayer_broker.inbox import Inbox, Mail
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings
from gpulayer_broker.units import MIB

log = logging.getLogger("gpulayer")


@dataclass(frozen=True)
class Identity:
    """Who this worker is: `worker` is the same across restarts, `incarnation` never is; `node` is the machine."""

    worker: str
    node: str
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class Callbacks:
    """What the worker around a membership is told."""

    deliver: Callable[[Attempt], None]
    on_lease: Callable[[float], None] = lambda until_s: None
    on_superseded: Callable[[], None] = lambda: None


class Member:
    """One worker in one namespace. `join` once, `leave` once."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: Settings,
        identity: Identity,
        capabilities: Capabilities,
        callbacks: Callbacks,
        *,
        info: Callable[[], bytes] = lambda: b"{}",
        node_cpus: int | None = None,
    ) -> None:
        self.settings, self.identity, self.capabilities = settings, identity, capabilities
        self.callbacks, self.info = callbacks, info
        self.node_cpus = node_cpus or capabilities.cpus
        self.attempts = Attempts()
        quarter_s = settings.lease_s / 4
        self.queue = self._queue(endpoint, quarter_s)
        self.beating = self._queue(endpoint, quarter_s)
        self.listening = self._queue(endpoint, 5.0)
        self.claims = Claims(
            self.queue,
            self.attempts,
            worker=identity.worker,
            incarnation=identity.incarnation,
            lease_s=settings.lease_s,
            deliver=callbacks.deliver,
            register=self.register,
            on_superseded=callbacks.on_superseded,
        )
        self.heartbeat = Heartbeat(
            self.beating,
            self.attempts,
            settings,
            worker=identity.worker,
            incarnation=identity.incarnation,
            register=self.register_again,
            on_lease=callbacks.on_lease,
            on_superseded=callbacks.on_superseded,
            known=lambda: self.claims.known,
            info=info,
        )
        self.inbox = Inbox(
            self.listening,
            identity.worker,
            block_s=1.5 * settings.heartbeat_s,
            claim=self.claims.claim,
            on_mail=self._on_mail,
        )

    def _queue(self, endpoint: Endpoint, timeout_s: float) -> Queue:
        link = Link(endpoint, socket_timeout_s=min(5.0, timeout_s))
        return Queue(link, self.settings.namespace, deadline_s=timeout_s)

    def register(self) -> None:
        """Makes the worker known; what a former incarnation held is free again."""
        self.queue.register(self._registration())

    def register_again(self) -> None:
        """The queue has lost this worker's record: it is written anew from the heartbeat's own connection."""
        self.beating.register(self._registration())

    def change(self, capabilities: Capabilities) -> None:
        """The machine has changed: it is registered anew and claims for what it has now; what runs goes on."""
        with self.claims.lock:  # no claim may offer devices by the numbers of another class's groups
            if not self.claims.is_open:
                return
            before, self.capabilities = self.capabilities, capabilities
            try:
                self.register()
            except GpulayerError:
                self.capabilities = before
                raise
        self.claims.claim()

    def join(self, capacity: int, lots: Callable[[], tuple[DeviceLot, ...]] | None = None) -> None:
        """Registers and takes up to `capacity` jobs at once from now on."""
        self.register()
        if lots is not None:
            self.claims.lots = lots
        self.claims.open(capacity)
        self.heartbeat.start()
        self.inbox.start()

    def drain(self) -> None:
        """Takes nothing new; what runs goes on."""
        self.claims.close()
        self._say("draining")

    def leave(self) -> None:
        """Ends the membership after the last attempt; what is still held goes back uncounted."""
        self.claims.close()
        if self._has_given_back():
            self._say("offline")
        self.inbox.stop()
        self.heartbeat.stop()
        for thread in (self.inbox, self.heartbeat):
            if thread.ident is not None:
                thread.join(self.settings.lease_s / 4 + 5)
        for queue in (self.queue, self.beating, self.listening):
            queue.link.close()

    def _has_given_back(self) -> bool:
        """Gives back what is held; False where the queue cannot be told."""
        held = self.attempts.all()
        try:
            if held:
                self.claims.release(held, "returned")
        except GpulayerError as error:
            log.warning("%d jobs could not be given back, their leases will end: %s", len(held), error)
            return False
        return True

    def _say(self, state: str) -> None:
        try:
            self.queue.run(functions.drain(self.identity.worker, state, self.identity.incarnation))
        except GpulayerError as error:
            log.warning("worker %s: %s not told to the queue: %s", self.identity.worker, state, error)

    def _on_mail(self, mail: Mail) -> None:
        kind = mail.get("kind")
        if kind == "timer":
            self.heartbeat.timer()
        elif (attempt := self.attempts.get(mail.get("job", ""))) is None:
            return
        elif kind == "cancel":
            attempt.stop(CANCELLED)
        elif kind == "interrupt" and mail.get("token") == attempt.token:
            attempt.interrupt()

    def _registration(self) -> Registration:
        caps, s = self.capabilities, self.settings
        return Registration(
            worker=self.identity.worker,
            node=self.identity.node,
            incarnation=self.identity.incarnation,
            class_id=caps.class_id,
            slots=caps.cpus,
            node_cpus=self.node_cpus,
            memory_mib=caps.memory_bytes // MIB,
            heartbeat_ms=int(s.heartbeat_s * 1000),
            grace_ms=int(s.lease_grace_s * 1000),
            info=self.info(),
            capabilities=caps.canonical(),
        )
