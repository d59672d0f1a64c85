"""The bar of a map: how many of its calls have ended, drawn anew several times a second. It loads rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

PER_SECOND = 5


class Bar(Progress):
    """Asks for the counts each time that it is drawn."""

    def __init__(self, name: str, counts: Callable[[], tuple[int, int]]) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        super().__init__(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=PER_SECOND
        )
        self._counts = counts
        # As text, not markup: the name is a user's own.
        self._task = self.add_task(Text(name).markup, total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tasks:
            done, total = self._counts()
            self.update(self._task, completed=done, total=total)
        yield from super().get_renderables()


def open_bar(name: str, counts: Callable[[], tuple[int, int]]) -> Bar | None:
    """A bar that is being drawn; None where the program draws something of its own with rich."""
    bar = Bar(name, counts)
    try:
        bar.start()
    except LiveError:
        return None
    return bar
