"""The examples of jobs for any framework: each runs through a worker whose Python has it, and its number is right.

The client has none of these frameworks but numpy; what is expected is computed here without any of them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE_S
from tests.worker import pythons
from tests.worker.conftest import Hire
from tests.workers import Desk

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "any_framework"
# The first test of a machine makes the environment; a framework's first import on a busy machine takes its time.
pytestmark = pytest.mark.timeout(pythons.INSTALL_LIMIT_S + 600)
EXAMPLE_S = 3 * PATIENCE_S


@pytest.fixture
def frameworks_python(hire: Hire) -> Path:
    """The Python with the frameworks, of which a worker is at work."""
    python = pythons.with_frameworks()
    hire("", "--python", str(python), private=False, lease_s=30)
    return python


def chain_of_masses() -> float:
    """Its eigenvalues are known in closed form."""
    return 2 + 2 * math.cos(math.pi / 201)


def slope() -> float:
    return sum(k * math.cos(k) for k in range(1, 51))


def bell() -> float:
    return math.sqrt(math.pi) * math.erf(1.5)


def layer() -> float:
    weights = [[(i * 7 + j * 3) % 11 - 5.0 for j in range(6)] for i in range(4)]
    row = [1.0, -2.0, 0.5, 3.0]
    sums = [math.fsum(weights[i][j] * row[i] for i in range(4)) for j in range(6)]
    return math.fsum(max(0.0, each) for each in sums)


EXPECTED = {
    "with_numpy.py": ("numpy", "cpu", chain_of_masses()),
    "with_torch.py": ("torch", "cpu", slope()),
    "with_jax.py": ("jax", "cpu:0", bell()),
    "with_onnxruntime.py": ("onnxruntime", "CPUExecutionProvider", layer()),
}


def run_example(name: str, desk: Desk) -> dict[str, Any]:
    """What it prints, started as its text says, its jobs going to the desk's queue."""
    own = {"GPULAYER_REDIS_URL": desk.endpoint.url, "GPULAYER_NAMESPACE": desk.namespace}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=EXAMPLE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_every_example_has_its_expectation() -> None:
    assert EXPECTED.keys() == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_framework_computes_in_a_job_and_the_job_says_on_which_device(
    name: str, desk: Desk, frameworks_python: Path
) -> None:
    module, device, value = EXPECTED[name]
    [version] = {
        path.name.removesuffix(".dist-info").split("-")[1]
        for path in pythons.site_packages(frameworks_python).glob(f"{module}-*.dist-info")
    }

    told = run_example(name, desk)

    assert told["framework"] == f"{module} {version}"
    assert told["device"] == device
    assert told["value"] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("name", ["with_jax.py", "with_torch.py"])
def test_without_the_framework_the_job_waits_and_the_reason_is_told(
    name: str, desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    hire("", "--python", str(pythons.bare(tmp_path / "env")), private=False)
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {name[:-3]} as example\n"
    function = {"with_jax.py": "bell", "with_torch.py": "slope"}[name]
    code += f"job = example.{function}.delay(1); print(job.state); print(job.explain()); job.cancel()"
    own = {"GPULAYER_REDIS_URL": desk.endpoint.url, "GPULAYER_NAMESPACE": desk.namespace}

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=EXAMPLE_S,
        check=True,
    )

    missing = name.removeprefix("with_")[:-3]
    assert done.stdout.startswith("queued\n")
    assert f"framework '{missing}' not installed" in done.stdout
    assert "no known worker can ever run this" in done.stdout
