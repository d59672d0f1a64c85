"""Chooses and keeps fork servers: one for each Python, start environment and set of imports that jobs ask for.

Servers start when first needed, are replaced when they have died, and end when nobody has used them for a while; of
idle ones only a few are kept. Commands all go to one server of the worker's own Python, for which nothing matters but
the exec.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from .fork_server import ForkServer, ForkServerGone
from .job import FunctionCall, JobHandle, JobProcess

KEPT_SERVERS = 4
IDLE_S = 600.0
TRIES = 3
# It needs /proc, subreapers and death signals.
HAS_FORK_SERVER = sys.platform == "linux"

READ_AT_EXEC = ("LD_", "DYLD_", "MALLOC_", "GLIBC_TUNABLES", "PYTHON", "LANG", "LC_")
# What the job's child sets for itself after the fork. PYTHONPATH among them: the fork server never imports
# the user's own code.
SET_AFTER_FORK = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "HOME",
    "PYTHONPATH",
    "PWD",
    "OLDPWD",
)
# The same for nearly all functions of a worker: a fork server that has them already spares each child the setting.
USUAL = (
    "PATH",
    "XDG_CACHE_HOME",
    "HF_HOME",
    "TORCH_HOME",
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPULAYER_ATTEMPT",
    "GPULAYER_ACCELERATOR",
    "GPULAYER_GPUS",
    "GPULAYER_CACHE",
    "GPULAYER_RESUME",
    "GPULAYER_RANK",
    "GPULAYER_WORLD_SIZE",
    "GPULAYER_NODES",
    "GPULAYER_NODE_RANK",
)


@dataclass(frozen=True)
class Key:
    """What a fork server is started with; jobs that agree in it share one."""

    python: str
    env: frozenset[tuple[str, str]]
    preload: frozenset[str]


class CannotFollow(Exception):
    """What a job is to begin after is in the hands of another fork server, and not gone."""


class Server(Protocol):
    """What the pool needs of a fork server."""

    @property
    def alive(self) -> bool: ...

    @property
    def busy(self) -> int: ...

    def start(self, job: JobProcess) -> JobHandle: ...

    def close(self) -> None: ...


class Pool:
    """Starts jobs; safe to use from any thread.

    `fallback_path` is the folder of `bundle.py`, `scratch_root` the one that marks this worker's processes,
    `after_loss` runs when a fork server has died and before its jobs are reported as lost.
    """

    def __init__(
        self,
        fallback_path: tuple[str, ...] = (),
        scratch_root: str = "",
        after_loss: Callable[[], object] | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._fallback_path = fallback_path
        self._scratch_root = scratch_root
        self._after_loss = after_loss
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._servers: dict[Key, Server] = {}
        self._used_s: dict[Key, float] = {}
        self._closed = False

    def start(self, job: JobProcess, after: JobHandle | None = None) -> JobHandle:
        """Hands a job to the fork server that fits it, to begin when nothing is left of the other; CannotFollow."""
        key = key_of(job)
        for _ in range(TRIES):
            try:
                server = self._server(key, job)
                if after is not None and not (after.is_kept_by(server) or after.gone.done()):
                    raise CannotFollow(f"{after.id} is not gone, and {job.id} needs another fork server")
                return server.start(job)
            except ForkServerGone as gone:
                failure = gone
        raise failure

    @property
    def can_line_up(self) -> bool:
        """Whether a job can be handed over that begins after another."""
        return HAS_FORK_SERVER

    @property
    def jobs(self) -> int:
        """How many jobs are not gone yet."""
        with self._lock:
            return sum(server.busy for server in self._servers.values())

    def tidy(self) -> None:
        """Ends servers that are dead, idle for too long, or too many; to be called now and then."""
        now_s = time.monotonic()
        with self._lock:
            idle = [key for key, server in self._servers.items() if not server.busy]
            idle.sort(key=lambda key: self._used_s[key])
            surplus = max(0, len(self._servers) - KEPT_SERVERS)
            old = {
                key
                for key in idle
                if now_s - self._used_s[key] > self._idle_s or not self._servers[key].alive
            }
            ending = [self._servers.pop(key) for key in old | set(idle[:surplus])]
        for server in ending:
            server.close()

    def close(self) -> None:
        """Ends all jobs and all servers; returns when they are gone."""
        with self._lock:
            self._closed = True
            servers = list(self._servers.values())
            self._servers.clear()
        for server in servers:
            server.close()

    def _server(self, key: Key, job: JobProcess) -> Server:
        with self._lock:
            if self._closed:
                raise ForkServerGone("the worker starts no more jobs")
            server = self._servers.get(key)
            if server is None or not server.alive:
                server = self._servers[key] = self._launch(key, job)
            self._used_s[key] = time.monotonic()
            return server

    def _launch(self, key: Key, job: JobProcess) -> Server:
        env = dict(key.env)
        if isinstance(job.work, FunctionCall) and not key.preload:
            env |= {name: job.env[name] for name in USUAL if name in job.env}
        if self._scratch_root:
            # The mark by which `ending.clear_leftovers` knows the processes of a worker that was killed.
            env["GPULAYER_SCRATCH"] = self._scratch_root
        return launch(key.python, env, key.preload, self._fallback_path, self._after_loss)


def key_of(job: JobProcess) -> Key:
    """The key of the fork server that a job needs."""
    if isinstance(job.work, tuple):
        return Key(sys.executable, frozenset(), frozenset())
    env = environment_for(job.env, job.preload)
    return Key(job.python or sys.executable, frozenset(env.items()), job.preload)


def environment_for(env: Mapping[str, str], preload: frozenset[str]) -> dict[str, str]:
    """The part of a job's environment that its fork server must have been started with.

    With imports that is all of it but what differs between any two jobs: libraries read their settings when
    they are imported. Without, only what the interpreter itself and the loader read at their start.
    """
    return {name: env[name] for name in _names_for(tuple(env), bool(preload))}


# The environments of most jobs have the same names.
@lru_cache(maxsize=64)
def _names_for(names: tuple[str, ...], with_imports: bool) -> tuple[str, ...]:
    shared = (name for name in names if not is_the_jobs_own(name))
    return tuple(name for name in shared if with_imports or name.startswith(READ_AT_EXEC))


def is_the_jobs_own(name: str) -> bool:
    """Whether a variable is set for each job after its fork, and matters to nothing before."""
    return name in SET_AFTER_FORK or name.startswith("GPULAYER_")


def launch(
    python: str,
    env: Mapping[str, str],
    preload: frozenset[str],
    fallback_path: tuple[str, ...],
    after_loss: Callable[[], object] | None,
) -> Server:
    """A fork server where the system has what it takes, else a starter that spawns."""
    if HAS_FORK_SERVER:
        return ForkServer(python, env, preload, fallback_path, after_loss)
    from .spawn import SpawnStarter

    return SpawnStarter(python, fallback_path)
