"""The worker: starts its parts, waits for a reason to stop, and stops them in order.

First SIGTERM or SIGINT: nothing new is taken, what runs is finished. Second: what runs goes back to the queue at
once. A worker that was killed clears what it left before it registers again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import metadata
from types import FrameType

import dramatiq
import orjson

from gpulayer_broker import locks
from gpulayer_broker.attempts import STALE
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.connection import Endpoint, Link, plain_client
from gpulayer_broker.errors import ConfigError, GpulayerError, QueueUnreachable, Unavailable
from gpulayer_broker.folders import Folders, machine_name
from gpulayer_broker.keys import Keys, root_of
from gpulayer_broker.local_facts import usable_cpus
from gpulayer_broker.matching import eligible_groups
from gpulayer_broker.member import Callbacks, Identity, Member
from gpulayer_broker.queue import Queue
from gpulayer_broker.recent import Recent
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.settings import Settings
from gpulayer_broker.store.blobs import QueueStore
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.local import LocalStore
from gpulayer_worker import actor
from gpulayer_worker.bounds import Bounds
from gpulayer_worker.cache import trim_cache
from gpulayer_worker.cleaner import Cleaner
from gpulayer_worker.grant import workers_part
from gpulayer_worker.hardware import Hardware, Offered
from gpulayer_worker.logs import Logs
from gpulayer_worker.processes import ending
from gpulayer_worker.processes.bundle import fallback_folders
from gpulayer_worker.processes.cgroup import clear_groups, open_groups
from gpulayer_worker.processes.pool import Pool
from gpulayer_worker.processes.warm_lane import WarmLane
from gpulayer_worker.removing import remove_tree
from gpulayer_worker.running import RETURNED
from gpulayer_worker.scratch import Scratches
from gpulayer_worker.usage import DeviceMeters, Sampler
from gpulayer_worker.workshop import Workshop

log = logging.getLogger("gpulayer")

TIDY_EVERY_S = 30.0
JOIN_LOOK_S = 0.1
TRIM_EVERY_S = 600.0
STOP_PATIENCE_MS = 30_000
SIGNATURES_KEPT = 4096
LANES_KEPT = 256
POLL_MS = 500
LOCK_PATIENCE_S = 2.0  # whoever asks whether a worker lives holds its lock for a moment


@dataclass(frozen=True)
class Options:
    """How this worker was asked to be. `node` names the machine; only tests and simulations give another one."""

    endpoint: Endpoint
    private: bool = False
    name: str = field(default_factory=socket.gethostname)
    slots: int | None = None
    labels: tuple[tuple[str, str], ...] = ()
    node: str = ""
    gpus: str = ""
    gpu_share: int = 1
    python: str = sys.executable


class Bell:
    """Wakes the main thread from anywhere: a signal handler may ring it, where an Event could wait for itself."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def ring(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def wait(self, timeout_s: float) -> None:
        """Returns when it was rung, or the time is over."""
        if select.select([self._reader], [], [], timeout_s)[0]:
            os.read(self._reader, 4096)


