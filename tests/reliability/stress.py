"""Many small jobs on a private set-up whose parts are killed at random: each ends exactly once, with its own result.

`python -m tests.reliability.stress --jobs 2000 --seed S` prints a summary, and exits with 1 where anything is lost,
doubled, wrong or left. The seed decides jobs and faults, not their timing. `--gpus 8`: see `device_stress.py`.

Killed (-9) are job processes, fork servers, workers, the supervisor and the queue server, each kind at least once. Each
job appends a line to a file of its own when an attempt begins and ends: many attempts, none twice, one end accepted.
Functions that are not tried again ride: their lanes are said to be quick all the time, also where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpulayer import private
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import GpulayerError, JobNotFound
from gpulayer_broker.folders import locate_folders
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.settings import Settings
from gpulayer_broker.spec import Spec, lane_of
from tests import checker
from tests.leaks import leaks
from tests.moves import strange_moves
from tests.reliability.history import History, account
from tests.reliability.nemesis import fork_servers, is_gone, job_processes, kill, processes_of
from tests.reliability.stress_jobs import KINDS, Job, Mark, Report, call, make_job, work
from tests.snapshot import read
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess

SETTINGS = Settings(lease_s=4, heartbeat_s=0.4, lease_grace_s=0.5, term_grace_s=1, lost_workers=1_000_000)
RETRIES = {"max_retries": 50, "min_backoff": 10, "max_backoff": 50}
PAUSE_S = 0.5
WEIGHTS = (50, 20, 18, 6, 6)
WORKERS = 3
CLIENT = "stress"


class Stress:
    """One run, in a folder of its own."""

    def __init__(self, jobs: int, seed: int, folder: Path, patience_s: float) -> None:
        self.report = Report(jobs, seed)
        self.folder, self.patience_s = folder, patience_s
        self.marks = folder / "marks"
        self.marks.mkdir()
        dice = random.Random(seed)
        self.jobs = [make_job(dice, number) for number in range(jobs)]
        self._dice = random.Random(dice.random())
        self._history = History(folder / "history.jsonl")
        self._workers: list[WorkerProcess] = []
        self._over = threading.Event()
        self._each_kind_killed = threading.Event()
        self._done: dict[str, list[str]] = {}
        self._lanes: set[str] = set()

    def run(self) -> Report:
        began = time.monotonic()
        self.desk = Desk(private.ensure_private(SETTINGS), "default", CLIENT)
        self.desk.queue.configure(SETTINGS)
        self._workers = [self._hire(number) for number in range(1, WORKERS)]
        try:
            for worker in self._workers:
                worker.settle()
            self._until_all_ended()
            self.report.took_s = time.monotonic() - began
            self._check()
        finally:
            self._clear_up()
        return self.report

    def _until_all_ended(self) -> None:
        threads = [self._thread(self._keep_up), self._thread(self._disturb), self._thread(self._submit)]
        try:
            self._watch()
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PATIENCE_S)

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._told(target), name=target.__name__, daemon=True)
        thread.start()
        return thread

    def _told(self, target: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                target()
            except Exception as error:  # noqa: BLE001 - a broken test must not pass for a quiet one
                self.report.faults.append(f"the test's {target.__name__} broke: {error!r}")

        return guarded

    # --- what goes on ---

    def _hire(self, number: int) -> WorkerProcess:
        log = self.folder / f"worker-{number}.log"
        endpoint = self.desk.endpoint
        return WorkerProcess(
            endpoint,
            "default",
            f"stress-{number}",
            log,
            *self._worker_options(number),
            slots=3,
            environment=SETTINGS.as_environment(),
        )

    def _worker_options(self, number: int) -> tuple[str, ...]:
        """Each on a machine of its own."""
        return ("--node", f"n{number}")

    def _needs(self, job: Job) -> Requirements | None:
        """What a job asks for, if it is anything but a CPU."""
        return None

    def _submit(self) -> None:
        """A client that is patient: what it does not know it submits again, under the same id."""
        desk = Desk(self.desk.endpoint, "default", CLIENT)
        for job in self.jobs:
            if job.number > len(self.jobs) // 2:
                self._each_kind_killed.wait(PAUSE_S)  # until then there is work to be killed
            needs = self._needs(job)
            spec, options = self._spec(job)
            while not self._over.is_set():
                with suppress(GpulayerError), self._history.call("submit", id=job.id):
                    lane = "" if job.retried else lane_of(spec)
                    self._lanes |= {lane} - {""}
                    desk.submit(spec, id=job.id, options=options, needs=needs, lane=lane, **self._gates(job))
                    break
        desk.close()

    def _gates(self, job: Job) -> dict[str, Any]:
        """Some jobs share a key, some come after the one before them, whatever became of it."""
        gates: dict[str, Any] = {"permit": "stress=3"} if job.number % 7 == 3 else {}
        if job.number % 11 == 5:
            gates |= {"after": (self.jobs[job.number - 1].id,), "after_policy": "ended"}
        return gates

    def _spec(self, job: Job) -> tuple[Spec, dict[str, Any]]:
        options = RETRIES if job.retried else {}
        mark = self.marks / job.id
        if job.kind == "function":
            return self.desk.function_spec(self._function, str(mark), job.number), options
        if job.kind in ("call", "quick"):
            isolation = "warm" if job.kind == "call" else "fresh"
            return self.desk.function_spec(self._call, str(mark), job.number, isolation=isolation), options
        begin, end = self._begin_and_end(mark)
        body = {
            "command": f"echo result {job.number}",
            "outputs": f"echo result {job.number} | tee $GPULAYER_OUTPUTS/file",
            "failing": f"echo result {job.number}; [ $GPULAYER_ATTEMPT -gt 1 ] || exit 1",
        }[job.kind]
        return self.desk.command_spec(
            "sh", "-c", f"{begin}; {body}; sleep 0.0{job.number % 8}; {end}"
        ), options

    @property
    def _function(self) -> Callable[[str, int], list[int]]:
        return work

    @property
    def _call(self) -> Callable[[str, int], list[int]]:
        return call

    def _begin_and_end(self, mark: Path) -> tuple[str, str]:
        """What a command does first and last."""
        return f"echo begin $GPULAYER_ATTEMPT $$ >> {mark}", f"echo end $GPULAYER_ATTEMPT >> {mark}"

    def _keep_up(self) -> None:
        """What an init system does for workers, and any command of the user for the private set-up."""
        link, root = Link(self.desk.endpoint), self.desk.queue.keys.root
        while not self._over.wait(0.1):
            for worker in self._workers:
                if not worker.alive:
                    worker.start()
                    self.report.restarts += 1
            with suppress(GpulayerError):
                private.ensure_private(SETTINGS)
                for lane in list(self._lanes):
                    link.call("SET", f"{root}lane:{lane}", "1000", "PX", 600_000)
        link.close()

    def _disturb(self) -> None:
        """Kills one of each kind, then whatever the dice say."""
        first = list(KINDS)
        while not self._over.wait(self._dice.uniform(0.05, 0.4)):
            kind = first[0] if first else self._dice.choices(KINDS, WEIGHTS)[0]
            victims = self._victims(kind)
            if not victims:
                continue
            victim = self._dice.choice(victims)
            if kill(victim):
                first = first[1:]
                if not first:
                    self._each_kind_killed.set()
                self.report.kills[kind] += 1
                self.report.killed_pids.add(victim)
                self._history.note(type="kill", what=kind, pid=victim)

    def _victims(self, kind: str) -> list[int]:
        if kind in ("server", "supervisor"):
            return _present(private.status(), kind)
        workers = [worker.pid for worker in self._workers if worker.alive] + _present(
            private.status(), "worker"
        )
        if kind == "worker":
            return workers
        find = fork_servers if kind == "fork server" else job_processes
        return [pid for worker in workers for pid in find(worker)]

    def _watch(self) -> None:
        """Reads the ends that the queue tells this client, until every job has one."""
        link, last, ids = Link(self.desk.endpoint), b"0-0", {job.id for job in self.jobs}
        key, heard = self.desk.queue.keys.done(CLIENT), time.monotonic()
        deadline = heard + self.patience_s
        while not ids <= set(self._done):
            if time.monotonic() > deadline:
                missing = sorted(ids - set(self._done))
                self.report.faults.append(f"{len(missing)} jobs without an end after all: {missing[:5]}")
                break
            with suppress(GpulayerError):
                for _, entries in (
                    link.block("XREAD", "BLOCK", 500, "STREAMS", key, last, timeout_s=0.5) or []
                ):
                    self.report.standstill_s = max(self.report.standstill_s, time.monotonic() - heard)
                    heard, last = time.monotonic(), entries[-1][0]
                    for _, values in entries:
                        told = dict(zip(values[::2], values[1::2], strict=True))
                        self._done.setdefault(told[b"job"].decode(), []).append(told[b"state"].decode())
        link.close()

    # --- what must hold ---

    def _check(self) -> None:
        faults = self.report.faults
        private.ensure_private(SETTINGS)
        present = set()
        for job in self.jobs:
            try:
                faults += self._judge(job)
                present.add(job.id)
            except JobNotFound:
                faults.append(f"{job.id} is lost")
        faults += account(self._history.lines(), present)
        faults += self._still_held()
        faults += self._more_faults()
        place = self.desk.link, self.desk.queue.keys.root
        faults += checker.violations(read(*place)) + leaks(*place) + strange_moves(*place)

    def _judge(self, job: Job) -> list[str]:
        record = self.desk.record(job.id)
        self.report.states[record.state] += 1
        self.report.attempts += record.attempt
        self.report.losses += record.losses
        marks = self._marks(job)
        begun = [attempt for word, attempt, _ in marks if word == "begin"]
        out = [f"{job.id}: attempt {a} ran {n} times" for a, n in Counter(begun).items() if n > 1]
        ends = self._done.get(job.id, [])
        if len(ends) != 1 or ends[0] != record.state:
            out.append(f"{job.id} is {record.state}, and told were {ends}")
        if begun and max(begun) > record.attempt:
            out.append(f"{job.id}: attempt {max(begun)} ran, the record knows {record.attempt}")
        if record.state == "succeeded":
            return out + self._wrong_result(job, record.attempt, marks)
        if not self._was_killed(job, record.end_reason, record.attempt, marks):
            out.append(f"{job.id} ({job.kind}) is {record.state}: {record.end_reason} {record.error!r}")
        return out

    def _was_killed(self, job: Job, reason: str, attempt: int, marks: list[Mark]) -> bool:
        """Whether a job that ended by a signal is one of those that this test killed, known by its process id."""
        if reason != "signal" or job.retried:
            return False
        pids = {pid for word, number, pid in marks if (word, number) == ("begin", attempt)}
        # One that was killed before its first line has no number to be known by.
        return bool(pids & self.report.killed_pids) if pids else self.report.kills["job"] > 0

    def _wrong_result(self, job: Job, attempt: int, marks: list[Mark]) -> list[str]:
        out = []
        if ("end", attempt) not in [(word, number) for word, number, _ in marks]:
            out.append(f"{job.id} succeeded at attempt {attempt}, which never came to its end")
        if job.kind in ("function", "call", "quick"):
            value = self.desk.value(job.id)
            return out if value == [job.number, job.number**2] else [*out, f"{job.id} returned {value!r}"]
        if self.desk.whole_log(job.id) != job.words:
            out.append(f"{job.id} has the log {self.desk.whole_log(job.id)!r}")
        if job.kind == "outputs" and self.desk.output(job.id, "outputs/file") != job.words:
            out.append(f"{job.id} has wrong outputs")
        return out

    def _marks(self, job: Job) -> list[Mark]:
        path = self.marks / job.id
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        words = [line.split() for line in lines]
        return [(w[0], int(w[1]), int(w[2]) if len(w) > 2 else 0) for w in words]

    def _more_faults(self) -> list[str]:
        """What else must hold, in a kind of run that has more to it."""
        return []

    def _still_held(self) -> list[str]:
        """The ledger is full again: nothing is held, leased, running or open."""
        root = self.desk.queue.keys.root
        names = [key.decode()[len(root) :] for key in self.desk.link.call("KEYS", f"{root}*")]
        holders = (
            "held:",
            "device:",
            "running:",
            "queue:",
            "heads:",
            "waiting:",
            "permits:",
            "rides",
            "key:",
            "after:",
        )
        held = [n for n in names if n.startswith(holders)]
        return [
            f"{name} is still there"
            for name in [*held, *({"leases", "owners", "sigjobs", "delayed"} & set(names))]
        ]

    def _all_at_work(self) -> bool:
        """Whether each worker that lives is known to the queue: before that it clears what its last life left."""
        with suppress(GpulayerError):
            private.ensure_private(SETTINGS)
            alive = {worker.pid for worker in self._workers} | {*_present(private.status(), "worker")}
            told = {
                json.loads(facts.get("info") or "{}").get("pid") for facts in self.desk.workers().values()
            }
            return len(alive) == WORKERS and alive <= told
        return False

    def _clear_up(self) -> None:
        """Stops all; no process and no job's folder may be left, also not of workers that were killed last."""
        for worker in self._workers:
            if not worker.alive:
                worker.start()
        try:
            wait_until(self._all_at_work, PATIENCE_S, "all workers have cleared up what was left to them")
        except AssertionError as error:
            self.report.faults.append(str(error))
        for worker in self._workers:
            worker.end()
        state = locate_folders().state
        private.release_private()
        private.down()
        faults = self.report.faults
        faults += [f"process {pid} is left" for pid in processes_of(str(state)) if not is_gone(pid)]
        faults += [f"folder {path} is left" for path in state.glob("workers/*/scratch/*")]
        self.desk.close()
        self._history.close()


