"""One job's processes: what is to be started, the handle on what was, and how it ended.

A handle is safe to use from any thread. What it tells is told by the thread that watches over the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .told import Told

DEFAULT_UMASK = 0o022


@dataclass(frozen=True)
class FunctionCall:
    """A pickled function, its pickled (args, kwargs), the Python that pickled both, and results of other jobs.

    The two pickles are bytes, which go to the process as they are, or, where they are large, files.
    """

    function: bytes | Path
    arguments: bytes | Path
    python: tuple[int, int, int]
    payload: str | Path
    name: str = "function"
    protocol: int = 5
    result_limit_bytes: int | None = None
    given: str | Path | None = None

    def as_message(self) -> dict[str, Any]:
        """The form in which the runner takes it; its `inline` parts are the blobs, in this order."""
        parts = {"function": self.function, "arguments": self.arguments}
        return {
            **{name: str(part) for name, part in parts.items() if isinstance(part, Path)},
            "inline": [name for name, part in parts.items() if isinstance(part, bytes)],
            "python": list(self.python),
            "payload": str(self.payload),
            "name": self.name,
            "protocol": self.protocol,
            "result_limit_bytes": self.result_limit_bytes,
            **({"given": str(self.given)} if self.given else {}),
        }

    @property
    def blobs(self) -> list[bytes]:
        """The parts that are bytes."""
        return [part for part in (self.function, self.arguments) if isinstance(part, bytes)]


@dataclass(frozen=True)
class WarmWork:
    """A process that serves many calls; the descriptors are its ends of the three channels to the worker."""

    requests: int
    replies: int
    progress: int

    @property
    def channels(self) -> dict[str, int]:
        return {"requests": self.requests, "replies": self.replies, "progress": self.progress}


@dataclass(frozen=True)
class JobProcess:
    """What to start. `work` is an argument vector, a function or a warm process; `env` is the whole environment.

    `id` names the process on this machine, for all workers and for all time: job, attempt and rank belong into it.

    `on_running` is called, quickly, by the thread that watches over it, unless the job is over by then.

    `stdout` and `stderr` are descriptors of the caller, who may close them as soon as `start` has returned.
    `python` and `preload` do not matter to commands. The lease is a moment of `lease_clock_s`. `cgroups` are the
    folders of the control group that the main process enters before it runs anything of the user's. `after` is the id
    of another process of the same fork server: this one begins when nothing is left of that.
    """

    id: str
    work: tuple[str, ...] | FunctionCall | WarmWork
    cwd: str | Path
    env: Mapping[str, str]
    stdout: int
    stderr: int
    python: str = ""
    preload: frozenset[str] = frozenset()
    umask: int = DEFAULT_UMASK
    lease_until_s: float | None = None
    on_progress: Callable[[dict[str, float]], None] | None = None
    on_running: Callable[[], object] | None = None
    cgroups: tuple[str, ...] = ()
    after: str = ""
    is_quick: bool = False


@dataclass(frozen=True)
class Usage:
    """What a job's main process, and the children it waited for, have used."""

    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """What the job said of its end: the header, and the payload or the file that holds it."""

    header: Mapping[str, Any]
    payload: bytes = b""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return bool(self.header.get("ok"))

    def read_payload(self) -> bytes:
        """The payload, from wherever it is."""
        file = self.header.get("file")
        return Path(file).read_bytes() if file else self.payload


@dataclass(frozen=True)
class Exit:
    """How the main process ended, and how long it ran, where that is known."""

    code: int | None
    signal: int | None
    usage: Usage = field(default_factory=Usage)
    wall_s: float | None = None


@dataclass(frozen=True)
class Ending:
    """How a job ended, told when nothing of its tree is left.

    `lost`: what watched over the job died, so `exit` is unknown; a report that came before is kept.
    `refused`: the job never began, and why (with `lost`: it was never handed over). `expired`: it was killed
    because its lease passed. `strays`: what outlived the main process and was ended.
    """

    exit: Exit | None
    report: Report | None = None
    strays: tuple[str, ...] = ()
    expired: bool = False
    lost: bool = False
    refused: str | None = None


class Keeper(Protocol):
    """What a handle asks to act on its job."""

    def end(self, handle: JobHandle, grace_s: float) -> None: ...

    def kill(self, handle: JobHandle) -> None: ...

    def recall(self, handle: JobHandle) -> None: ...

    def interrupt(self, handle: JobHandle) -> None: ...

    def extend_lease(self, handle: JobHandle, until_s: float | None) -> None: ...


class JobHandle:
    """A job that was handed over: what is told of it (`started`: its pid, `exited`, `gone`) and can be done to it."""

    def __init__(self, job: JobProcess, keeper: Keeper) -> None:
        self.job = job
        self.started: Told[int] = Told()
        self.exited: Told[Exit | None] = Told()
        self.gone: Told[Ending] = Told()
        self._keeper = keeper

    @property
    def id(self) -> str:
        """The id under which the job was started."""
        return self.job.id

    def is_kept_by(self, keeper: object) -> bool:
        """Whether it was handed to this one."""
        return self._keeper is keeper

    def wait(self, timeout_s: float | None = None) -> Ending:
        """How the job ended, once nothing of it is left; TimeoutError."""
        return self.gone.result(timeout_s)

    def end(self, grace_s: float) -> None:
        """TERM to the whole tree now, KILL to what is left after the grace."""
        self._keeper.end(self, grace_s)

    def kill(self) -> None:
        """KILL to the whole tree."""
        self._keeper.kill(self)

    def recall(self) -> None:
        """Takes the job back if it has not begun: then it is gone, refused."""
        self._keeper.recall(self)

    def interrupt(self) -> None:
        """INT to the whole tree, as by Ctrl-C in a terminal; what becomes of it is the job's own affair."""
        self._keeper.interrupt(self)

    def extend_lease(self, until_s: float | None) -> None:
        """Moves the moment at which the job is killed unless the lease is renewed; None: it has no lease now."""
        self._keeper.extend_lease(self, until_s)

    def resolve(self, ending: Ending) -> None:
        """Called by the keeper, once: tells all who wait."""
        if not self.started.done():
            self.started.fail(RuntimeError(ending.refused or "the job was lost before it began"))
        self.exited.tell(ending.exit)
        self.gone.tell(ending)


def work_message(work: tuple[str, ...] | FunctionCall | WarmWork) -> dict[str, Any]:
    """What a job is to do, in the form in which the runner takes it."""
    if isinstance(work, FunctionCall):
        return {"kind": "function", "call": work.as_message()}
    if isinstance(work, WarmWork):
        return {"kind": "warm"}
    return {"kind": "command", "argv": list(work)}
