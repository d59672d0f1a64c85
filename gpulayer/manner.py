"""How a map is submitted and read: what its caller may choose, understood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from gpulayer_broker.errors import BadRequirement

IN_FLIGHT = 1000


class MapOptions(TypedDict, total=False):
    """What `.map` and `.starmap` can be told beside `return_exceptions`."""

    max_parallel: int | None
    max_in_flight: int
    progress: bool


@dataclass(frozen=True)
class Window:
    """How many calls of an input without a length may be open, and how many are submitted at once."""

    most: int

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise BadRequirement(f"max_in_flight={self.most!r}: it must be 1 or more", value=self.most)

    @property
    def step(self) -> int:
        return max(1, self.most // 2)


@dataclass(frozen=True)
class Manner:
    """How a map is read: its name for people, whether errors stand in their place, whether a bar may be shown."""

    name: str = "map"
    return_exceptions: bool = False
    progress: bool = True
