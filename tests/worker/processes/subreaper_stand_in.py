"""A worker that is a subreaper and whose fork server is killed: its job must be told as lost with nothing left.

Usage: subreaper_stand_in.py FOLDER, which holds `daemon.py` (see test_trees.py). Ends with 0 when no child is left.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpulayer_worker.processes.ending import become_subreaper, reap_strays
from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.job import JobProcess
from gpulayer_worker.runner import proctree


def main(folder: Path) -> int:
    become_subreaper()
    server = ForkServer(sys.executable, {}, after_loss=reap_strays)
    script = f"{sys.executable} {folder}/daemon.py {folder}/child; echo ready; exec sleep 1000"
    reader, writer = os.pipe()
    env = {"PATH": os.environ["PATH"]}
    handle = server.start(JobProcess("j1", ("sh", "-c", script), folder, env, stdout=writer, stderr=2))
    assert os.read(reader, 10) == b"ready\n"
    while not (folder / "child").exists() or not (folder / "child").read_text():
        os.sched_yield()

    os.kill(server.pid, signal.SIGKILL)

    assert handle.wait(60).lost
    return len(proctree.children(os.getpid()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
