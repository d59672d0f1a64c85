"""The bar of a map in a notebook: one output that is written anew, by IPython's own display and nothing more."""

from __future__ import annotations

import contextvars
import html
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

EVERY_S = 0.5


class NotebookBar:
    """Asks for the counts several times a second and shows them below the cell that waits."""

    def __init__(self, name: str, counts: Callable[[], tuple[int, int]]) -> None:
        self._name, self._counts = name, counts
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._handle: Any = None
        # Outputs belong to the cell whose context they are written in.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._draw,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The last counts stay."""
        self._ended.set()
        self._thread.join()

    def _draw(self) -> None:
        while True:
            ended = self._ended.wait(EVERY_S if self._handle is not None else 0)
            self._show()
            if ended:
                return

    def _show(self) -> None:
        done, total = self._counts()
        text = f"{self._name}: {done}/{total} in {time.monotonic() - self._began_s:.0f} s"
        bar = f'<progress value="{done}" max="{max(1, total)}"></progress> {html.escape(text)}'
        shown = {"text/plain": text, "text/html": bar}
        if self._handle is None:
            self._handle = import_module("IPython.display").display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
