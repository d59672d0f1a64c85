"""What all runs of a worker share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.queue import Queue
from gpulayer_broker.recent import Recent
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.settings import Settings
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_worker.bounds import Bounds
from gpulayer_worker.cleaner import Cleaner
from gpulayer_worker.hardware import Hardware
from gpulayer_worker.logs import Logs
from gpulayer_worker.processes.cgroup import Groups
from gpulayer_worker.processes.pool import Pool
from gpulayer_worker.processes.warm import WarmKey
from gpulayer_worker.processes.warm_lane import WarmLane
from gpulayer_worker.scratch import Scratches
from gpulayer_worker.usage import DeviceMeters


@dataclass(frozen=True)
class Workshop:
    """The parts of the worker that a run uses, its settings, and what it asks the worker."""

    settings: Settings
    store: BlobStore
    pool: Pool
    warm: WarmLane
    logs: Logs
    cleaner: Cleaner
    bounds: Bounds
    groups: Groups
    meters: DeviceMeters
    scratch: Scratches
    cache: Path
    python: str
    hardware: Hardware
    environment: Mapping[str, str]
    queue: Mapping[str, str]
    results: Queue
    lanes: Recent[str, WarmKey]
    fits: Callable[[str, Requirements], bool]
    on_started: Callable[[], None]
