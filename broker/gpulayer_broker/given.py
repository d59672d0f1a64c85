"""Results of other jobs as arguments of a call: which, and how they travel from a worker to the job's process.

The record names the jobs; the worker that runs the call reads their results and puts them into one file beside its
arguments, so that whoever submitted has to be neither there nor trusted with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_JOBS = 1_000_000


@dataclass(frozen=True)
class Given:
    """The argument at `place` (its number from 0, or its name) is what a job returned; of `many` a list of it all.

    `job` is a job, an array, or a group of `size` jobs.
    """

    place: int | str
    job: str
    many: bool = False
    size: int = 0

    @property
    def jobs(self) -> list[str]:
        """The ids, a group's members in its place."""
        return [f"{self.job}-{number}" for number in range(1, self.size + 1)] if self.size else [self.job]

    def encode(self) -> dict[str, Any]:
        return {"at": self.place, "job": self.job, "many": self.many, "size": self.size}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Given:
        place = raw["at"] if isinstance(raw["at"], int) else str(raw["at"])
        size = int(raw.get("size", 0))
        if not 0 <= size <= MOST_JOBS:
            raise ValueError(f"a group of {size} jobs")
        return cls(place, str(raw["job"]), bool(raw.get("many")), size)
