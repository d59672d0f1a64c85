"""`gpulayer worker`, `worker start`, `stop` and `drain`: workers of this machine for a queue.

A worker in the foreground replaces this process, so that signals reach it alone. One in the background is a session of
its own, which outlives the terminal; its words go to a file beside its state.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say
from gpulayer_broker.errors import ConfigError, UnknownName, UsageError

if TYPE_CHECKING:
    from gpulayer_broker.folders import Folders
    from gpulayer_broker.workers import WorkerRecord

START_S = 30.0
# Workers that were started from here go on when this process ends: nobody is to clean up after them.
_started: list[subprocess.Popen[bytes]] = []
POLL_S = 0.05

Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="The worker's name (the host's).")]
Named = Annotated[str | None, typer.Argument(metavar="NAME", help="The worker's name (the host's).")]
Slots = Annotated[
    int | None, typer.Option("--slots", metavar="N", help="How many CPUs its jobs may take (all).", min=1)
]
Gpus = Annotated[
    str | None, typer.Option("--gpus", metavar="LIST", help="GPUs to offer: 0,1, UUIDs, or none (all).")
]
GpuShare = Annotated[
    int | None, typer.Option("--gpu-share", metavar="N", help="So many jobs share each GPU (1).", min=1)
]
PythonPath = Annotated[
    str | None, typer.Option("--python", metavar="PATH", help="The Python that runs jobs (this one).")
]
Labels = Annotated[
    list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label that jobs can ask for.")
]


def run_worker(
    context: typer.Context,
    name: Name = None,
    slots: Slots = None,
    gpus: Gpus = None,
    gpu_share: GpuShare = None,
    python: PythonPath = None,
    label: Labels = None,
    redis: opt.RedisOption = None,
) -> None:
    """Take jobs from a queue, in the foreground; without a subcommand. --redis URL needs nothing else.

    One Ctrl-C ends it when what runs has ended, a second one hands that back at once.

    Example: gpulayer worker --redis redis://queue:6379/0 --label zone=eu
    """
    if context.invoked_subcommand is not None:
        return
    command, environment = _command(redis, name, slots, gpus, gpu_share, python, label)
    os.execve(command[0], command, environment)


def start_worker(
    name: Named = None,
    slots: Slots = None,
    gpus: Gpus = None,
    gpu_share: GpuShare = None,
    python: PythonPath = None,
    label: Labels = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Start a worker in the background; returns when it takes jobs.

    Example: gpulayer worker start beta --redis redis://queue:6379/0 --slots 4
    """
    name = name or socket.gethostname()
    command, environment = _command(redis, name, slots, gpus, gpu_share, python, label)
    folders = _folders()
    if _pid(folders, name) is not None:
        raise ConfigError(f"a worker named '{name}' already runs here: give this one another name")
    log = folders.state / f"worker-{Path(name).name}.log"
    with open(log, "ab") as words:
        begin = words.tell()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )
    _started.append(process)
    _until_online(process, redis, name, log, begin)
    if json:
        print_json({"schema": 1, "name": name, "pid": process.pid, "log": str(log)})
    else:
        say(
            f"worker {name} takes jobs (pid {process.pid}); gpulayer worker stop {name} ends it; its log: {log}"
        )
    return 0


def stop_worker(
    name: Named = None,
    now: Annotated[bool, typer.Option("--now", help="Hand back what runs instead of finishing it.")] = False,
    json: opt.JsonOption = False,
) -> int:
    """Stop a worker of this machine; returns when what it runs has ended.

    Example: gpulayer worker stop beta
    """
    name = name or socket.gethostname()
    folders = _folders()
    pid = _pid(folders, name)
    if pid is None:
        raise UnknownName(
            f"no worker named '{name}' runs here: gpulayer worker status lists them", value=name
        )
    _refuse_private(folders, name)
    from gpulayer_broker.locks import is_held

    say(f"worker {name} (pid {pid}) finishes what it runs") if not now else None
    _signal(pid)
    while is_held(folders.worker_lock(name)):
        time.sleep(POLL_S)
        if now:
            _signal(pid)
    if json:
        print_json({"schema": 1, "name": name, "pid": pid, "state": "stopped"})
    else:
        say(f"worker {name} has stopped")
    return 0


