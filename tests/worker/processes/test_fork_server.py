"""The fork server itself: many jobs at once, imports before the fork, its own end."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.pool import environment_for
from gpulayer_worker.runner import preload, proctree
from tests.support import PATIENCE_S, in_background, wait_until

from .bench import Bench, is_gone, value


@contextmanager
def preloading(folder: Path, *modules: str, path: Path | None = None) -> Iterator[Bench]:
    """A fork server with imports; `path` is a folder that counts as one of its Python's own."""
    fallback = (str(path),) if path is not None else ()
    server = ForkServer(sys.executable, {"OMP_NUM_THREADS": "1"}, frozenset(modules), fallback)
    try:
        yield Bench(folder, server)
    finally:
        server.close()


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


def imported_names() -> list[str]:
    return [name for name in ("numpy", "mine", "crashing", "threading_on_import") if name in sys.modules]


def test_two_hundred_jobs_started_at_once_from_many_threads_all_end(bench: Bench) -> None:
    endings: list[Any] = []

    def start_some(number: int) -> None:
        handles = [bench.shell(f"exit {number}") for _ in range(20)]
        endings.extend((number, handle.wait(PATIENCE_S)) for handle in handles)

    with in_background(*(partial(start_some, number) for number in range(10))):
        pass

    assert len(endings) == 200
    assert all(end.exit.code == number for number, end in endings)
    assert isinstance(bench.server, ForkServer)
    stats = bench.server.stats()
    assert (stats["jobs"], stats["children"]) == ([], [])


def test_no_descriptor_is_left_on_either_side(bench: Bench) -> None:
    assert isinstance(bench.server, ForkServer)
    bench.command("true", on_progress=print).wait(PATIENCE_S)
    sides = [os.getpid(), bench.server.pid]
    before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in sides]

    handles = [bench.command("true", on_progress=print) for _ in range(20)]
    for handle in handles:
        handle.wait(PATIENCE_S)

    assert [len(os.listdir(f"/proc/{pid}/fd")) for pid in sides] == before


def test_an_id_that_runs_already_is_refused(bench: Bench) -> None:
    handle = bench.shell("sleep 1000", name="twice")

    with pytest.raises(ValueError, match="twice runs here already"):
        bench.shell("true", name="twice")

    handle.kill()
    handle.wait(PATIENCE_S)
    assert bench.shell("true", name="twice").wait(PATIENCE_S).exit is not None


def test_an_environment_larger_than_the_sockets_buffer_arrives(bench: Bench) -> None:
    env = bench.env | {f"V{number}": "x" * 100_000 for number in range(10)}
    handles = [bench.shell("echo ${#V9}", env=env) for _ in range(5)]

    for handle in handles:
        handle.wait(PATIENCE_S)
        assert bench.out(handle) == "100000\n"


def test_closing_ends_every_job(bench: Bench) -> None:
    handle = bench.shell("trap '' TERM; echo $$ > main; while :; do sleep 0.05; done")
    main = bench.number_in("main")

    bench.server.close()

    assert handle.wait(PATIENCE_S).lost
    assert is_gone(main)


# --- imports before the fork ---


def test_a_preloaded_module_is_there_without_the_jobs_import(tmp_path: Path) -> None:
    with preloading(tmp_path, "numpy") as bench:
        assert value(bench.run(imported_names)) == ["numpy"]


def test_a_job_on_a_preloaded_server_has_no_thread_but_its_own(tmp_path: Path) -> None:
    with preloading(tmp_path, "numpy") as bench:
        assert value(bench.run(lambda: len(os.listdir("/proc/self/task")))) == 1


def test_functions_on_a_preloaded_numpy_draw_different_numbers(tmp_path: Path, packages: Path) -> None:
    (packages / "mine.py").write_text("import numpy.random\n")

    def draw() -> float:
        import numpy

        return float(numpy.random.rand())

    with preloading(tmp_path, "mine", path=packages) as bench:
        assert len({value(bench.run(draw)) for _ in range(3)}) == 3


def test_a_module_of_the_user_is_not_imported_before_the_fork(tmp_path: Path, packages: Path) -> None:
    (packages / "mine.py").write_text("")
    server = ForkServer(sys.executable, {"PYTHONPATH": str(packages)}, frozenset({"mine", "json"}))
    try:
        assert value(Bench(tmp_path, server).run(imported_names)) == []
    finally:
        server.close()


def test_jobs_wait_for_the_imports_without_holding_up_their_starter(tmp_path: Path, packages: Path) -> None:
    (packages / "mine.py").write_text(f"import os\nopen({str(tmp_path / 'gate')!r}).read()\n")
    os.mkfifo(tmp_path / "gate")

    with preloading(tmp_path, "mine", path=packages) as bench:
        handle = bench.function(imported_names)
        dropped = bench.function(imported_names)
        handle.extend_lease(proctree.lease_clock_s() + 60)
        dropped.end(1.0)
        assert not handle.started.done()
        (tmp_path / "gate").write_text("open")

        assert value(handle.wait(PATIENCE_S)) == ["mine"]
        assert dropped.wait(PATIENCE_S).refused == "ended before it began"


def test_an_import_that_fails_is_left_to_the_job(tmp_path: Path, packages: Path) -> None:
    (packages / "mine.py").write_text("raise RuntimeError('broken')\n")

    with preloading(tmp_path, "mine", "json", path=packages) as bench:
        assert value(bench.run(imported_names)) == []


