"""What calls of one lane agree in: all that a record says of its job, but for the arguments of the call.

The queue goes by what the submitter named as the lane; whoever runs several calls as one looks for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def without_arguments(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A job as its record has it, to be compared with another's; a command is never what a call is."""
    return {**raw, "call": {**(raw.get("call") or {}), "arguments": None}}
