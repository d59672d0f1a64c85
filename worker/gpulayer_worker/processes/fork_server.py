"""The worker's side of one fork server: starts it, sends requests, reads its events in one thread of its own.

Guarantees: every handle is resolved exactly once, when nothing of the job is left, also when the fork server
is killed (`lost`), or stopped, or silent for so long that it is killed here. `start` and everything on a
handle may be called from any thread and never wait for the fork server. While it preloads, jobs are held here;
a preload that kills it, starts threads or opens a GPU makes forking unsafe: the jobs begin without it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpulayer_worker.runner import cgroups, wire

from . import ending
from .handed_over import HandedOver
from .job import Exit, JobHandle, JobProcess, Usage
from .outbox import Outbox, parsed
from .pipes import Pipe
from .watchdog import LOOK_EVERY_S, Watchdog, continue_stopped

log = logging.getLogger(__name__)

MAIN = Path(__file__).resolve().parent.parent / "runner" / "main.py"
CLOSE_PATIENCE_S = 30.0


class ForkServerGone(Exception):
    """This fork server has ended; another one has to be started."""


class ForkServer:
    """One fork server process and the jobs in it."""

    def __init__(
        self,
        python: str,
        env: Mapping[str, str],
        preload: frozenset[str] = frozenset(),
        fallback_path: tuple[str, ...] = (),
        after_loss: Callable[[], object] | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._look_every_s = look_every_s
        self._python = python
        self._env = dict(env)
        self._preload = preload
        self._fallback = fallback_path
        self._after_loss = after_loss
        self._lock = threading.RLock()
        self._running: dict[str, HandedOver] = {}
        self._held: list[tuple[HandedOver, list[int]]] = []
        self._stats: list[Callable[[dict[str, Any]], None]] = []
        self._closing = False
        self._gone = False
        self._launch()

    # --- for any thread ---

    @property
    def pid(self) -> int:
        """The process id of the fork server."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether jobs can be started here."""
        return not (self._gone or self._closing)

    @property
    def busy(self) -> int:
        """How many jobs are not gone yet."""
        return len(self._running)

    def start(self, job: JobProcess) -> JobHandle:
        """Hands a job over; ForkServerGone when this server has ended."""
        with self._lock:
            if not self.alive:
                raise ForkServerGone(f"the fork server of {self._python} has ended")
            if job.id in self._running:
                raise ValueError(f"{job.id} runs here already")
            running = HandedOver(JobHandle(job, self))
            # Known before it is sent: its first event may come before this returns.
            self._running[job.id] = running
            try:
                self._hand_over(running)
            except BaseException:
                del self._running[job.id]
                for pipe in running.pipes():
                    pipe.close()
                raise
            return running.handle

    def end(self, handle: JobHandle, grace_s: float) -> None:
        """TERM to a job's tree, KILL after the grace."""
        if not self._drop_held(handle):
            self._request(handle, {"request": "end", "grace_s": grace_s})

    def kill(self, handle: JobHandle) -> None:
        """KILL to a job's tree."""
        if not self._drop_held(handle):
            self._request(handle, {"request": "kill"})

    def recall(self, handle: JobHandle) -> None:
        """Takes back a job that has not begun."""
        if not self._drop_held(handle):
            self._request(handle, {"request": "recall"})

    def interrupt(self, handle: JobHandle) -> None:
        """INT to a job's tree; one that has not begun does not see it."""
        self._request(handle, {"request": "interrupt"})

    def extend_lease(self, handle: JobHandle, until_s: float | None) -> None:
        """Moves a job's deadline."""
        with self._lock:
            running = self._running.get(handle.id)
            if running is not None and running.handle is handle:
                running.lease_until_s = until_s
                self._outbox.send({"request": "lease", "until_s": {handle.id: until_s}})

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """What the fork server says of itself: its pid, its jobs, its children."""
        arrived = threading.Event()
        answer: dict[str, Any] = {}

        def take(event: dict[str, Any]) -> None:
            answer.update(event)
            arrived.set()

        with self._lock:
            self._stats.append(take)
            self._outbox.send({"request": "stats"})
        if not arrived.wait(timeout_s):
            raise TimeoutError("the fork server does not answer")
        return answer

    def close(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Ends every job here and the server, by force if it does not answer; returns when all are gone."""
        with self._lock:
            self._closing = True
            with contextlib.suppress(OSError):
                self._link.shutdown(socket.SHUT_RDWR)
            continue_stopped(self.pid)
            thread = self._thread
        thread.join(patience_s)
        if thread.is_alive():
            self._process.kill()
            thread.join(CLOSE_PATIENCE_S)

    # --- starting ---

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        command = [self._python, "-u", "-s", str(MAIN), "serve", str(theirs.fileno()), *self._fallback]
        with theirs:
            # A process group of its own keeps Ctrl-C away; the worker's session is what tells it from the
            # jobs.
            self._process = subprocess.Popen(
                command,
                env=self._env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._link = ours
        self._decoder = wire.Decoder(parsed)
        self._selector = selectors.DefaultSelector()
        self._outbox = Outbox(ours, self._selector)
        self._selector.register(ours, selectors.EVENT_READ, self._read_link)
        self._ready = not self._preload
        self._watchdog = Watchdog(self.pid, self._ask_for_life, self._look_every_s)
        if self._preload:
            self._outbox.send({"request": "preload", "modules": sorted(self._preload)})
        self._thread = threading.Thread(target=self._listen, name=f"fork-server-{self.pid}", daemon=True)
        self._thread.start()

    def _hand_over(self, running: HandedOver) -> None:
        descriptors = [descriptor for _, descriptor in running.descriptors()]
        if self._ready:
            self._outbox.send(running.message(), descriptors, running.blobs())
        else:
            self._held.append((running, self._outbox.keep(descriptors)))
        for pipe in running.pipes():
            pipe.close_writer()

    def _request(self, handle: JobHandle, message: dict[str, Any]) -> None:
        with self._lock:
            running = self._running.get(handle.id)
            if running is not None and running.handle is handle:
                self._outbox.send(message | {"id": handle.id})

    def _drop_held(self, handle: JobHandle) -> bool:
        with self._lock:
            held = next((item for item in self._held if item[0].handle is handle), None)
            if held is None:
                return False
            self._held.remove(held)
            self._outbox.forget(held[1])
            for behind, _ in self._held:
                if behind.after == handle.id:
                    behind.after = held[0].after
        self._finish(handle.id, refused="ended before it began")
        return True

    # --- the reading thread ---

    def _listen(self) -> None:
        selector = self._selector
        while not self._gone and selector is self._selector:
            try:
                for key, mask in selector.select(self._look_every_s):
                    key.data(mask)
                self._look_after()
            except Exception:
                # Nobody may wait for ever on a thread that has failed: its jobs are lost, and said to be.
                log.exception("watching over a fork server failed")
                self._process.kill()
                self._server_ended()

    def _look_after(self) -> None:
        """While it imports it may be silent for long; while it is idle nobody waits for it."""
        if self._running and not self._gone and self._watchdog.look(patient=not self._ready):
            log.error("fork server %d does not answer: killing it", self.pid)
            self._process.kill()

    def _ask_for_life(self) -> None:
        with self._lock:
            self._stats.append(lambda _: None)
            self._outbox.send({"request": "stats"})

    def _read_link(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._outbox.flush()
        if not mask & selectors.EVENT_READ:
            return
        received = wire.receive(self._link)
        if received is None:
            return
        if not received[0]:
            self._server_ended()
            return
        self._watchdog.heard()
        started: list[HandedOver] = []
        for event, _ in self._decoder.feed(*received):
            running = getattr(self, "_event_" + event["event"])(event)
            if running is not None:
                started.append(running)
        for running in started:
            self._watch(running)

    def _event_started(self, event: dict[str, Any]) -> HandedOver:
        running = self._running[event["id"]]
        running.handle.started.tell(event["pid"])
        return running

    def _watch(self, running: HandedOver) -> None:
        """Reads its pipes while it runs. Those of a job that has ended by now were read at its end."""
        if running.handle.gone.done():
            return
        running.is_watched = True
        self._tell_running(running)
        for pipe in running.pipes():
            self._selector.register(pipe.reader, selectors.EVENT_READ, self._pipe_reader(pipe))

    def _tell_running(self, running: HandedOver) -> None:
        try:
            if running.handle.job.on_running is not None:
                running.handle.job.on_running()
        except Exception:
            # This thread watches over all jobs, and goes on.
            log.exception("job %s: a callback for its start failed", running.handle.id)

    def _pipe_reader(self, pipe: Pipe) -> Callable[[int], None]:
        def read(_: int) -> None:
            # Closed by an event that came in the same round.
            if pipe.reader >= 0 and not pipe.read():
                self._selector.unregister(pipe.reader)

        return read

    def _event_exited(self, event: dict[str, Any]) -> HandedOver | None:
        """What is left of it is to be heard too, where it was not yet."""
        running = self._ended(event)
        running.exit = exit_of(event["exit"])
        running.handle.exited.tell(running.exit)
        return running if "pid" in event else None

    def _ended(self, event: dict[str, Any]) -> HandedOver:
        """Whose end this is; of one that has ended soon it is the first that is heard."""
        if "pid" in event:
            return self._event_started(event)
        return self._running[event["id"]]

    def _event_expired(self, event: dict[str, Any]) -> None:
        self._running[event["id"]].expired = True

    def _event_gone(self, event: dict[str, Any]) -> None:
        self._ended(event)
        strays = [f"{stray['pid']} {stray['command']}".strip() for stray in event["strays"]]
        self._finish(event["id"], exit_of(event["exit"]), strays)

    def _event_refused(self, event: dict[str, Any]) -> None:
        self._finish(event["id"], refused=event["error"])

    def _event_stats(self, event: dict[str, Any]) -> None:
        self._stats.pop(0)(event)

    def _event_preloaded(self, event: dict[str, Any]) -> None:
        if event["unsafe"]:
            # The imports have started threads or opened a GPU: forking after that is not safe. Begin again
            # without the imports.
            self._link.shutdown(socket.SHUT_RDWR)
            return
        with self._lock:
            self._ready = True
            self._send_held()

    def _send_held(self) -> None:
        for running, descriptors in self._held:
            self._outbox.send(running.message(), descriptors, running.blobs())
            self._outbox.forget(descriptors)
        self._held.clear()

    def _finish(
        self,
        identifier: str,
        main: Exit | None = None,
        strays: Sequence[str] = (),
        lost: bool = False,
        refused: str | None = None,
    ) -> None:
        with self._lock:
            running = self._running.pop(identifier)
        if running.is_watched:
            for pipe in running.pipes():
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(pipe.reader)
        running.finish(main, tuple(strays), lost, refused)

    # --- the server's end ---

    def _server_ended(self) -> None:
        self._process.wait()
        with self._lock:
            self._outbox.close()
            self._link.close()
            self._selector.unregister(self._link)
            if not self._ready and not self._closing:
                self._begin_without_preload()
                return
            self._gone = True
        self._clear_up()

    def _begin_without_preload(self) -> None:
        self._preload = frozenset()
        self._selector.close()
        self._launch()
        self._send_held()

    def _clear_up(self) -> None:
        """Nothing of a lost job may be left when its handle says so."""
        with self._lock:
            lost = dict(self._running)
            # It tells of an end before it starts what waited for that.
            unbegun = {name for name, running in lost.items() if running.after in lost}
            unbegun |= {running.handle.id for running, _ in self._held}
            for _, descriptors in self._held:
                self._outbox.forget(descriptors)
            self._held.clear()
        try:
            self._end_what_is_left(lost)
        except Exception:
            # The handles are resolved all the same: a worker that waits for ever is worse.
            log.exception("clearing up after a fork server failed")
        for identifier, running in lost.items():
            refused = "the fork server ended before it began" if identifier in unbegun else None
            self._finish(identifier, running.exit, lost=True, refused=refused)
        self._selector.close()

    def _end_what_is_left(self, lost: Mapping[str, HandedOver]) -> None:
        if lost:
            started = [item.handle.started for item in lost.values()]
            sessions = {pid.result() for pid in started if pid.done()}
            for item in lost.values():
                cgroups.kill(item.handle.job.cgroups)
            ending.end_jobs(sessions, set(lost))
        if self._after_loss is not None:
            self._after_loss()


def exit_of(told: Mapping[str, Any]) -> Exit:
    """How a main process ended, as the fork server tells it."""
    user_s, system_s, rss_kib = told["usage"]
    return Exit(told["code"], told["signal"], Usage(user_s, system_s, rss_kib * 1024), told["wall_s"])
