"""Jobs that begin when another is gone: calls that share a slot, where the way to the worker and back would cost more
than they do.

What begins next is known here before its turn: between the end of one and the start of the next nobody is asked.
"""

from __future__ import annotations

import os
from typing import Any


class LinedUp:
    """Start requests with their descriptors, by the id of the job whose end they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[dict[str, Any], list[int]]] = {}

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._waiting

    def descriptors(self) -> list[int]:
        """What is open for those that wait."""
        return [number for _, numbers in self._waiting.values() for number in numbers]

    def add(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Takes the request up, and the descriptors out of the list."""
        self._waiting[message["id"]] = message, descriptors[:]
        descriptors.clear()

    def release(self, gone: str) -> None:
        """Nothing waits for this job any more."""
        self._rename(gone, "")

    def take_due(self) -> tuple[dict[str, Any], list[int]] | None:
        """Takes out one that waits for nothing; until then it counts as waiting, and may be dropped."""
        for identifier, (message, _) in self._waiting.items():
            if not message["after"]:
                return self._waiting.pop(identifier)
        return None

    def extend(self, identifier: str, until_s: float | None) -> None:
        """Moves the deadline of a job that waits."""
        if identifier in self._waiting:
            self._waiting[identifier][0]["lease_until_s"] = until_s

    def drop(self, identifier: str) -> bool:
        """Whether the job waited, and does not any more. What waits for it waits for what it waited for."""
        if identifier not in self._waiting:
            return False
        dropped, descriptors = self._waiting.pop(identifier)
        for descriptor in descriptors:
            os.close(descriptor)
        self._rename(identifier, dropped["after"])
        return True

    def _rename(self, before: str, after: str) -> None:
        for message, _ in self._waiting.values():
            if message["after"] == before:
                message["after"] = after
