"""Records of use: what is put together from process, group and devices."""

from __future__ import annotations

from dataclasses import dataclass

from gpulayer_worker.processes.cgroup import GroupFacts
from gpulayer_worker.processes.job import Usage
from gpulayer_worker.usage import DeviceMeters, sample, usage_record


@dataclass(frozen=True)
class Reading:
    uuid: str
    used_bytes: int | None
    utilisation: int | None


def test_a_devices_peak_and_mean_are_those_of_its_attempt() -> None:
    now = [Reading("GPU-a", 10, 50), Reading("GPU-b", 99, 99)]
    meters = DeviceMeters(lambda: now)
    meters.begin("token", {"GPU-a"})
    meters.read()
    now[0] = Reading("GPU-a", 30, 100)
    meters.read()
    now[0] = Reading("GPU-a", 20, None)

    assert meters.end("token") == [{"uuid": "GPU-a", "peak_memory_bytes": 30, "mean_utilisation": 75.0}]
    assert not meters.busy


def test_a_device_that_tells_nothing_is_listed_without_numbers() -> None:
    meters = DeviceMeters(lambda: [Reading("GPU-a", None, None)])
    meters.begin("token", {"GPU-a"})

    assert meters.end("token") == [{"uuid": "GPU-a"}]


def test_devices_are_not_read_for_jobs_without_any() -> None:
    def read() -> list[Reading]:
        raise AssertionError("nobody has a device")

    meters = DeviceMeters(read)
    meters.begin("token", set())

    assert not meters.busy
    assert meters.end("token") == []


def test_the_group_knows_more_processor_time_than_the_process() -> None:
    record = usage_record(2.0, Usage(0.25, 0.25, 1000), GroupFacts(peak_bytes=5000, cpu_s=1.5))

    assert record == {"wall_s": 2.0, "cpu_s": 1.5, "max_rss_bytes": 1000, "peak_memory_bytes": 5000}


def test_without_a_group_the_process_counts() -> None:
    assert usage_record(1.0, Usage(0.25, 0.25, 1000)) == {"wall_s": 1.0, "cpu_s": 0.5, "max_rss_bytes": 1000}


def test_a_sample_has_the_devices_of_the_machine() -> None:
    fields = sample(3, [Reading("GPU-a", 10, 50)])

    assert fields["tasks"] == 3
    assert fields["devices"] == '[{"uuid":"GPU-a","utilisation":50,"used_bytes":10}]'