def _present(status: Mapping[str, Any], part: str) -> list[int]:
    facts = status[part]
    return [] if facts is None else [int(facts["pid"])]


@contextmanager
def own_state() -> Iterator[Path]:
    """A folder for everything of a run, and an environment in which the private set-up lives there."""
    folder = Path(tempfile.mkdtemp(prefix="gpl-", dir="/tmp"))
    before = dict(os.environ)
    for name, part in (
        ("GPULAYER_STATE_DIR", "state"),
        ("XDG_RUNTIME_DIR", "run"),
        ("XDG_CONFIG_HOME", "config"),
    ):
        (folder / part).mkdir(mode=0o700)
        os.environ[name] = str(folder / part)
    os.environ.update(SETTINGS.as_environment())
    try:
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--gpus", type=int, default=0, help="so many stand-ins, which jobs of 1 to 4 share")
    parser.add_argument(
        "--patience", type=float, default=1800, help="seconds until jobs without an end are given up"
    )
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with own_state() as folder:
        kind: Callable[..., Stress] = Stress
        if args.gpus:
            from tests.reliability.device_stress import DeviceStress

            kind = partial(DeviceStress, gpus=args.gpus)
        report = kind(args.jobs, args.seed, folder, args.patience).run()
    print(report.text())
    if report.faults:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
