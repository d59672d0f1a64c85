"""The stress run with devices: jobs of one to four GPUs of those that all workers of one machine share.

Each process of a job takes a lock of each device in its mask before its first line, and has it until it is gone: two
that hold one device at a time meet there, even when one of them is killed. Its lines say which devices it had, from
when until when, and the history of all of them is gone through afterwards.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.requirements import Requirements, build_requirements
from tests.reliability.stress import Stress
from tests.reliability.stress_jobs import Job
from tests.worker.nvml.scenario import Driver, Gpu, build_library

MOST = 4
TAKE = (
    "fd=3; for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do [ $gpu = -1 ] && continue; "
    'eval "exec $fd>{locks}/$gpu"; flock -n $fd || echo twice $GPULAYER_ATTEMPT $gpu >> {mark}; fd=$((fd+1)); done; '
    "echo begin $GPULAYER_ATTEMPT $$ $CUDA_VISIBLE_DEVICES $(date +%s%N) >> {mark}"
)
LEAVE = "echo end $GPULAYER_ATTEMPT $(date +%s%N) >> {mark}"


@dataclass(frozen=True)
class Hold:
    """One attempt's time with one device; the end is None where the attempt did not come to its end."""

    device: int
    begin_ns: int
    end_ns: int | None
    who: str


class DeviceStress(Stress):
    """All workers on one machine, which has so many GPUs."""

    def __init__(self, jobs: int, seed: int, folder: Path, patience_s: float, gpus: int = 8) -> None:
        super().__init__(jobs, seed, folder, patience_s)
        dice = random.Random(seed + 1)
        self._gpus = gpus
        self._wanted = {job.id: dice.choices(range(MOST + 1), (1, 3, 3, 2, 2))[0] for job in self.jobs}
        (folder / "devices").mkdir()
        driver = Driver(build_library(folder), folder / "scenario").show(*(Gpu(slot) for slot in range(gpus)))
        os.environ.update(driver.environment)

    def _worker_options(self, number: int) -> tuple[str, ...]:
        return ()

    def _needs(self, job: Job) -> Requirements | None:
        count = self._wanted[job.id]
        return build_requirements(accelerator="cuda", gpus=count) if count else None

    @property
    def _function(self) -> Callable[[str, int], list[int]]:
        return work_on_devices

    @property
    def _call(self) -> Callable[[str, int], list[int]]:
        return work_on_devices

    def _begin_and_end(self, mark: Path) -> tuple[str, str]:
        locks = self.folder / "devices"
        return TAKE.format(locks=locks, mark=mark), LEAVE.format(mark=mark)

    def _more_faults(self) -> list[str]:
        faults, holds = list[str](), list[Hold]()
        for job in self.jobs:
            text = (self.marks / job.id).read_text() if (self.marks / job.id).exists() else ""
            found, wrong = read_holds(job.id, text, self._wanted[job.id])
            holds, faults = holds + found, faults + wrong
        used = Counter(hold.device for hold in holds)
        self.report.notes.append(f"{len(holds)} devices granted, of {len(used)} GPUs")
        if len(used) < self._gpus:
            faults.append(f"only {sorted(used)} of {self._gpus} GPUs were ever granted")
        return faults + overlaps(holds)


def read_holds(job_id: str, text: str, wanted: int) -> tuple[list[Hold], list[str]]:
    """What a job wrote of its devices: each attempt's holds, and what must not be."""
    lines = [line.split() for line in text.split("\n")[:-1]]
    ends = {words[1]: int(words[2]) for words in lines if words[0] == "end"}
    faults = [
        f"{job_id}: device {words[2]} was held at attempt {words[1]}"
        for words in lines
        if words[0] == "twice"
    ]
    holds = []
    for _, attempt, _, mask, begin_ns in (words for words in lines if words[0] == "begin"):
        devices = [int(each) for each in mask.split(",") if each != "-1"]
        if len(set(devices)) != wanted:
            faults.append(f"{job_id}: attempt {attempt} has the devices {mask}, not {wanted}")
        who = f"{job_id} attempt {attempt}"
        holds += [Hold(device, int(begin_ns), ends.get(attempt), who) for device in devices]
    return holds, faults


def overlaps(holds: list[Hold]) -> list[str]:
    """Each device that was begun with while another had it."""
    by_device: dict[int, list[Hold]] = defaultdict(list)
    for hold in sorted(holds, key=lambda each: each.begin_ns):
        by_device[hold.device].append(hold)
    faults = []
    for device, ordered in by_device.items():
        last: Hold | None = None
        for hold in ordered:
            if last is not None and last.end_ns is not None and hold.begin_ns < last.end_ns:
                faults.append(f"device {device} went to {hold.who} while {last.who} had it")
            if last is None or (hold.end_ns or 0) >= (last.end_ns or 0):
                last = hold
    return faults


def work_on_devices(mark: str, number: int) -> list[int]:
    """The function of the jobs that are functions; it has its devices' locks until its process is gone."""
    import fcntl
    import os
    import time
    from pathlib import Path as Place

    attempt, mask = os.environ["GPULAYER_ATTEMPT"], os.environ["CUDA_VISIBLE_DEVICES"]
    with open(mark, "a") as file:
        for device in [each for each in mask.split(",") if each != "-1"]:
            lock = os.open(Place(mark).parent.parent / "devices" / device, os.O_WRONLY | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.write(f"twice {attempt} {device}\n")
        file.write(f"begin {attempt} {os.getpid()} {mask} {time.time_ns()}\n")
    time.sleep(number % 8 / 100)
    with open(mark, "a") as file:
        file.write(f"end {attempt} {time.time_ns()}\n")
    return [number, number**2]
