"""Without any set-up: the first call starts this user's private queue and worker, and a crash of them loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gpulayer as gl
from gpulayer import client as clients
from gpulayer import private
from gpulayer.client import Client
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import BlobMissing
from scripts.make_reference import JOB_VARIABLES
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("set_up")


class Unlucky(Exception):
    """An exception of this module's own."""


@pytest.fixture
def set_up(
    monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path
) -> Iterator[dict[str | None, Client]]:
    """A state folder of this test alone, and clients that end with it."""
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(isolated_environment / "state" / tmp_path.name))
    monkeypatch.setenv("GPULAYER_TERM_GRACE_S", "1")
    defaults: dict[str | None, Client] = {}
    monkeypatch.setattr(clients, "_defaults", defaults)
    yield defaults
    for client in defaults.values():
        client.close()
    private.down()
    private.release_private()


@gl.remote(retries=1)
def slow(folder: str, seconds: float) -> int:
    import time
    from pathlib import Path as Place

    Place(folder, "begun").touch()
    time.sleep(seconds)
    return 42


@gl.remote
def unlucky(n: int) -> int:
    raise Unlucky(f"no {n}")


@gl.remote
def scaled(numbers: np.ndarray, factor: float) -> np.ndarray:
    return numbers * factor


def test_functions_run_and_their_values_and_errors_come_back_whole() -> None:
    numbers = np.linspace(0, 1, 200_000)
    assert np.array_equal(scaled.delay(numbers, 2.0).result(PATIENCE_S), numbers * 2.0)

    with pytest.raises(Unlucky, match="no 3") as told:
        unlucky.delay(3).result(PATIENCE_S)
    assert "in unlucky" in told.value.__notes__[0]

    results = scaled.starmap([(np.arange(3), k) for k in range(8)]).results()
    assert [list(each) for each in results] == [[0, k, 2 * k] for k in range(8)]


def test_a_result_arrives_though_the_queue_is_killed_while_it_is_waited_for(tmp_path: Path) -> None:
    job = slow.delay(str(tmp_path), 1.0)
    wait_until((tmp_path / "begun").exists, PATIENCE_S, "the job has begun")
    server = private.status()["server"]
    assert server is not None
    os.kill(server["pid"], signal.SIGKILL)

    assert job.result(PATIENCE_S) == 42
    assert job.record.attempt == 1
    assert slow.delay(str(tmp_path), 0).result(PATIENCE_S) == 42


def test_a_result_that_is_no_longer_in_the_store_is_told(set_up: dict[str | None, Client]) -> None:
    job = scaled.delay(np.zeros(1_000_000), 1.0)
    job.wait(PATIENCE_S)
    store = set_up[None]._session.store
    for path in Path(store.root, "blobs").rglob("*"):  # type: ignore[attr-defined]
        if path.is_file():
            path.unlink()

    with pytest.raises(BlobMissing):
        job.result(PATIENCE_S)


@gl.remote
def family(children: int) -> dict[str, object]:
    """Submits jobs of its own and adds up what they return."""
    import os

    import gpulayer

    @gpulayer.remote
    def child(n: int) -> int:
        return n * n

    jobs = [child.delay(n) for n in range(children)]
    large = gpulayer.Client(target="local").submit(len, args=(b"x" * 3_000_000,))
    return {
        "own": os.environ["GPULAYER_JOB_ID"],
        "sum": sum(job.result(PATIENCE_S) for job in jobs),
        "large": large.result(PATIENCE_S),
        "children": [job.id for job in jobs],
    }


@gl.remote
def variables() -> set[str]:
    return {name for name in os.environ if name.startswith("GPULAYER_")}


def test_a_job_sees_the_variables_that_the_reference_names_and_no_other() -> None:
    of_arrays = {"GPULAYER_INDEX", "GPULAYER_LINE"}
    command = Client().submit(["sh", "-c", "env | cut -d= -f1 | grep ^GPULAYER_"])
    assert command.wait(PATIENCE_S) == "succeeded"

    for seen in (variables.delay().result(PATIENCE_S), set(command.logs())):
        assert seen == set(JOB_VARIABLES) - of_arrays


def test_a_job_submits_jobs_of_its_own(set_up: dict[str | None, Client]) -> None:
    job = family.delay(3)
    told = job.result(3 * PATIENCE_S)

    assert told["sum"] == 0 + 1 + 4
    assert told["large"] == 3_000_000
    assert told["own"] == job.id
    children = told["children"]
    assert isinstance(children, list)
    for child in children:
        record = set_up[None].get(child).record
        assert record.owner == job.record.owner
        assert specs.decode(record.spec).extra == {"parent": job.id}
