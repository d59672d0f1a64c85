"""What this machine is, found out without joining anything: `gpulayer resources detect`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpulayer_broker.local_facts import memory_bytes, usable_cpus
from gpulayer_worker.devices.facts import Device, Report
from gpulayer_worker.devices.probe import detect
from gpulayer_worker.frameworks import Interpreter, Python
from gpulayer_worker.grant import Device as Masked
from gpulayer_worker.grant import device_masks, nvidia_library_folders

PROBE_LIMIT_S = 10.0
VERIFY_LIMIT_S = 180.0
VERIFY = Path(__file__).resolve().parent / "runner" / "verify.py"


@dataclass(frozen=True)
class Verification:
    """What one operation on a device came to; `ok` is None where no framework could try."""

    ok: bool | None
    text: str


@dataclass(frozen=True)
class Detection:
    """The machine, the Python of its jobs, its devices."""

    name: str
    system: str
    release: str
    arch: str
    cpus: int
    memory_bytes: int
    python: Python
    report: Report
    driver_answers: bool
    verified: dict[str, Verification] = field(default_factory=dict)

    @property
    def frameworks(self) -> dict[str, str]:
        """Every distribution of the jobs' Python, and torch's backends that have a usable device here."""
        return dict(self.python.frameworks({device.kind for device in self.report.usable}))


def detect_machine(executable: str, *, verify: bool, recording: Path | None = None) -> Detection:
    """Looks at this machine; ConfigError if the Python cannot be asked."""
    python = Interpreter(executable).python()
    report, answers = detect(PROBE_LIMIT_S, recording)
    return Detection(
        name=platform.node(),
        system=platform.system(),
        release=platform.release(),
        arch=platform.machine(),
        cpus=usable_cpus(),
        memory_bytes=memory_bytes(),
        python=python,
        report=report,
        driver_answers=answers,
        verified=_verified(python, report) if verify else {},
    )


def _verified(python: Python, report: Report) -> dict[str, Verification]:
    """By UUID, and by `cpu` for the processor itself."""
    run = _runner(python)
    found = {"cpu": run("cpu", ())}
    for device in report.usable:
        found[device.uuid] = run(device.kind, (_masked(device),))
    return found


def _masked(device: Device) -> Masked:
    return Masked(device.index, device.uuid, by_uuid=device.mig)


def _runner(python: Python) -> Callable[[str, tuple[Masked, ...]], Verification]:
    libraries = os.pathsep.join(
        [*nvidia_library_folders(python.executable), os.environ.get("LD_LIBRARY_PATH", "")]
    )

    def run(kind: str, devices: tuple[Masked, ...]) -> Verification:
        environment = {**os.environ, **device_masks(kind, devices)}
        if libraries.strip(os.pathsep):
            environment["LD_LIBRARY_PATH"] = libraries.strip(os.pathsep)
        try:
            answer = subprocess.run(
                [python.executable, "-I", str(VERIFY), kind],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=VERIFY_LIMIT_S,
                check=False,
            )
            record = json.loads(answer.stdout.splitlines()[-1])
            return Verification(record["ok"], str(record["text"]))
        except subprocess.TimeoutExpired:
            return Verification(False, f"no answer within {VERIFY_LIMIT_S:g} s")
        except (OSError, ValueError, IndexError, KeyError) as error:
            return Verification(False, f"the check itself failed: {type(error).__name__}: {error}")

    return run
