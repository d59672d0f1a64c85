"""The stress run, small and with a fixed seed: see `stress.py`; `make stress` runs the large one."""

from __future__ import annotations

import pytest

from tests.reliability.stress import Stress, own_state

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 300


def test_every_job_ends_once_while_every_part_is_killed() -> None:
    with own_state() as folder:
        report = Stress(200, 5, folder, patience_s=PATIENCE_S).run()
    print(report.text())
    assert report.faults == []
    assert sum(report.kills.values()) >= 5
