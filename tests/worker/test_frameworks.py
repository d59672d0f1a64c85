"""What the Python that runs jobs has, and that jobs run in it."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.matching import reasons
from gpulayer_broker.requirements import build_requirements
from gpulayer_worker.frameworks import Interpreter, ask
from tests.support import PATIENCE_S, wait_until
from tests.worker import pythons
from tests.worker.conftest import Hire
from tests.workers import Desk

CUDA_TORCH = (
    "__all__ = ['__version__', 'cuda', 'hip']\ncuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
)
ROCM_TORCH = "cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133'\n"
CPU_TORCH = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
OLD_TORCH = "__version__ = '1.13.1+cu117'\ndebug = False\ncuda = '11.7'\ngit_version = 'abc'\nhip = None\n"

MakePython = Callable[[], Path]


@pytest.fixture(scope="session")
def old_python() -> Path:
    return pythons.with_old_numpy()


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A bare environment of the test's own."""
    return pythons.bare(tmp_path / "env")


def install_torch(python: Path, version_file: str, version: str = "2.4.0") -> None:
    pythons.add_distribution(python, "torch", version)
    (pythons.site_packages(python) / "torch").mkdir()
    (pythons.site_packages(python) / "torch" / "version.py").write_text(version_file)


def found_by(python: Path, *kinds: str) -> dict[str, str]:
    return dict(ask(str(python)).frameworks(kinds))


def stands_against(python: Path, **frameworks: str) -> list[str]:
    """The reasons against a job that needs these frameworks, on a worker with this Python."""
    asked = ask(str(python))
    caps = Capabilities(
        "linux", "x86_64", 8, 1 << 40, 1 << 40, asked.version, frameworks=asked.frameworks(())
    )
    return [reason.text for reason in reasons(build_requirements(frameworks=frameworks), caps)]


# --- what is found ---


def test_a_bare_python_has_no_frameworks(python: Path) -> None:
    assert found_by(python) == {}
    assert ask(str(python)).version == platform.python_version()


def test_any_distribution_is_found_with_its_version_and_nothing_is_imported(python: Path) -> None:
    pythons.add_distribution(python, "some-exotic-thing", "7.1")
    (pythons.site_packages(python) / "some_exotic_thing.py").write_text("raise SystemExit('imported')")

    assert found_by(python) == {"some-exotic-thing": "7.1"}


def test_a_distribution_whose_metadata_is_damaged_hides_no_other(python: Path) -> None:
    (pythons.site_packages(python) / "broken-1.0.dist-info").mkdir()
    pythons.add_distribution(python, "numpy", "2.4.6")

    assert found_by(python) == {"numpy": "2.4.6"}


def test_the_environment_of_the_worker_adds_nothing(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(pythons.site_packages(Path(sys.executable))))

    assert found_by(python) == {}


def test_a_package_that_is_added_is_found_at_the_next_question(python: Path) -> None:
    interpreter = Interpreter(str(python))
    assert dict(interpreter.python().frameworks(())) == {}

    pythons.add_distribution(python, "jax", "0.4.30")

    assert dict(interpreter.python().frameworks(())) == {"jax": "0.4.30"}


def test_an_unchanged_python_is_not_asked_again(python: Path) -> None:
    interpreter = Interpreter(str(python))

    assert interpreter.python() is interpreter.python()


@pytest.mark.parametrize(
    ("version_file", "kinds", "backends"),
    [
        (CUDA_TORCH, ("cuda",), {"torch.cuda"}),
        (CUDA_TORCH, (), set()),
        (CUDA_TORCH, ("rocm",), set()),
        (OLD_TORCH, ("cuda",), {"torch.cuda"}),
        (ROCM_TORCH, ("rocm",), {"torch.rocm"}),
        (ROCM_TORCH, ("cuda",), set()),
        (CPU_TORCH, ("cuda", "rocm"), set()),
        (CPU_TORCH, ("mps",), {"torch.mps"}),
    ],
)
def test_a_backend_of_torch_needs_a_build_for_it_and_a_usable_device(
    python: Path, version_file: str, kinds: tuple[str, ...], backends: set[str]
) -> None:
    install_torch(python, version_file)

    assert found_by(python, *kinds).keys() - {"torch"} == backends


def test_launchers_are_those_that_could_start_ranks_here(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask(str(python)).launchers() == ("direct",)

    install_torch(python, CPU_TORCH)
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)

    assert ask(str(python)).launchers() == ("direct", "mpi", "torchrun")


def test_a_program_that_is_no_python_is_refused() -> None:
    with pytest.raises(ConfigError, match="--python /bin/false: it does not answer as Python"):
        ask("/bin/false")