def test_an_import_that_kills_the_fork_server_is_given_up(tmp_path: Path, packages: Path) -> None:
    (packages / "crashing.py").write_text("import os\nos.kill(os.getpid(), 11)\n")

    with preloading(tmp_path, "crashing", path=packages) as bench:
        handles = [bench.function(imported_names) for _ in range(3)]

        assert [value(handle.wait(PATIENCE_S)) for handle in handles] == [[], [], []]
        assert value(bench.run(imported_names)) == []


def test_an_import_that_starts_threads_is_given_up(tmp_path: Path, packages: Path) -> None:
    source = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (packages / "threading_on_import.py").write_text(source)

    with preloading(tmp_path, "threading_on_import", path=packages) as bench:
        assert value(bench.run(imported_names)) == []


@pytest.fixture
def gpu_file() -> Iterator[Path]:
    """A device file as a GPU's driver makes it, behind which there is nothing."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a device file")
    path = Path(f"/dev/nvidia-stand-in-{os.getpid()}")
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.stat(os.devnull).st_rdev)
    except PermissionError:
        pytest.skip("needs a root that may make device files")
    yield path
    path.unlink()


def test_an_import_that_begins_with_a_gpu_is_given_up(tmp_path: Path, packages: Path, gpu_file: Path) -> None:
    """A process forked from one that has used CUDA cannot use it."""
    (packages / "mine.py").write_text(f"context = open({str(gpu_file)!r})\n")

    with preloading(tmp_path, "mine", path=packages) as bench:
        assert value(bench.run(imported_names)) == []


def test_before_a_job_begins_nothing_has_touched_a_gpu(tmp_path: Path, gpu_file: Path) -> None:
    with preloading(tmp_path, "numpy") as bench, open(gpu_file):
        assert preload.open_gpus() == [str(gpu_file)]
        assert value(bench.run(imported_names)) == ["numpy"]
        assert isinstance(bench.server, ForkServer)
        held = {os.readlink(each) for each in Path(f"/proc/{bench.server.pid}/fd").iterdir()}
        assert not [path for path in held if path.startswith(preload.GPU_FILES)]


# --- what a fork server is started with ---


def test_without_imports_only_what_is_read_at_exec_is_part_of_the_key() -> None:
    env = {"LD_LIBRARY_PATH": "/x", "PYTHONHASHSEED": "1", "PYTHONPATH": "/y", "A": "1", "HOME": "/z"}

    assert environment_for(env, frozenset()) == {"LD_LIBRARY_PATH": "/x", "PYTHONHASHSEED": "1"}


def test_with_imports_everything_but_the_jobs_own_is_part_of_the_key() -> None:
    env = {
        "A": "1",
        "OMP_NUM_THREADS": "2",
        "HOME": "/z",
        "GPULAYER_JOB_ID": "j",
        "CUDA_VISIBLE_DEVICES": "0",
    }

    assert environment_for(env, frozenset({"numpy"})) == {"A": "1", "OMP_NUM_THREADS": "2"}


def test_the_hash_seed_of_the_key_reaches_the_function(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        server = ForkServer(sys.executable, {"PYTHONHASHSEED": "7"})
        seen.append(value(Bench(tmp_path, server).run(lambda: hash("word"))))
        server.close()
    assert seen[0] == seen[1]


def test_a_killed_fork_server_is_noticed_without_any_job(server: ForkServer) -> None:
    os.kill(server.pid, 9)

    wait_until(lambda: not server.alive, PATIENCE_S, "the fork server counts as ended")


def test_a_fork_server_that_fails_takes_its_jobs_along(bench: Bench) -> None:
    handle = bench.shell("trap '' TERM; echo $$ > main; while :; do sleep 0.05; done")
    main = bench.number_in("main")
    assert isinstance(bench.server, ForkServer)

    bench.server._outbox.send({"request": "nonsense"})

    assert handle.wait(PATIENCE_S).lost
    assert is_gone(main)
    assert not bench.server.alive


def test_a_job_that_waited_for_imports_when_its_server_was_closed_never_began(
    tmp_path: Path, packages: Path
) -> None:
    (packages / "mine.py").write_text("import time\ntime.sleep(1000)\n")

    with preloading(tmp_path, "mine", path=packages) as bench:
        handle = bench.function(imported_names)
        assert isinstance(bench.server, ForkServer)
        os.kill(bench.server.pid, 19)  # Even one that does not answer at all.
        bench.server.close(patience_s=0.2)

    ending = handle.wait(PATIENCE_S)
    assert (ending.lost, ending.refused) == (True, "the fork server ended before it began")


def test_jobs_are_told_as_lost_although_clearing_up_fails(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with closing(ForkServer(sys.executable, {}, after_loss=fail)) as server:
        handle = Bench(tmp_path, server).shell("sleep 1000")
        handle.started.result(PATIENCE_S)

        os.kill(server.pid, 9)

        assert handle.wait(PATIENCE_S).lost


def test_a_jobs_end_leaves_what_imports_made_for_the_fork_server(tmp_path: Path, packages: Path) -> None:
    (packages / "mine.py").write_text("import tempfile\nfolder = tempfile.TemporaryDirectory()\n")

    def look() -> bool:
        import os

        return os.path.isdir(sys.modules["mine"].folder.name)

    def make() -> str:
        import tempfile

        globals()["kept"] = folder = tempfile.TemporaryDirectory()
        return folder.name

    with preloading(tmp_path, "mine", path=packages) as bench:
        assert [value(bench.run(look)) for _ in range(2)] == [True, True]
        assert not Path(value(bench.run(make))).exists()
