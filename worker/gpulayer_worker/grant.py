"""What a job sees of the machine: its environment, built from nothing but what it was granted.

Of the worker's own environment only locale, time zone, temporary folder, proxies and certificates go over, and the
PATH, behind the folder of the job's Python. The submitter's variables override defaults, never the grant itself.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .processes.bundle import SHIM

PASSED_ON = ("LANG", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Every runtime takes -1 for "none"; an empty HIP mask counts as unset, and libraries fail on int("").
NO_DEVICE = "-1"
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
NAMED_BY_UUID = (
    "its GPUs are given by UUID: a slice has no number, and beside a broken card numbers are not sure"
)
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib')); print(sysconfig.get_path('platlib'))"
ASK_PYTHON_S = 20.0
# A job is one process, and begins without a checkpoint.
ALONE = {
    "GPULAYER_RESUME": "",
    "GPULAYER_RANK": "0",
    "GPULAYER_WORLD_SIZE": "1",
    "GPULAYER_NODES": "1",
    "GPULAYER_NODE_RANK": "0",
}
Variables = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Device:
    """A granted device: its number in PCI order, its UUID, and whether only that names it.

    Numbers do not name a slice (MIG), nor any device of a machine where a runtime may count otherwise than its driver.
    """

    index: int
    uuid: str
    by_uuid: bool = False


@dataclass(frozen=True)
class Share:
    """What many attempts are given alike. `accelerator` is cpu, cuda, rocm or mps."""

    accelerator: str
    cpus: int
    python: str
    cache: str
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class Grant:
    """Everything that one attempt was given; the folders `scratch` and `outputs` are its own."""

    job_id: str
    attempt: int
    name: str
    scratch: str
    outputs: str
    share: Share


def job_environment(
    grant: Grant,
    submitted: Mapping[str, str],
    workers_own: Mapping[str, str],
    library_folders: Iterable[str] = (),
) -> dict[str, str]:
    """The whole environment of a job's process."""
    lasting = _lasting(
        grant.share, tuple(submitted.items()), tuple(workers_own.items()), tuple(library_folders)
    )
    return {"HOME": f"{grant.scratch}/home", **lasting, **_identity(grant)}


# Most jobs of a worker are like the one before, and to join search paths takes longer than to start a tiny one.
@functools.lru_cache(maxsize=32)
def _lasting(
    share: Share, submitted_: Variables, workers_own_: Variables, library_folders: tuple[str, ...]
) -> Mapping[str, str]:
    """Of an environment all but what is the attempt's own."""
    submitted, workers_own = dict(submitted_), dict(workers_own_)
    environment = {name: value for name, value in workers_own.items() if is_passed_on(name)}
    environment |= _defaults(share)
    environment |= {name: value for name, value in submitted.items() if name not in MASKS}
    environment |= _given(share) | device_masks(share.accelerator, share.devices)
    environment["PATH"] = _joined(
        [os.path.dirname(share.python)], submitted.get("PATH") or workers_own.get("PATH") or SYSTEM_PATH
    )
    environment["PYTHONPATH"] = _joined([], submitted.get("PYTHONPATH", ""), str(SHIM))
    libraries = _joined(library_folders, submitted.get("LD_LIBRARY_PATH", ""))
    if libraries:
        environment["LD_LIBRARY_PATH"] = libraries
    return environment


def with_queue(submitted: Mapping[str, str], queue: Mapping[str, str], owner: str) -> dict[str, str]:
    """What the submitter set, and the way to the queue for the job's own jobs, unless the submitter named another."""
    if not queue or "GPULAYER_REDIS_URL" in submitted:
        return dict(submitted)
    return {**submitted, **queue, "GPULAYER_OWNER": owner}


def workers_part(environment: Mapping[str, str]) -> dict[str, str]:
    """What may matter to a job of a worker's own environment."""
    return {name: value for name, value in environment.items() if name == "PATH" or is_passed_on(name)}


def is_passed_on(name: str) -> bool:
    """Whether a variable of the worker's own environment reaches its jobs."""
    return name in PASSED_ON or name.startswith("LC_") or name.upper() in PROXIES


def device_masks(accelerator: str, devices: tuple[Device, ...]) -> dict[str, str]:
    """The variables that hide every device but the granted ones: one for a GPU job, all for a CPU job."""
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if accelerator == "cuda":
        return order | {"CUDA_VISIBLE_DEVICES": _mask(devices)}
    if accelerator == "rocm":
        return order | {"HIP_VISIBLE_DEVICES": _mask(devices)}
    return order | {"CUDA_VISIBLE_DEVICES": NO_DEVICE, "HIP_VISIBLE_DEVICES": NO_DEVICE}


def nvidia_library_folders(python: str) -> tuple[str, ...]:
    """The `nvidia/*/lib` folders of a Python's packages, where pip puts CUDA's libraries."""
    roots = [f"{folder}/nvidia" for folder in site_packages(python)]
    return tuple(folder for root in roots for folder in _library_folders(root, _changed_ns(root)))


@functools.cache
def site_packages(python: str) -> tuple[str, ...]:
    """Where a Python keeps its packages; empty when it cannot say."""
    try:
        answer = subprocess.run(
            [python, "-E", "-s", "-c", SITE_PACKAGES],
            capture_output=True,
            text=True,
            check=True,
            timeout=ASK_PYTHON_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(dict.fromkeys(answer.stdout.split("\n")[:2]))


@functools.lru_cache(maxsize=64)
def _library_folders(root: str, _changed: int) -> tuple[str, ...]:
    return tuple(sorted(str(folder) for folder in Path(root).glob("*/lib") if folder.is_dir()))


def _changed_ns(folder: str) -> int:
    """Changes when a package is added, so that the list is read anew."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _defaults(share: Share) -> dict[str, str]:
    """What the submitter may override, beside HOME."""
    return {
        "XDG_CACHE_HOME": share.cache,
        "HF_HOME": f"{share.cache}/huggingface",
        "TORCH_HOME": f"{share.cache}/torch",
        "OMP_NUM_THREADS": str(share.cpus),
        "PYTHONUNBUFFERED": "1",
    }


def _given(share: Share) -> dict[str, str]:
    return {
        "GPULAYER_ACCELERATOR": share.accelerator,
        "GPULAYER_GPUS": str(len(share.devices)),
        "GPULAYER_CACHE": share.cache,
        **ALONE,
    }


def _identity(grant: Grant) -> dict[str, str]:
    return {
        "GPULAYER_JOB_ID": grant.job_id,
        "GPULAYER_ATTEMPT": str(grant.attempt),
        "GPULAYER_NAME": grant.name,
        "GPULAYER_OUTPUTS": grant.outputs,
        "GPULAYER_SCRATCH": grant.scratch,
    }


def _mask(devices: tuple[Device, ...]) -> str:
    """Numbers for whole devices, which every library understands; UUIDs as soon as one has no sure number."""
    by_uuid = any(device.by_uuid for device in devices)
    return ",".join(device.uuid if by_uuid else str(device.index) for device in devices) or NO_DEVICE


def _joined(first: Iterable[str], *rest: str) -> str:
    """A search path without empty entries (an empty entry is the current folder) and without repetition."""
    entries = [*first, *(entry for part in rest for entry in part.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(entry for entry in entries if entry))
