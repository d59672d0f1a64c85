"""The runner in every Python that is here, from 3.8 on, with nothing of GPUlayer installed in it."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from gpulayer_worker.processes.bundle import fallback_folders
from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.spawn import SpawnStarter
from tests.support import PATIENCE_S

from .bench import Bench, error, pickled, value

VERSIONS = ["3.8", "3.9", "3.10", "3.12", "3.13"]
PYPY = "pypy3"


def find_python(version: str) -> str | None:
    """A Python of that version that runs, on the path or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    for python in filter(None, candidates):
        check = f"import sys; assert '%s.%s' % sys.version_info[:2] == '{version}'"
        if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode == 0:
            return python
    return None


# Those of CPython that are here; and the one that every Debian has, another implementation, of an older version.
PYTHONS = {version: python for version in VERSIONS if (python := find_python(version))}


@pytest.fixture(params=[*PYTHONS, PYPY])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    python = shutil.which(PYPY) if request.param == PYPY else PYTHONS[request.param]
    if python is None:
        pytest.skip("needs pypy3: make test-deps")
    server = ForkServer(python, {}, fallback_path=fallback_folders(tmp_path / "state"))
    yield Bench(tmp_path, server)
    server.close()


def test_a_function_runs_and_its_result_is_pickled_by_the_cloudpickle_that_was_brought(
    elsewhere: Bench,
) -> None:
    call = elsewhere.call(pickle.dumps(divmod), pickle.dumps(((7, 2), {})))

    assert value(elsewhere.start(call).wait(PATIENCE_S)) == (3, 1)


def test_errors_are_told(elsewhere: Bench) -> None:
    call = elsewhere.call(pickle.dumps(divmod), pickle.dumps(((7, 0), {})))
    told = error(elsewhere.start(call).wait(PATIENCE_S))

    assert (told["type"], told["kind"]) == ("ZeroDivisionError", "pickle")


def test_code_of_this_python_is_refused_there(elsewhere: Bench) -> None:
    call = elsewhere.call(pickled(find_python), pickle.dumps((("3.8",), {})))
    told = error(elsewhere.start(call).wait(PATIENCE_S))

    assert told["type"] == "CannotLoad"
    assert "Python {}.{}.{}".format(*sys.version_info[:3]) in told["message"]


def test_commands_run_and_their_strays_end(elsewhere: Bench) -> None:
    end = elsewhere.shell("sleep 1000 & exit 4").wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.code == 4
    assert len(end.strays) == 1


def test_the_stand_in_for_gpulayer_serves_where_the_package_is_missing(elsewhere: Bench) -> None:
    (elsewhere.folder / "work.py").write_text(
        "import gpulayer as gl\n"
        "@gl.remote(gpus=1)\n"
        "def work(x):\n"
        "    gl.progress(1, 2)\n"
        "    return [x + 1, gl.current_job().id, gl.Runtime.current().world_size]\n"
        "def submit():\n"
        "    return work.delay(1)\n"
    )
    seen: list[object] = []
    env = elsewhere.env | {"GPULAYER_JOB_ID": "j_1"}
    call = elsewhere.call(b"cwork\nwork\n.", pickle.dumps(((1,), {})))
    refused = elsewhere.call(b"cwork\nsubmit\n.", pickle.dumps(((), {})))

    assert value(elsewhere.start(call, env=env, on_progress=seen.append).wait(PATIENCE_S)) == [2, "j_1", 1]
    assert seen == [{"done": 1.0, "total": 2.0}]
    told = error(elsewhere.start(refused, env=env).wait(PATIENCE_S))
    assert "install gpulayer in its Python" in told["message"]


@pytest.mark.parametrize("spawned", [False, True])
def test_an_older_cloudpickle_of_the_jobs_python_is_passed_over(tmp_path: Path, spawned: bool) -> None:
    old = tmp_path / "site"
    (old / "cloudpickle").mkdir(parents=True)
    (old / "cloudpickle" / "__init__.py").write_text('__version__ = "1.6.0"\n')
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "old.pth").write_text(f"{old}\n")
    python, brought = str(tmp_path / "venv/bin/python"), fallback_folders(tmp_path / "state")

    server = SpawnStarter(python, brought) if spawned else ForkServer(python, {}, fallback_path=brought)
    try:
        ending = Bench(tmp_path, server).run(lambda: sys.modules["cloudpickle"].__version__)
    finally:
        server.close()

    assert value(ending) == cloudpickle.__version__
