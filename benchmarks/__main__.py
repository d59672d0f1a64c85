"""Runs every benchmark, one after another.

    python -m benchmarks             with small sizes, in about two minutes: do they run, and roughly what comes out
    python -m benchmarks --record    with full sizes, in about ten: raw figures into benchmarks/results/<day>-<place>/,
                                     then the tables and charts of the documentation are made of them

A benchmark that fails does not keep the others from running; the exit code tells. Figures count only where the machine
does nothing else: its load at the start is kept with them, and the tables say when it was too high.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from benchmarks.common import LOAD_VARIABLE
from benchmarks.peers.environments import ROOT, environment

PEERS = ("dramatiq", "celery", "rq", "ray")
# Name, small sizes, full sizes. What says most comes first.
STEPS: tuple[tuple[str, str, str], ...] = (
    ("burst", "--repeats 1 --scale 0.2", "--repeats 5"),
    ("latency", "--repeats 1 --scale 0.2", "--repeats 5"),
    ("scale_test", "--workers 8 --runs 80", "--workers 30 --runs 480"),
    ("dramatiq_throughput", "--repeats 1 --messages 300", "--repeats 5 --messages 2000"),
    ("idle_traffic", "--seconds 5", "--seconds 30"),
    ("submit_queue", "--quick", ""),
)
COUNTS = {1: "one-core", 2: "two-cores", 4: "four-cores", 8: "eight-cores"}


def folder_name() -> str:
    """The day and the size of this machine."""
    cpus = os.cpu_count() or 1
    return f"{time.strftime('%Y-%m-%d')}-{COUNTS.get(cpus, f'{cpus}-cores')}"


def run(name: str, arguments: list[str]) -> bool:
    """Whether the benchmark came to its end."""
    print(f"\n== {name} {' '.join(arguments)}", flush=True)
    start = time.monotonic()
    code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], cwd=ROOT).returncode
    print(f"({time.monotonic() - start:.0f} s{'' if code == 0 else f', exit code {code}'})", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", action="store_true", help="full sizes, kept and shown in the documentation"
    )
    args = parser.parse_args()
    os.environ[LOAD_VARIABLE] = str(os.getloadavg()[0])
    for name in (*PEERS, "charts"):
        environment(name)
    good = []
    for name, small, full in STEPS:
        arguments = [*full.split(), "--save", folder_name()] if args.record else small.split()
        good.append(run(name, arguments))
    if args.record:
        good.append(
            subprocess.run([sys.executable, ROOT / "scripts" / "make_perf_charts.py"]).returncode == 0
        )
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
