"""Whether the disk of the private set-up has room: without it no server starts, and one that runs takes nothing new.

What was accepted is kept meanwhile, and goes on when there is room again.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.folders import Folders
from gpulayer_broker.units import KIB, format_size

# What a server writes before it answers, with much to spare.
LEAST_BYTES = 256 * KIB


def full_disk(folders: Folders) -> str | None:
    """One line where there is no room for what a set-up writes when it starts; None where there is."""
    with suppress(OSError):
        found = os.statvfs(folders.state)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < LEAST_BYTES:
            return (
                f"the disk of {folders.state} is full ({format_size(free_bytes)} free): free space there; what was "
                "accepted is kept, and goes on then"
            )
    return None


def check_room(folders: Folders) -> None:
    """QueueUnreachable, which passes when there is room, on a full disk."""
    if problem := full_disk(folders):
        raise QueueUnreachable(problem)
