"""One client's road to one target: the queue, the store of its blobs, and the way back after a loss.

Nothing is connected before the first call. `attempt` waits out what passes (a lost connection, a server that starts
again), heals the private set-up where that is the target, and loads the library of a server that lost it; every
action given to it must bear being repeated. Safe between threads and across a fork.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

from gpulayer.targets import Target
from gpulayer_broker import functions
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.queue import Queue
from gpulayer_broker.replies import ReplyError
from gpulayer_broker.server_check import check_server

if TYPE_CHECKING:
    import redis

    from gpulayer_broker.store.blobstore import BlobStore

T = TypeVar("T")
# The open sessions of the private set-up: with the last one this process gives up its share of it.
_private: WeakSet[Session] = WeakSet()
_private_lock = threading.Lock()
log = logging.getLogger("gpulayer")

PATIENCE_S = 30.0
PAUSE_FIRST_S, PAUSE_MOST_S = 0.02, 0.5
TEND_EVERY_S = 4.0
# A call to the private queue fails soon, so that it is healed soon; elsewhere only waiting helps.
PRIVATE_DEADLINE_S, REMOTE_DEADLINE_S = 0.5, 15.0


class Session:
    """The queue and the store of a target, opened when first used; `warnings` say what its operator should know."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.settings = target.settings
        self.warnings: list[str] = []
        self._closed = False
        self._tend_s = time.monotonic() + TEND_EVERY_S
        self._forget()

    def _forget(self) -> None:
        self._queue: Queue | None = None
        self._store: BlobStore | None = None
        self._plain: redis.Redis | None = None
        self._lock = threading.RLock()
        self._pid = os.getpid()

    @property
    def queue(self) -> Queue:
        """The open queue; QueueUnreachable at once where nobody answers."""
        if self._pid != os.getpid():
            self._forget()
        queue = self._queue
        if queue is not None:
            return queue
        with self._lock:
            if self._closed:
                raise QueueUnreachable("this client is closed")
            if self._queue is None:
                self._queue = self._open()
            return self._queue

    def _open(self) -> Queue:
        private = self.target.is_private
        if private:
            with _private_lock:
                _private.add(self)
        link = Link(self.target.endpoint())
        deadline_s = PRIVATE_DEADLINE_S if private else REMOTE_DEADLINE_S
        queue = Queue(link, self.settings.namespace, deadline_s=deadline_s)
        try:
            self.warnings = _strangeness() if private else check_server(link)
            queue.load()
        except BaseException:
            link.close()
            raise
        return queue

    def attempt(self, action: Callable[[Queue], T]) -> T:
        """The action's result; it is repeated while the queue is away, for `PATIENCE_S` at most."""
        queue, loaded = self.queue, False
        end, pause_s = time.monotonic() + PATIENCE_S, PAUSE_FIRST_S
        while True:
            try:
                return action(queue)
            except QueueUnreachable:
                if self._closed or time.monotonic() > end:
                    raise
                loaded = False
            except ReplyError as error:
                if loaded:
                    raise
                queue.load_again(error)
                loaded = True
                continue
            time.sleep(pause_s)
            pause_s = min(PAUSE_MOST_S, pause_s * 2)
            queue = self.healed()

    def healed(self) -> Queue:
        """The queue after a loss: the private set-up is started again if need be, and may be elsewhere."""
        if not self.target.is_private:
            return self.queue
        with self._lock:
            endpoint = self.target.endpoint()
            if self._queue is not None and self._queue.link.endpoint != endpoint:
                self._queue.link.close()
                self._queue = None
            return self.queue

    def tend(self) -> None:
        """For who waits and hears nothing: the private set-up is there, and the queue's clock ticks.

        Whoever kept these may be gone, and the worker after that: then nothing else would bring a job to its end.
        """
        if self.target.store is not None or time.monotonic() < self._tend_s:
            return  # inside a job there is a worker, which keeps the clock
        self._tend_s = time.monotonic() + TEND_EVERY_S
        self.healed().run(functions.tick())

    def link(self) -> Link:
        """A further connection to the same server, its owner's to close."""
        return Link(self.queue.link.endpoint)

    @property
    def endpoint(self) -> Endpoint:
        """Where the queue answers."""
        return self.queue.link.endpoint

    @property
    def store(self) -> BlobStore:
        """A store for one job's blobs: the private set-up's folder, or the queue's server itself."""
        with self._lock:
            return self._local_store() if self.target.is_trusted else self._queue_store()

    def _local_store(self) -> BlobStore:
        if self._store is None:
            from gpulayer_broker.folders import locate_folders
            from gpulayer_broker.store.local import LocalStore

            self._store = LocalStore(self.target.store or locate_folders().create().store)
        return self._store

    def _queue_store(self) -> BlobStore:
        """A new one each time, for it counts its job's bytes; they share their connection."""
        from gpulayer_broker.connection import plain_client
        from gpulayer_broker.store.blobs import QueueStore

        queue = self.queue
        if self._plain is None:
            self._plain = plain_client(queue.link.endpoint)
        return QueueStore(self._plain, queue.keys.blob, limit_bytes=self.settings.queue_blob_bytes)

    def close(self) -> None:
        """Closes the connections for good; the private set-up may stop for idleness when all clients have."""
        self._closed = True
        queue, self._queue = self._queue, None
        plain, self._plain = self._plain, None
        if self._pid != os.getpid():
            return
        if queue is not None:
            queue.link.close()
        if plain is not None:
            plain.close()
        with _private_lock:
            if self in _private:
                _private.discard(self)
                if not _private:
                    _release_private()


def _release_private() -> None:
    from gpulayer.private import release_private

    release_private()


def _strangeness() -> list[str]:
    from gpulayer.private import strangeness
    from gpulayer_broker.folders import locate_folders

    return strangeness(locate_folders())
