"""A notebook session, in a real kernel: functions of its cells, the bar of a map, and the stop button."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.timeout(120)

# Of the server's set-up nothing is said.
FIRST_CELL = """
import logging
import gpulayer as gl

logging.getLogger("gpulayer").setLevel(logging.ERROR)
offset = 3

@gl.remote
def moved(n):
    return n + offset
"""


class Session:
    """One kernel, and what its cells said."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.client = kernel, kernel.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)
        self.outputs: list[tuple[str, Any]] = []

    def begin(self, code: str) -> None:
        """Runs a cell; its outputs are collected by `hear`."""
        self.outputs.clear()
        self.client.execute(code)

    def hear(self) -> bool:
        """Takes what has been said since; whether the cell has ended."""
        try:
            while True:
                message = self.client.get_iopub_msg(timeout=0.05)
                self.outputs.append((message["msg_type"], message["content"]))
        except Empty:
            return ("status", {"execution_state": "idle"}) in self.outputs

    def run(self, code: str) -> None:
        self.begin(code)
        wait_until(self.hear, PATIENCE_S, "the cell has ended")
        assert not self.said("error"), self.outputs

    def said(self, kind: str) -> list[Any]:
        return [content for each, content in self.outputs if each == kind]

    @property
    def text(self) -> str:
        return "".join(content["text"] for content in self.said("stream"))

    @property
    def bars(self) -> list[str]:
        shown = self.said("display_data") + self.said("update_display_data")
        return [content["data"]["text/plain"] for content in shown]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="gpl-") as folder:
        yield Path(folder)


@pytest.fixture
def session(address: str, short_folder: Path) -> Iterator[Session]:
    kernel = manager.KernelManager(kernel_name="python3", transport="ipc", ip=str(short_folder / "k"))
    kernel.start_kernel()
    session = Session(kernel)
    yield session
    session.client.stop_channels()
    kernel.shutdown_kernel(now=True)
    kernel.cleanup_resources()
    kernel.context.destroy()


def give(bench: Bench, count: int) -> None:
    """So many of the calls that wait return 7."""
    for _ in range(count):
        (grant,) = wait_until(lambda: bench.hand.claim(bench.machine, most=1), PATIENCE_S, "one is granted")
        bench.give(grant.id, 7)


def test_a_notebooks_functions_travel_and_its_map_shows_a_bar(session: Session, bench: Bench) -> None:
    session.run(FIRST_CELL)
    session.begin("print(moved.map([1, 2, 3]).results())")
    give(bench, 2)
    wait_until(lambda: session.hear() or any("2/3" in bar for bar in session.bars), PATIENCE_S, "a bar")
    give(bench, 1)
    wait_until(session.hear, PATIENCE_S, "the cell has ended")

    assert session.text == "[7, 7, 7]\n"
    assert any(bar.startswith("moved: 2/3 in") for bar in session.bars)
    assert session.bars[-1].startswith("moved: 3/3 in")
    assert "<progress" in session.said("display_data")[0]["data"]["text/html"]


def test_a_fast_map_shows_no_bar(session: Session, bench: Bench) -> None:
    session.run(FIRST_CELL)
    session.run("print(moved.map([]).results())")

    assert session.bars == []


def test_the_stop_button_leaves_the_calls_alone_and_says_how_to_come_back(
    session: Session, bench: Bench
) -> None:
    session.run(FIRST_CELL)
    session.begin("results = moved.map([1, 2])\nprint(results.ids[0])\nresults.results()")
    wait_until(lambda: not session.hear() and session.bars, PATIENCE_S, "it waits")
    session.kernel.interrupt_kernel()
    wait_until(session.hear, PATIENCE_S, "the cell has ended")
    group = session.text.split()[0]

    assert f"detached: 2 calls of moved go on; gl.Client().map_result('{group}')" in session.text
    assert session.said("error")[0]["ename"] == "KeyboardInterrupt"
    bench.serve(2, lambda _: 5)
    session.run(f"print(gl.Client().map_result('{group}').results())")
    assert session.text.endswith("[5, 5]\n")
