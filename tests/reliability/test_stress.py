"""The stress runs, small and with a fixed seed: see `stress.py`; `make stress` runs the large ones."""

from __future__ import annotations

import pytest

from tests.reliability.device_stress import DeviceStress, Hold, overlaps, read_holds
from tests.reliability.stress import Stress, own_state
from tests.reliability.stress_jobs import KINDS

pytestmark = pytest.mark.timeout(600)
PATIENCE_S = 300


def test_every_job_ends_once_while_every_part_is_killed() -> None:
    with own_state() as folder:
        report = Stress(200, 5, folder, patience_s=PATIENCE_S).run()
    print(report.text())
    assert report.faults == []
    assert set(report.kills) == set(KINDS)


@pytest.mark.rule_04
@pytest.mark.rule_05
def test_no_device_is_granted_twice_while_every_part_is_killed() -> None:
    with own_state() as folder:
        report = DeviceStress(100, 5, folder, patience_s=PATIENCE_S, gpus=8).run()
    print(report.text())
    assert report.faults == []
    assert set(report.kills) == set(KINDS)


def test_a_device_that_two_have_at_a_time_is_seen_in_their_lines() -> None:
    first, wrong = read_holds("j_1", "begin 1 7 0,2 100\nend 1 200\n", 2)
    second, also = read_holds("j_2", "begin 1 8 2 150\nbegin 2 9 2 250\nend 2 300\n", 1)

    assert wrong == also == []
    assert first[1] == Hold(2, 100, 200, "j_1 attempt 1")
    assert overlaps([*first, *second]) == ["device 2 went to j_2 attempt 1 while j_1 attempt 1 had it"]
    assert overlaps([*first, *second[1:]]) == []
    assert read_holds("j_3", "twice 1 4\nbegin 1 7 4 100\n", 2)[1] == [
        "j_3: device 4 was held at attempt 1",
        "j_3: attempt 1 has the devices 4, not 2",
    ]
