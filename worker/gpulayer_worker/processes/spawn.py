"""Starts job processes directly, where there is no fork server (macOS): same handles, weaker promises.

What differs from `fork_server.py`: a function's Python starts anew; a lease is enforced by this process, so not while
it is stopped; a child that leaves the job's session and is orphaned is found only if it was seen below the job when
the job was ended; and a kill -9 of this process leaves its jobs running. Works wherever psutil does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from gpulayer_worker.runner.child import why_not
from gpulayer_worker.runner.proctree import lease_clock_s

from .fork_server import MAIN, ForkServerGone
from .job import Ending, Exit, FunctionCall, JobHandle, JobProcess, Report, Usage, WarmWork
from .pipes import Pipe, ProgressPipe, ReportPipe

RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
LOOK_AT_CLOCKS_S = 1.0
KILL_PATIENCE_S = 10.0


class _Spawned:
    """One process, its pipes, its deadlines, and the thread that waits for it."""

    def __init__(self, handle: JobHandle, starter: SpawnStarter) -> None:
        self.handle = handle
        self.report = ReportPipe()
        callback = handle.job.on_progress
        self.progress = ProgressPipe(callback) if callback is not None else None
        self.lease_until_s = handle.job.lease_until_s
        self.kill_at_s: float | None = None
        self.expired = False
        self.seen: set[psutil.Process] = set()
        self._starter = starter
        self._ended_reader, self._ended_writer = os.pipe()

    def pipes(self) -> list[Pipe]:
        return [self.report] if self.progress is None else [self.report, self.progress]

    def close(self) -> None:
        """Gives back what was opened for a process that did not start."""
        os.close(self._ended_reader)
        os.close(self._ended_writer)
        for pipe in self.pipes():
            pipe.close()

    def tree(self) -> set[psutil.Process]:
        """Everything that is known to be the job's: below it now, seen below it before, or in its session."""
        found = {process for process in self.seen if process.is_running()}
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self.process.pid)
            found |= {main, *main.children(recursive=True)}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(pid) == self.process.pid:
                    found.add(psutil.Process(pid))
        self.seen |= found
        return found

    def signal_tree(self, number: int) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def spawn(self, argv: list[str], env: dict[str, str]) -> None:
        job = self.handle.job
        self.process = subprocess.Popen(
            argv,
            cwd=job.cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=job.stdout,
            stderr=job.stderr,
            pass_fds=[pipe.writer for pipe in self.pipes()],
            start_new_session=True,
            umask=job.umask,
        )
        for pipe in self.pipes():
            pipe.close_writer()
        self.handle.started.tell(self.process.pid)
        if job.on_running is not None:
            job.on_running()
        threading.Thread(target=self._wait, name=f"job-{job.id}", daemon=True).start()
        threading.Thread(target=self._watch, name=f"watch-{job.id}", daemon=True).start()

    def _wait(self) -> None:
        _, code, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(code)
        killed_by = os.WTERMSIG(code) if os.WIFSIGNALED(code) else None
        used = Usage(usage.ru_utime, usage.ru_stime, usage.ru_maxrss * RSS_UNIT_BYTES)
        self.exit = Exit(None if killed_by else self.process.returncode, killed_by, used)
        self.handle.exited.tell(self.exit)
        os.close(self._ended_writer)

    def _watch(self) -> None:
        """Reads the pipes and looks at the clocks until the main process has ended; then ends what is left."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._ended_reader, selectors.EVENT_READ)
            for pipe in self.pipes():
                selector.register(pipe.reader, selectors.EVENT_READ, pipe)
            while not self._look(selector):
                self._look_at_clocks()
        os.close(self._ended_reader)
        self._finish()

    def _look(self, selector: selectors.BaseSelector) -> bool:
        for key, _ in selector.select(LOOK_AT_CLOCKS_S if self._deadline() is None else self._patience_s()):
            if key.data is None:
                return True
            if not key.data.read():
                selector.unregister(key.fd)
        return False

    def _deadline(self) -> float | None:
        return min((due for due in (self.lease_until_s, self.kill_at_s) if due is not None), default=None)

    def _patience_s(self) -> float:
        due = self._deadline()
        return LOOK_AT_CLOCKS_S if due is None else max(0.01, min(due - lease_clock_s(), LOOK_AT_CLOCKS_S))

    def _look_at_clocks(self) -> None:
        due = self._deadline()
        if due is not None and due <= lease_clock_s():
            self.expired = self.lease_until_s is not None and self.lease_until_s <= lease_clock_s()
            self.signal_tree(signal.SIGKILL)

    def _finish(self) -> None:
        strays = {process for process in self.tree() if process.pid != self.process.pid}
        told = tuple(str(process.pid) for process in strays)
        if self.kill_at_s is not None:
            psutil.wait_procs(strays, timeout=max(0.0, self.kill_at_s - lease_clock_s()))
        while strays := {process for process in self.tree() if process.status() != psutil.STATUS_ZOMBIE}:
            self.signal_tree(signal.SIGKILL)
            psutil.wait_procs(strays, timeout=KILL_PATIENCE_S)
        for pipe in self.pipes():
            pipe.read()
            pipe.close()
        self._starter.forget(self)
        self.handle.resolve(Ending(self.exit, self.report.report(), told, self.expired))


class SpawnStarter:
    """Has the face of a fork server; every job is a process started by itself."""

    def __init__(self, python: str, fallback_path: tuple[str, ...] = ()) -> None:
        self._python = python
        self._fallback_path = fallback_path
        self._lock = threading.Lock()
        self._running: dict[str, _Spawned] = {}
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether jobs can be started here."""
        return not self._closed

    @property
    def busy(self) -> int:
        """How many jobs are not gone yet."""
        return len(self._running)

    def start(self, job: JobProcess) -> JobHandle:
        """Starts a job's process."""
        if self._closed:
            raise ForkServerGone("the worker starts no more jobs")
        if isinstance(job.work, WarmWork):
            raise NotImplementedError("warm processes need a fork server")
        handle = JobHandle(job, self)
        if job.lease_until_s is not None and job.lease_until_s <= lease_clock_s():
            handle.resolve(Ending(None, refused="its lease was over before it began"))
            return handle
        spawned = _Spawned(handle, self)
        with self._lock:
            self._running[job.id] = spawned
        try:
            spawned.spawn(self._argv(spawned), self._environment(spawned))
        except OSError as error:
            self._refuse(spawned, error)
        return handle

    def end(self, handle: JobHandle, grace_s: float) -> None:
        """TERM to a job's tree, KILL after the grace."""
        spawned = self._running.get(handle.id)
        if spawned is not None:
            spawned.kill_at_s = lease_clock_s() + grace_s
            spawned.signal_tree(signal.SIGTERM)

    def kill(self, handle: JobHandle) -> None:
        """KILL to a job's tree."""
        spawned = self._running.get(handle.id)
        if spawned is not None:
            spawned.signal_tree(signal.SIGKILL)

    def recall(self, handle: JobHandle) -> None:
        """Every job has begun here."""

    def interrupt(self, handle: JobHandle) -> None:
        """INT to a job's tree."""
        spawned = self._running.get(handle.id)
        if spawned is not None:
            spawned.signal_tree(signal.SIGINT)

    def extend_lease(self, handle: JobHandle, until_s: float | None) -> None:
        """Moves a job's deadline."""
        spawned = self._running.get(handle.id)
        if spawned is not None:
            spawned.lease_until_s = until_s

    def forget(self, spawned: _Spawned) -> None:
        """Called when nothing of a job is left."""
        with self._lock:
            self._running.pop(spawned.handle.id, None)

    def close(self) -> None:
        """Ends every job."""
        self._closed = True
        for spawned in list(self._running.values()):
            spawned.signal_tree(signal.SIGKILL)
            spawned.handle.gone.result(KILL_PATIENCE_S)

    def _argv(self, spawned: _Spawned) -> list[str]:
        work = spawned.handle.job.work
        if isinstance(work, tuple):
            return list(work)
        assert isinstance(work, FunctionCall)
        spec = Path(work.payload).with_suffix(".call.json")
        message = work.as_message() | {"fallback_path": list(self._fallback_path)}
        for name, data in zip(message["inline"], work.blobs, strict=True):
            file = Path(work.payload).with_suffix(f".{name}")
            file.write_bytes(data)
            message[name] = str(file)
        spec.write_text(json.dumps(message))
        python = spawned.handle.job.python or self._python
        return [python, "-u", "-s", str(MAIN), "call", str(spec), str(spawned.report.writer)]

    def _environment(self, spawned: _Spawned) -> dict[str, str]:
        env = dict(spawned.handle.job.env)
        if spawned.progress is not None:
            env["GPULAYER_PROGRESS_FD"] = str(spawned.progress.writer)
        return env

    def _refuse(self, spawned: _Spawned, error: OSError) -> None:
        job = spawned.handle.job
        program = job.work[0] if isinstance(job.work, tuple) else self._python
        if not Path(job.cwd).is_dir():
            kind, text, code = "CannotStart", f"cannot enter the folder {job.cwd}: {error.strerror}", 126
        else:
            kind, text, code = why_not(program, error)
        with contextlib.suppress(OSError):
            os.write(job.stderr, f"gpulayer: {text}\n".encode())
        spawned.close()
        self.forget(spawned)
        report = Report({"ok": False, "type": kind, "module": "gpulayer", "message": text})
        spawned.handle.resolve(Ending(Exit(code, None), report))
