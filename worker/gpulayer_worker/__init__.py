"""The worker: what a machine has, claiming, processes, logs and outputs. It knows the broker and nothing above.

An existing Dramatiq app lets its own worker processes offer the machine's GPUs by `offer_devices(broker)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer_worker.membership import granted_devices, offer_devices

__all__ = ["granted_devices", "offer_devices"]


def __getattr__(name: str) -> Any:
    """Loaded when first asked for: the probe's child and the jobs' fork server start through this package."""
    if name in __all__:
        from gpulayer_worker import membership

        return getattr(membership, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
