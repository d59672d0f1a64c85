"""Real workers for tests, and a desk that submits to them straight through the queue.

A `Desk` is one namespace seen as a client sees it, without the SDK: commands and functions in, records, results and
logs out. A `WorkerProcess` is `python -m gpulayer_worker` with short times, its words in a file. `hiring` starts them:
a worker that a test gets is known to its queue, so that what the test does to it, or to the server, meets a worker
at work and not one that starts.
"""

from __future__ import annotations

import io
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import orjson

from gpulayer_broker import spec as specs
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.folders import locate_folders
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import JobRecord, new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements, build_requirements
from gpulayer_broker.spec import FunctionCall, Payload, Spec
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.local import LocalStore
from gpulayer_broker.store.tree import Manifest
from gpulayer_broker.store.unpack import load_manifest
from tests.support import PATIENCE_S, wait_until

MOST_BYTES = 1 << 28
# The times of a worker under test: long enough for a busy machine, short enough to wait for.
TIMES = {"LEASE_S": 12, "HEARTBEAT_S": 0.4, "LEASE_GRACE_S": 0.5, "TERM_GRACE_S": 1}


class WorkerProcess:
    """One worker and what it said."""

    def __init__(
        self,
        endpoint: Endpoint,
        namespace: str,
        name: str,
        log: Path,
        *options: str,
        slots: int = 2,
        private: bool = True,
        environment: Mapping[str, str] | None = None,
        **times: float,
    ) -> None:
        self.endpoint, self.namespace, self.name, self.log = endpoint, namespace, name, log
        self._command = [sys.executable, "-m", "gpulayer_worker", "--redis", endpoint.url]
        self._command += ["--namespace", namespace, "--name", name, "--slots", str(slots), *options]
        self._command += ["--private"] if private else []
        values = {**TIMES, **{key.upper(): value for key, value in times.items()}}
        self._environment = {**os.environ, **{f"GPULAYER_{key}": str(value) for key, value in values.items()}}
        self._environment.update(environment or {})
        self.start()

    def start(self) -> WorkerProcess:
        with open(self.log, "ab") as log:
            self._start_bytes = log.tell()
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def settle(self) -> WorkerProcess:
        """Returns when its queue has it; one that refuses to start, when it has ended."""
        wait_until(lambda: self._takes_jobs() or not self.alive, PATIENCE_S, f"{self.name} takes jobs")
        return self

    def _takes_jobs(self) -> bool:
        return b" takes jobs, " in self.log.read_bytes()[self._start_bytes :]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As a crash."""
        if self.alive:
            self.send(signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    def stop(self, patience_s: float = PATIENCE_S) -> int:
        """An orderly end; the exit code."""
        if self.alive:
            self.send(signal.SIGTERM)
        return self.process.wait(patience_s)

    def end(self) -> None:
        """In order and at once, what runs is handed back; else by force."""
        end = time.monotonic() + 10
        self.send(signal.SIGCONT)
        while self.alive and time.monotonic() < end:
            self.send(signal.SIGTERM)  # of two signals sent at once the kernel delivers one
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        self.kill()


Hire = Callable[..., WorkerProcess]


@contextmanager
def hiring(desk: Desk, folder: Path) -> Iterator[Hire]:
    """Starts workers of the desk's namespace, each returned when its queue has it; all are ended afterwards.

    A worker that refuses to start is returned when it has ended.
    """
    hired: list[WorkerProcess] = []

    def hire(name: str = "", *options: str, **facts: Any) -> WorkerProcess:
        name = name or f"{folder.name}-{len(hired)}"
        log = folder / f"worker-{len(hired)}.log"
        endpoint = facts.pop("endpoint", desk.endpoint)
        hired.append(WorkerProcess(endpoint, desk.namespace, name, log, *options, **facts))
        return hired[-1].settle()

    try:
        yield hire
    finally:
        for worker in hired:
            worker.end()
        for worker in hired:
            print(f"--- {worker.name}\n{worker.said()}")


class Desk:
    """A client of one namespace."""

    def __init__(self, endpoint: Endpoint, namespace: str, client: str = "c1") -> None:
        self.endpoint, self.namespace, self.client = endpoint, namespace, client
        self.link = Link(endpoint, socket_timeout_s=PATIENCE_S)
        self.queue = Queue(self.link, namespace)
        self.queue.load()
        self.store: BlobStore = LocalStore(locate_folders().create().store)
        self.needs = build_requirements()

    def close(self) -> None:
        self.link.close()

    # --- in ---

    def submit(
        self,
        spec: Spec,
        *,
        id: str = "",
        options: Mapping[str, Any] | None = None,
        needs: Requirements | None = None,
        **facts: Any,
    ) -> str:
        needs = needs or self.needs
        job_id = id or new_job_id()
        data = specs.encode(job_id, int(time.time() * 1000), spec, options)
        submission = Submission(
            job_id,
            needs.signature,
            data,
            client=self.client,
            prepare=spec.needs_preparation,
            kind=spec.kind,
            name=spec.name,
            on_outage=spec.on_outage,
            **facts,
        )
        return self.queue.submit(submission, needs)

    def command(self, *argv: str, options: Mapping[str, Any] | None = None, **fields: Any) -> str:
        return self.submit(self.command_spec(*argv, **fields), options=options)

    def shell(self, script: str, options: Mapping[str, Any] | None = None, **fields: Any) -> str:
        return self.command("sh", "-c", script, options=options, **fields)

    def python(self, script: str, options: Mapping[str, Any] | None = None, **fields: Any) -> str:
        return self.command(sys.executable, "-c", script, options=options, **fields)

    def function(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        options: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        return self.submit(self.function_spec(function, *arguments, **fields), options=options)

    def command_spec(self, *argv: str, **fields: Any) -> Spec:
        return Spec("command", argv=argv, requirements=self.needs.canonical(), **fields)

    def function_spec(self, function: Callable[..., Any], *arguments: Any, **fields: Any) -> Spec:
        call = FunctionCall(
            Payload(by_value(function)),
            Payload(cloudpickle.dumps((arguments, {}))),
            qualname=getattr(function, "__qualname__", "function"),
            python=platform.python_version(),
        )
        return Spec("function", call=call, requirements=self.needs.canonical(), **fields)

    # --- out ---

    def record(self, job_id: str) -> JobRecord:
        return self.queue.record(job_id)

    def reaches(self, job_id: str, state: str, timeout_s: float = PATIENCE_S) -> JobRecord:
        wait_until(lambda: self.record(job_id).state == state, timeout_s, f"{job_id} is {state}", every=0.005)
        return self.record(job_id)

    def final(self, job_id: str, timeout_s: float = PATIENCE_S) -> JobRecord:
        wait_until(lambda: self.record(job_id).final, timeout_s, f"{job_id} is final", every=0.005)
        return self.record(job_id)

    def value(self, job_id: str) -> Any:
        kind, data = self.queue.result(job_id)
        if kind == "blob":
            named = orjson.loads(data or b"{}")
            kind, data = named["kind"], self.store.read_bytes(named["sha256"], MOST_BYTES)
        return decoded(kind, data or b"")

    def error(self, job_id: str) -> dict[str, Any]:
        return dict(orjson.loads(self.record(job_id).error))

    def notes(self, job_id: str) -> list[str]:
        return list(orjson.loads(self.record(job_id).notes or b"[]"))

    def outputs(self, job_id: str) -> Manifest:
        return load_manifest(self.record(job_id).outputs, self.store)

    def output(self, job_id: str, path: str) -> bytes:
        entry = next(entry for entry in self.outputs(job_id).entries if entry.path == path)
        return self.store.read_bytes(entry.sha256, MOST_BYTES)

    def log_entries(self, job_id: str, attempt: int = 1) -> list[tuple[int, dict[bytes, bytes]]]:
        """The live tail: (the offset behind it, fields) of each entry."""
        key = f"{self.queue.keys.root}log:{job_id}:{attempt}:0"
        return [
            (int(entry.split(b"-")[0]), dict(zip(values[::2], values[1::2], strict=True)))
            for entry, values in self.link.call("XRANGE", key, "-", "+")
        ]

    def tail(self, job_id: str, attempt: int = 1) -> bytes:
        return b"".join(fields.get(b"d", b"") for _, fields in self.log_entries(job_id, attempt))

    def whole_log(self, job_id: str) -> bytes:
        logs = orjson.loads(self.record(job_id).logs or b"{}")
        return self.store.read_bytes(logs["0"]["sha256"], MOST_BYTES) if logs else b""

    def log_runs(self, job_id: str) -> list[list[Any]]:
        logs = orjson.loads(self.record(job_id).logs)
        index = self.store.read_bytes(logs["0"]["index_sha256"], MOST_BYTES)
        return [orjson.loads(line) for line in index.splitlines()]

    def stream(self, job_id: str, name: str) -> bytes:
        """What a job wrote to one of its two streams, cut from the whole log by its index."""
        whole = self.whole_log(job_id)
        return b"".join(whole[at : at + n] for at, n, stream, _ in self.log_runs(job_id) if stream == name)

    def workers(self) -> dict[str, dict[str, str]]:
        """What the queue knows of its workers, by id."""
        names = self.link.call("ZRANGE", f"{self.queue.keys.root}workers", 0, -1)
        return {name.decode(): self.worker(name.decode()) for name in names}

    def worker(self, worker_id: str) -> dict[str, str]:
        flat = self.link.call("HGETALL", f"{self.queue.keys.root}worker:{worker_id}")
        texts = [value.decode(errors="replace") for value in flat]
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def online(self) -> int:
        return sum(1 for facts in self.workers().values() if facts.get("state") == "online")


def by_value(function: Callable[..., Any]) -> bytes:
    """A function's pickle that needs no module of the tests where it is called."""
    module = sys.modules.get(function.__module__)
    known = cloudpickle.list_registry_pickle_by_value()
    if module is None or not module.__name__.startswith("tests") or module.__name__ in known:
        return bytes(cloudpickle.dumps(function))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def decoded(kind: str, data: bytes) -> Any:
    if kind == "json":
        return orjson.loads(data)
    if kind == "pickle":
        return pickle.loads(data)
    if kind == "numpy":
        import numpy

        return numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    assert kind == "none", kind
    return None