# --- what satisfies what ---


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.3.0.dev20240101+cu121", ">=0"),
        ("2.3.0.dev20240101+cu121", ">=2.2"),
        ("2.15.0a0+git1a2b3c4", ">=2.14"),
        ("2.15.0a0+git1a2b3c4", ">=0"),
        ("2.4.0+cu121", "==2.4.*"),
        ("2.4.0+cu121", "==2.4.0"),
        ("2.4.2", "~=2.4"),
        ("2.4.2", "!=2.4.1"),
        ("1!2.0", ">=9"),
    ],
)
def test_nightly_local_and_epoch_versions_satisfy_what_they_should(
    python: Path, version: str, wanted: str
) -> None:
    pythons.add_distribution(python, "torch", version)

    assert stands_against(python, torch=wanted) == []


@pytest.mark.parametrize(
    ("version", "wanted"), [("2.4.1", "!=2.4.1"), ("2.4.2", "==2.5.*"), ("3.0", "~=2.4")]
)
def test_other_versions_do_not(python: Path, version: str, wanted: str) -> None:
    pythons.add_distribution(python, "torch", version)

    assert stands_against(python, torch=wanted) == [f"torch {version} does not satisfy {wanted}"]


def test_a_module_is_found_by_whichever_distribution_provides_it(python: Path) -> None:
    pythons.add_distribution(python, "cupy-cuda12x", "13.3.0")
    pythons.add_distribution(python, "opencv-python-headless", "4.10.0.84")

    assert stands_against(python, cupy=">=13", cv2=">=4.5") == []


def test_of_two_distributions_of_a_module_either_will_do(python: Path) -> None:
    pythons.add_distribution(python, "onnxruntime", "1.16.0")
    pythons.add_distribution(python, "onnxruntime-gpu", "1.20.1")

    assert stands_against(python, onnxruntime=">=1.18") == []
    assert stands_against(python, onnxruntime="==1.16.*") == []
    assert stands_against(python, **{"onnxruntime-gpu": "<1.18"}) == [
        "onnxruntime-gpu 1.20.1 does not satisfy <1.18"
    ]


# --- jobs in it ---


def square_sum() -> tuple[str, int, str]:
    import sys

    import numpy

    return numpy.__version__, int((numpy.arange(10) ** 2).sum()), sys.prefix


def test_functions_and_commands_run_in_the_worker_s_python(desk: Desk, hire: Hire, old_python: Path) -> None:
    hire("", "--python", str(old_python))

    prefix = str(old_python.parent.parent)
    job = desk.function(square_sum)
    assert desk.final(job).state == "succeeded", desk.error(job)
    assert list(desk.value(job)) == [pythons.OLD_NUMPY, sum(n * n for n in range(10)), prefix]
    command = desk.shell("python -c 'import numpy, sys; print(numpy.__version__, sys.prefix)'")
    desk.final(command)
    assert desk.whole_log(command).decode().split() == [pythons.OLD_NUMPY, prefix]


def test_a_job_goes_to_the_worker_whose_python_satisfies_it(desk: Desk, hire: Hire, old_python: Path) -> None:
    hire()
    hire("", "--python", str(old_python))
    wait_until(lambda: desk.online() == 2, PATIENCE_S, "both workers are there")

    for wanted, expected in ((f"<={pythons.OLD_NUMPY}", True), (f">{pythons.OLD_NUMPY}", False)):
        desk.needs = build_requirements(frameworks={"numpy": wanted})
        job = desk.function(square_sum)
        assert desk.final(job).state == "succeeded", desk.error(job)
        assert (desk.value(job)[0] == pythons.OLD_NUMPY) is expected


def test_jobs_run_in_an_older_python_of_another_kind_without_gpulayer(desk: Desk, hire: Hire) -> None:
    pypy = shutil.which("pypy3")
    if pypy is None:
        pytest.skip("needs pypy3: make test-deps")
    hire("", "--python", pypy)

    job = desk.function(divmod, 7, 2)
    assert desk.final(job).state == "succeeded", desk.error(job)
    assert desk.value(job) == (3, 1)
    command = desk.command(pypy, "-c", "import gpulayer, platform; print(platform.python_implementation())")
    desk.final(command)
    assert desk.whole_log(command) == b"PyPy\n"
    refused = desk.function(square_sum)
    assert desk.final(refused).state == "failed"
    assert f"Python {platform.python_version()}" in desk.error(refused)["message"]


def test_a_worker_with_a_python_that_is_not_there_says_so_and_ends(hire: Hire) -> None:
    worker = hire("", "--python", "/no/such/python")

    assert worker.process.wait(PATIENCE_S) == 78
    assert "--python /no/such/python: there is no such program" in worker.said()
