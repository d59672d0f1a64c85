"""The process that asks the drivers: `python -m gpulayer_worker.devices.child [--once] [--root FOLDER]`.

It prints one JSON document a line: `listed` (what is there by the kernel's files), then `report`; afterwards `readings`
for each line on its standard input, and `xid` whenever a device tells of a critical error. It may hang in a driver at
any moment: whoever started it keeps the time. It ends when its standard input does, and at once if there is nothing to
watch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpulayer_worker.devices.facts import as_record
from gpulayer_worker.devices.recorded import Machine
from gpulayer_worker.devices.survey import Survey

XID_WAIT_MS = 1000

_printing = threading.Lock()
_told = sys.stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--once", action="store_true", help="end after the report")
    parser.add_argument("--root", type=Path, default=None, help="folder of a recorded machine")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _keep_the_answers_apart()
    asked = threading.Semaphore(0)
    if not args.once:
        threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    survey = Survey(Machine(args.root))
    _say("listed", as_record(survey.listed()))
    report = survey.report()
    _say("report", as_record(report))
    if args.once or not report.usable:
        return
    threading.Thread(target=_tell_xids, args=(survey,), daemon=True).start()
    while asked.acquire():
        _say("readings", [asdict(reading) for reading in survey.readings()])


def _keep_the_answers_apart() -> None:
    """What drivers and their libraries print goes to the standard error, not between the documents."""
    global _told
    _told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)


def _listen(asked: threading.Semaphore) -> None:
    """Apart from the drivers, so that the end of the worker is seen even while one hangs."""
    while os.read(0, 1):
        asked.release()
    os._exit(0)


def _tell_xids(survey: Survey) -> None:
    for uuid, code in survey.xids(XID_WAIT_MS):
        _say("xid", {"uuid": uuid, "code": code})


def _say(kind: str, content: Any) -> None:
    with _printing:
        _told.write(json.dumps({kind: content}) + "\n")
        _told.flush()


if __name__ == "__main__":
    main()