def drain_worker(
    name: Named = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take jobs again.")] = False,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Let a worker finish what it runs and take nothing new, wherever it is, until --undo or its next start.

    Example: gpulayer worker drain beta
    """
    from gpulayer_broker import functions

    with opt.open_client(target, redis) as client:
        found = _named(client.workers(), name or socket.gethostname())
        state = "online" if undo else "draining"
        client._session.attempt(lambda queue: queue.run(functions.drain(found.id, state)))
    if json:
        print_json(
            {"schema": 1, "id": found.id, "name": found.name, "state": state, "jobs": list(found.running)}
        )
    else:
        say(
            f"worker {found.name} is {state}"
            + (f", {len(found.running)} jobs run on it" if found.running else "")
        )
    return 0


def _named(workers: list[WorkerRecord], name: str) -> WorkerRecord:
    found = [worker for worker in workers if name in (worker.name, worker.id)]
    if not found:
        raise UnknownName.among("worker", name, [worker.name for worker in workers])
    return found[0]


# How a worker is begun ----------------------------------------------------------------------------------------------


def _command(
    redis: str | None,
    name: str | None,
    slots: int | None,
    gpus: str | None,
    gpu_share: int | None,
    python: str | None,
    labels: list[str] | None,
) -> tuple[list[str], dict[str, str]]:
    """The worker's own command line, and its environment, which has the address: `ps` shows it to nobody else."""
    from gpulayer.targets import resolve_target
    from gpulayer_broker import arguments

    target = resolve_target(redis=redis)
    if target.url is None:
        raise UsageError(
            "a worker needs a queue: give --redis URL (the private set-up has a worker of its own)"
        )
    words = arguments.Wording(True)
    arguments.labels(words, labels)
    if name is not None:
        arguments.worker_name(words, name)
    given: dict[str, Any] = {
        "--namespace": target.settings.namespace,
        "--name": name,
        "--slots": slots,
        "--gpus": gpus,
        "--gpu-share": gpu_share,
        "--python": python,
    }
    options = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    options += [part for text in labels or () for part in ("--label", text)]
    command = [sys.executable, "-P", "-m", "gpulayer_worker", *options]
    return command, {**os.environ, "GPULAYER_REDIS_URL": target.url}


def _until_online(
    process: subprocess.Popen[bytes], redis: str | None, name: str, log: Path, begin: int
) -> None:
    """Returns when the queue knows the worker; ConfigError with its last words if it ends before."""
    end = time.monotonic() + START_S
    with opt.open_client(None, redis) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                words = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
                raise ConfigError(
                    f"the worker did not start: {words[-1] if words else 'it said nothing'} ({log})"
                )
            online = [one for one in client.workers() if one.name == name and one.state == "online"]
            if any(one.info.get("pid") == process.pid for one in online):
                return
            time.sleep(POLL_S)
    raise ConfigError(
        f"the worker (pid {process.pid}) has not joined the queue within {START_S:g} s: see {log}"
    )


def _folders() -> Folders:
    from gpulayer_broker.folders import locate_folders

    return locate_folders().create()


def _pid(folders: Folders, name: str) -> int | None:
    from gpulayer_broker.locks import holder_pid

    return holder_pid(folders.worker_lock(name))


def _refuse_private(folders: Folders, name: str) -> None:
    from gpulayer.private import worker_name
    from gpulayer_broker.locks import is_held

    if name == worker_name() and is_held(folders.supervisor_lock):
        raise UsageError(
            f"worker '{name}' belongs to the private set-up, which would start it again: gpulayer down"
        )


def _signal(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
