"""Looks at the devices anew for each line on its standard input, with the code that the probe's child runs.

`python -m tests.worker.nvml.look ROOT` prints one JSON document a line: the report, and the first Xid that is told. So
a test can go through hundreds of answers of the stand-in driver in one process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from gpulayer_worker.devices.facts import as_record
from gpulayer_worker.devices.recorded import Machine
from gpulayer_worker.devices.survey import Survey

XID_WAIT_MS = 10


def main() -> None:
    machine = Machine(Path(sys.argv[1]))
    for line in sys.stdin:
        survey = Survey(machine)
        report = survey.report()
        xid = next(survey.xids(XID_WAIT_MS), None) if line.strip() == "xids" else None
        print(json.dumps({"report": as_record(report), "xid": xid}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
