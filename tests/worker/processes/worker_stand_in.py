"""A worker of its own process, for tests that stop or kill it: starts one job, prints pids, sleeps.

Usage: worker_stand_in.py FOLDER LEASE_S SCRIPT [hold] [line]. It prints the pid of its fork server once the job runs;
with `line`, once another that would write the file `behind` is lined up after it.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from gpulayer_worker.processes.ending import become_subreaper, lease_clock_s
from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.job import JobProcess


def main(folder: str, lease_s: float, script: str, hold: bool, line: bool) -> None:
    become_subreaper()
    server = ForkServer(sys.executable, {})
    job = JobProcess(
        id=f"j1-{os.getpid()}",
        work=("sh", "-c", script),
        cwd=Path(folder),
        env={"PATH": os.environ["PATH"], "GPULAYER_SCRATCH": folder},
        stdout=1,
        stderr=2,
        lease_until_s=lease_clock_s() + lease_s,
    )
    if hold:
        # Something that the worker forked without an exec, and that therefore holds its end of the socket.
        holder = os.fork()
        if holder == 0:
            signal.pause()
        Path(folder, "holder").write_text(f"{holder}\n")
    server.start(job).started.result(60)
    if line:
        behind = ("sh", "-c", "echo began > behind")
        server.start(replace(job, id=f"j2-{os.getpid()}", work=behind, after=job.id))
        server.stats()
    print(server.pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], hold="hold" in sys.argv, line="line" in sys.argv)
