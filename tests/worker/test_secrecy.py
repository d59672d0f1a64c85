"""A queue's address is not shown by `ps`, nor by /proc to a job of the same user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_broker.connection import Endpoint, Link
from gpulayer_worker.secrecy import blank
from tests.worker.conftest import Hire
from tests.workers import Desk

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows it in /proc")

URL = "redis://user:very-secret@queue:6379/0"
PROGRAM = """
import sys
from gpulayer_worker.secrecy import blank
print(blank(sys.argv[1]))
for name in ("cmdline", "environ"):
    print(open(f"/proc/self/{name}", "rb").read().replace(bytes(1), b" ").decode())
print(sys.argv[1])
"""


def test_an_address_is_blanked_wherever_the_process_was_given_it() -> None:
    command = [sys.executable, "-c", PROGRAM, URL, f"--redis={URL}", "last"]
    ended = subprocess.run(
        command, env={**os.environ, "GPULAYER_REDIS_URL": URL}, capture_output=True, text=True, check=True
    )
    found, rest = ended.stdout.split("\n", 1)
    shown = rest.rstrip("\n").rpartition("\n")[0]

    assert found == "3"
    assert "very-secret" not in shown
    assert "redis://*" in shown
    assert "last" in shown
    assert rest.endswith(URL + "\n"), "the process itself still knows it"


def test_a_text_that_is_nowhere_changes_nothing() -> None:
    before = Path("/proc/self/cmdline").read_bytes()

    assert blank("redis://nowhere") == 0
    assert blank("") == 0
    assert Path("/proc/self/cmdline").read_bytes() == before


@pytest.fixture
def login(desk: Desk, namespace: str) -> Iterator[Endpoint]:
    """The queue's server by a user with a password."""
    with Link(desk.endpoint) as link:
        link.call("ACL", "SETUSER", namespace, "on", ">very-secret", "~*", "&*", "+@all")
        yield Endpoint.parse(f"unix://{namespace}:very-secret@{desk.endpoint.path}")
        link.call("ACL", "DELUSER", namespace)


@pytest.mark.parametrize("by_flag", [True, False])
def test_a_job_does_not_find_the_password_at_its_worker(
    desk: Desk, hire: Hire, login: Endpoint, by_flag: bool
) -> None:
    # The last --redis counts; an empty one leaves it to the variable.
    options = () if by_flag else ("--redis", "")
    worker = hire("", *options, endpoint=login, environment={"GPULAYER_REDIS_URL": login.url}, private=False)
    job = desk.shell(f"cd /proc/{worker.pid} && cat cmdline environ | tr '\\0' '\\n'")

    assert desk.final(job).state == "succeeded"
    shown = desk.tail(job).decode()
    assert "GPULAYER_LEASE_S" in shown
    assert "very-secret" not in shown
