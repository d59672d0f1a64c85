"""What a worker reckons from a reading: who stands in the way, how much is left, what its machine is called."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from gpulayer_broker.availability import IDLE_GPU_MEMORY_BYTES
from gpulayer_broker.errors import UsageError
from gpulayer_broker.units import GIB, MIB
from gpulayer_worker.devices.facts import Device, Process, Reading, Report, as_record, report_of
from gpulayer_worker.devices.selection import Selection
from gpulayer_worker.devices.use import judge
from gpulayer_worker.hardware import is_ours, rounded

CARD = Device(0, "cuda", "Tesla T4", "GPU-a", "0000:04:00.0", 15 * GIB)
OTHER = Device(1, "cuda", "Tesla T4", "GPU-b", "0000:05:00.0", 15 * GIB)
HUGE = Device(0, "cuda", "NVIDIA H200", "GPU-h", "0000:04:00.0", 141 * GIB)
OURS, STRANGER, ANOTHER, HIDDEN = os.getpid(), 1, os.getppid(), 1 << 30


def ours(pid: int) -> bool:
    return pid == OURS


def reading(used_bytes: int, *processes: Process, device: Device = CARD) -> Reading:
    return Reading(device.uuid, used_bytes, device.memory_bytes - used_bytes, 0, processes)


# --- who stands in the way ---


def test_the_largest_foreign_process_is_named() -> None:
    use = judge(
        CARD,
        reading(6 * GIB, Process(STRANGER, "small", GIB), Process(ANOTHER, "large", 5 * GIB)),
        ours,
        False,
    )

    assert use.foreign == (ANOTHER, "large", 5 * GIB)


def test_small_processes_that_are_much_together_stand_in_the_way() -> None:
    crowd = [Process(STRANGER + n, f"p{n}", 300 * MIB) for n in range(3)]

    assert judge(CARD, reading(900 * MIB, *crowd), ours, False).foreign is not None
    assert judge(CARD, reading(300 * MIB, crowd[0]), ours, False).foreign is None


def test_our_own_jobs_do_not_stand_in_the_way_nor_take_from_what_is_left() -> None:
    use = judge(CARD, reading(9 * GIB, Process(OURS, "python", 9 * GIB)), ours, True)

    assert use.foreign is None
    assert use.free_bytes == CARD.memory_bytes


def test_what_somebody_else_uses_is_not_left_for_jobs() -> None:
    use = judge(CARD, reading(400 * MIB, Process(STRANGER, "Xorg", 400 * MIB)), ours, False)

    assert use.foreign is None
    assert use.free_bytes == CARD.memory_bytes - 400 * MIB + 400 * MIB
    assert judge(CARD, Reading("GPU-a", GIB, 13 * GIB, 0, ()), ours, True).free_bytes == (
        14 * GIB + IDLE_GPU_MEMORY_BYTES
    )


def test_a_pid_of_another_namespace_is_ours_while_our_job_has_the_device() -> None:
    hidden = reading(4 * GIB, Process(HIDDEN, "unknown", 4 * GIB))

    assert judge(CARD, hidden, ours, True).foreign is None
    assert judge(CARD, hidden, ours, False).foreign == (HIDDEN, "unknown", 4 * GIB)


def test_a_process_whose_memory_is_hidden_is_named_with_what_the_card_says_is_used() -> None:
    use = judge(CARD, reading(7 * GIB, Process(STRANGER, "game", None)), ours, False)

    assert use.foreign == (STRANGER, "game", 7 * GIB)


def test_what_the_driver_of_a_large_card_keeps_is_nobodys_use() -> None:
    assert judge(HUGE, reading(2 * GIB, device=HUGE), ours, False).foreign is None
    assert judge(CARD, reading(2 * GIB), ours, False).foreign == (0, "", 2 * GIB)


def test_a_device_without_a_reading_is_offered_whole() -> None:
    use = judge(CARD, None, ours, False)

    assert (use.foreign, use.free_bytes) == (None, CARD.memory_bytes)


def test_processes_below_this_one_are_ours_and_others_are_not() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        assert is_ours(os.getpid())
        assert is_ours(child.pid)
        assert not is_ours(os.getppid())
        assert not is_ours(1)
    finally:
        os.killpg(child.pid, 9)
        child.wait()


# --- which devices ---


def test_a_choice_keeps_its_order_and_takes_the_beginning_of_a_uuid() -> None:
    assert Selection("1,0").of([CARD, OTHER]) == (OTHER, CARD)
    assert Selection("gpu-B,0").of([CARD, OTHER]) == (OTHER, CARD)
    assert Selection("").of([CARD, OTHER]) == (CARD, OTHER)
    assert Selection("none").of([CARD, OTHER]) == ()


def test_a_number_means_all_slices_of_the_card() -> None:
    parts = [Device(0, "cuda", "MIG", f"MIG-{n}", "0000:04:00.0", GIB, mig=True) for n in range(2)]

    assert Selection("0").of([*parts, OTHER]) == tuple(parts)


def test_a_number_means_the_card_that_had_it_first() -> None:
    selection = Selection("0")
    assert selection.of([CARD, OTHER]) == (CARD,)

    gone = CARD.unusable("no longer shown by its driver")
    assert selection.of([replace(OTHER, index=0), gone]) == (gone,)


@pytest.mark.parametrize("choice", ["first", "0,", "-1", "0,0", "0;1", "none,0"])
def test_a_choice_without_sense_is_refused_with_a_line_that_shows_the_way(choice: str) -> None:
    with pytest.raises(UsageError, match=f"--gpus {choice}"):
        Selection(choice)


# --- equal machines ---


def test_machines_that_are_sold_as_equal_are_rounded_alike() -> None:
    assert rounded(64_349_900 * 1024) == rounded(64_349_000 * 1024)
    assert rounded(24_684_084 * 1024) == rounded(24_683_000 * 1024)


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 15 * GIB, 64_349_900 * 1024, 1 << 43])
def test_rounding_takes_at_most_a_thirty_second_part(size: int) -> None:
    assert size - size // 32 <= rounded(size) <= size


# --- the way between child and worker ---


def test_a_report_survives_its_way_as_json() -> None:
    import json

    report = Report(
        (CARD.unusable("broken"),), (reading(1, Process(1, "x", None)),), (("nvidia", "550"),), ("f",)
    )

    assert report_of(json.loads(json.dumps(as_record(report)))) == report