class Agent:
    """One worker process."""

    def __init__(self, options: Options, settings: Settings, folders: Folders) -> None:
        self.options, self.settings, self.folders = options, settings, folders
        machine = machine_name(folders.state.parent)
        digest = sha256(f"{machine}/{options.name}/{os.getuid()}".encode()).hexdigest()
        self.identity = Identity(worker=f"w_{digest[:12]}", node=options.node or machine[:16])
        self.started_s = time.time()
        self.home = folders.state / "workers" / digest[:12]
        offered = Offered(
            options.slots, options.gpus, options.gpu_share, options.labels, python=options.python
        )
        self.hardware = Hardware(settings, offered, self.home / "scratch")
        self._signals = 0
        self._bell = Bell()
        self._replaced = False
        self._trim_due_s = 0.0
        self._judged: Recent[tuple[str, str], bool] = Recent(SIGNATURES_KEPT)

    @property
    def capabilities(self) -> Capabilities:
        """What the queue knows this worker by now."""
        member = self._broker.member
        return member.capabilities if member is not None else self._capabilities

    def run(self) -> int:
        """Works until asked to stop; the process' exit code."""
        lock = locks.wait_lock(self.folders.worker_lock(self.options.name), LOCK_PATIENCE_S)
        if lock is None:
            raise ConfigError(
                f"a worker named {self.options.name!r} already runs here: give this one another --name"
            )
        with lock:
            lock.record_pid(os.getpid())
            self._clear_leftovers()
            self._capabilities = self.hardware.start()
            try:
                return self._work()
            finally:
                self.hardware.stop()

    def _clear_leftovers(self) -> None:
        """What a killed predecessor left is gone before the queue hears of this incarnation."""
        scratch = self.home / "scratch"
        clear_groups(self.home)
        ending.clear_leftovers(str(scratch))
        remove_tree(scratch)
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.home / "cache").mkdir(mode=0o700, exist_ok=True)
        self.groups = open_groups(self.home, self.settings.job_processes)

    def _work(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        shop, broker = self._assemble()
        worker = dramatiq.Worker(broker, worker_threads=self._at_once, worker_timeout=POLL_MS)
        worker.start()
        # The queue did answer when this process began: an outage since is waited out.
        while broker.is_joining and not self._signals:
            self._bell.wait(JOIN_LOOK_S)
        if broker.member is None:
            worker.stop(timeout=STOP_PATIENCE_MS)
            if self._signals:
                return 0
            raise Unavailable(f"the queue at {self.options.endpoint} did not take this worker: try again")
        self._sampler.start()
        log.info(
            "worker %s (%s) takes jobs, %d at once",
            self.options.name,
            self.identity.worker,
            self._at_once,
        )
        try:
            self._until_stopped(shop)
        finally:
            self._stop(worker, broker.member, shop)
        return 0

    @property
    def _at_once(self) -> int:
        """How many jobs may run here together."""
        return max(1, self._capabilities.cpus) + self.hardware.gpu_slots

    def _assemble(self) -> tuple[Workshop, CapabilityBroker]:
        ending.become_subreaper()
        fallback = fallback_folders(self.home)
        scratch = self.home / "scratch"
        queue = Queue(Link(self.options.endpoint), self.settings.namespace)
        self._configure(queue)
        logs = Logs(queue, self.settings.log_bytes)
        pool = Pool(fallback, str(scratch), after_loss=ending.reap_strays)
        meters = DeviceMeters(self.hardware.readings)
        cleaner = Cleaner()
        shop = Workshop(
            settings=self.settings,
            store=self._store(),
            pool=pool,
            warm=WarmLane(pool, self.groups, self._at_once, cleaner.do),
            logs=logs,
            cleaner=cleaner,
            bounds=Bounds(lacking_bytes=self.hardware.lacking_bytes),
            groups=self.groups,
            meters=meters,
            scratch=Scratches(scratch, self.folders.runtime / f"tmp-{self.home.name}"),
            cache=self.home / "cache",
            python=self.hardware.interpreter.executable,
            hardware=self.hardware,
            environment=workers_part(os.environ),
            queue=self._queue_for_jobs(),
            results=Queue(Link(self.options.endpoint), self.settings.namespace),
            lanes=Recent(LANES_KEPT),
            fits=self._fits,
            on_started=self._beat_soon,
        )
        logs.start()
        shop.cleaner.start()
        shop.bounds.start()
        self._sampler = Sampler(
            queue, self.identity.worker, self.settings.heartbeat_s, meters, lambda: pool.jobs
        )
        broker = CapabilityBroker(self.options.endpoint, settings=self.settings, member=self._member)
        actor.declare(broker, shop)
        self._broker = broker
        return shop, broker

    def _configure(self, queue: Queue) -> None:
        """Through an outage: who is asked to stop meanwhile goes on, and stops then."""
        while not self._signals:
            try:
                queue.configure(self.settings, changed_only=True)
                return
            except QueueUnreachable as error:
                log.warning("the worker waits for its queue: %s", error)

    def _store(self) -> BlobStore:
        if self.options.private:
            return LocalStore(self.folders.store)
        keys = Keys(root_of(self.settings.namespace))
        return QueueStore(
            plain_client(self.options.endpoint), keys.blob, limit_bytes=self.settings.queue_blob_bytes
        )

    def _queue_for_jobs(self) -> dict[str, str]:
        """The way to the queue for what jobs submit themselves: only where all of it is one user's."""
        if not self.options.private:
            return {}
        return {
            "GPULAYER_REDIS_URL": self.options.endpoint.url,
            "GPULAYER_NAMESPACE": self.settings.namespace,
            "GPULAYER_STORE": str(self.folders.store),
        }

    def _member(self, callbacks: Callbacks) -> Member:
        member = Member(
            self.options.endpoint,
            self.settings,
            self.identity,
            self._capabilities,
            Callbacks(
                deliver=callbacks.deliver,
                on_lease=self._extend_leases,
                on_superseded=self._superseded,
            ),
            info=self._info,
            node_cpus=max(usable_cpus(), self._capabilities.cpus),
        )
        self.hardware.attach(member)
        return member

    # --- what the parts ask ---

    def _fits(self, signature: str, needs: Requirements) -> bool:
        """The worker's own look before a start: the queue matched it against the class that it registered."""
        caps = self.capabilities
        return self._judged.get((caps.class_id, signature), lambda: eligible_groups(needs, caps) is not None)

    def _beat_soon(self) -> None:
        """A heartbeat out of turn."""
        if self._broker.member is not None:
            self._broker.member.heartbeat.beat_soon()

    def _extend_leases(self, until_s: float) -> None:
        member = self._broker.member
        for attempt in member.attempts.all() if member else ():
            if attempt.on_lease and attempt.lease_until_s == until_s:
                attempt.on_lease(until_s)

    def _info(self) -> bytes:
        return orjson.dumps(
            {
                "name": self.options.name,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": metadata.version("gpulayer"),
                "target": "local" if self.options.private else "redis",
                "started_s": self.started_s,
                "groups": self.groups.describe(),
                **self.hardware.facts(),
            }
        )

    # --- stopping ---

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._bell.ring()

    def _superseded(self) -> None:
        """Another process is this worker now: what runs here is ended, nobody will hear of it."""
        if self._replaced:
            return
        self._replaced = True
        log.error("worker %s was started again elsewhere: this one stops", self.options.name)
        member = self._broker.member
        for attempt in member.attempts.all() if member else ():
            attempt.stop(STALE)
        self._signals += 1
        self._bell.ring()

    def _until_stopped(self, shop: Workshop) -> None:
        while not self._signals:
            self._bell.wait(TIDY_EVERY_S)
            shop.warm.tidy()
            shop.pool.tidy()
            self._trim_cache(shop)
            self._look_around()

    def _trim_cache(self, shop: Workshop) -> None:
        if time.monotonic() >= self._trim_due_s:
            self._trim_due_s = time.monotonic() + TRIM_EVERY_S
            shop.cleaner.do(partial(trim_cache, shop.cache, self.settings.cache_bytes))

    def _look_around(self) -> None:
        """Packages may have come into the jobs' Python; what cannot be told now is told later."""
        try:
            self.hardware.refresh()
        except GpulayerError as error:
            log.warning("what has changed on this machine could not be told: %s", error)

    def _stop(self, worker: dramatiq.Worker, member: Member, shop: Workshop) -> None:
        """Drains; a second signal hands back what still runs."""
        log.info("stopping: finishing %d jobs", len(member.attempts))
        member.drain()
        while len(member.attempts) and self._signals < 2:
            self._bell.wait(0.05)
        self._broker.delivery.hurried = True
        for attempt in member.attempts.all():
            attempt.stop(RETURNED)
        worker.stop(timeout=STOP_PATIENCE_MS)
        self._sampler.stop()
        shop.warm.close()
        shop.pool.close()
        shop.logs.stop()
        shop.bounds.stop()
        shop.cleaner.stop()
        shop.groups.close()
        self._broker.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            # Python takes its handlers away at its end: one more signal must not turn this exit into a death.
            signal.signal(number, signal.SIG_IGN)
        log.info("worker %s has stopped", self.options.name)
