"""A person at a map: a bar while it is waited for, and what Ctrl-C does.

The bar is drawn on a terminal or in a notebook, never in a pipe, and only once the wait has taken a moment. The first
Ctrl-C leaves the jobs alone and says how to come back; a second one within two seconds cancels them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpulayer.attentive import attentive
from gpulayer.manner import Manner
from gpulayer_broker.log_lines import safe_line

if TYPE_CHECKING:
    from gpulayer.bar import Bar
    from gpulayer.notebook import NotebookBar

T = TypeVar("T")

SECOND_CHANCE_S = 2.0
QUIET_S = 0.5


class Counted(Protocol):
    """A map, as a person sees it."""

    _manner: Manner

    def _calls(self) -> int: ...

    def _ended(self) -> int: ...

    def _way_back(self) -> str: ...

    def cancel(self) -> int:
        """Asks for the end of all calls that have not ended; how many those were."""


def watched(result: Counted, steps: Iterator[T]) -> Iterator[T]:
    """The steps, with a bar and with Ctrl-C as it is for a map."""
    drawing = Drawing(result)
    try:
        yield from steps
    except KeyboardInterrupt as interrupt:
        drawing.close()
        detach(result, interrupt)
        raise interrupt.with_traceback(None) from None
    finally:
        drawing.close()


def detach(result: Counted, interrupt: KeyboardInterrupt) -> None:
    """Says, once for an interrupt, that the calls go on, and cancels them at a second one."""
    if vars(interrupt).get("told"):
        return
    vars(interrupt)["told"] = True
    left = result._calls() - result._ended()
    name = result._manner.name
    try:
        _say(
            f"detached: {left} calls of {name} go on; {result._way_back()}; "
            f"Ctrl-C again within {SECOND_CHANCE_S:g} s cancels them"
        )
        attentive(threading.Event().wait, SECOND_CHANCE_S)
    except KeyboardInterrupt:
        _say(f"cancelled: {result.cancel()} calls of {name}")


def _say(line: str) -> None:
    print(safe_line(line), file=sys.stderr, flush=True)


class Drawing:
    """The bar of one reading, which appears after a moment, if somebody may be looking."""

    def __init__(self, result: Counted) -> None:
        self._result = result
        self._bar: Bar | NotebookBar | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if result._manner.progress and somebody_looks():
            self._timer = threading.Timer(QUIET_S, self._draw)
            self._timer.daemon = True
            self._timer.start()

    def _draw(self) -> None:
        with self._lock:
            if self._timer is not None:
                result = self._result
                self._bar = _open_bar(
                    safe_line(result._manner.name), lambda: (result._ended(), result._calls())
                )

    def close(self) -> None:
        """Ends the bar; nothing is drawn afterwards."""
        timer = self._timer
        if timer is None:
            return
        timer.cancel()
        with self._lock:
            self._timer = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def _open_bar(name: str, counts: Callable[[], tuple[int, int]]) -> Bar | NotebookBar | None:
    if not _in_notebook():
        from gpulayer.bar import open_bar

        return open_bar(name, counts)
    from gpulayer.notebook import NotebookBar

    bar = NotebookBar(name, counts)
    bar.start()
    return bar


def somebody_looks() -> bool:
    """Whether this thread writes to a terminal or a notebook."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return "ipykernel" in sys.modules and shell is not None and shell.get_ipython() is not None
