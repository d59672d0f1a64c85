"""GPUlayer: send a command or a function to any machine that can run it.

    import gpulayer as gl

    @gl.remote(accelerator="cuda", gpu_memory="24GB", frameworks={"torch": ">=2.4"})
    def train(rate: float) -> float: ...

    train(0.1)                            # runs here
    train.delay(0.1).result()             # runs where it fits
    train.map([0.1, 0.01]).results()      # all at once

Every name is imported when it is first used, so that `import gpulayer` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers take it; `typing` takes longer to load than all else here
if TYPE_CHECKING:
    from typing import Any

    from gpulayer.client import Client
    from gpulayer.handle import Job
    from gpulayer.inside import current_job, progress
    from gpulayer.mapping import Item, MapResult
    from gpulayer.remote_function import RemoteFunction, remote
    from gpulayer_broker.errors import (
        BadRequirement,
        BadSetting,
        BadSize,
        BadSource,
        BadStateFolder,
        BlobCorrupt,
        BlobMissing,
        ConfigError,
        FormatTooNew,
        GpulayerError,
        HostileTree,
        IdempotencyConflict,
        JobCancelled,
        JobError,
        JobFailed,
        JobNotFound,
        JobTimedOut,
        MustFit,
        NotAllowed,
        NotPicklable,
        QueueFull,
        QueueUnreachable,
        RemoteError,
        ResultNotPicklable,
        ServerOutOfMemory,
        ServerTooOld,
        SourceTooLarge,
        StoreError,
        TooManyRequirements,
        Unavailable,
        UnknownName,
        UnsafeEviction,
        UsageError,
        WaitTimeout,
        WorkerLost,
    )

__all__ = [
    "BadRequirement",
    "BadSetting",
    "BadSize",
    "BadSource",
    "BadStateFolder",
    "BlobCorrupt",
    "BlobMissing",
    "Client",
    "ConfigError",
    "FormatTooNew",
    "GpulayerError",
    "HostileTree",
    "IdempotencyConflict",
    "Item",
    "Job",
    "JobCancelled",
    "JobError",
    "JobFailed",
    "JobNotFound",
    "JobTimedOut",
    "MapResult",
    "MustFit",
    "NotAllowed",
    "NotPicklable",
    "QueueFull",
    "QueueUnreachable",
    "RemoteError",
    "RemoteFunction",
    "ResultNotPicklable",
    "ServerOutOfMemory",
    "ServerTooOld",
    "SourceTooLarge",
    "StoreError",
    "TooManyRequirements",
    "Unavailable",
    "UnknownName",
    "UnsafeEviction",
    "UsageError",
    "WaitTimeout",
    "WorkerLost",
    "current_job",
    "progress",
    "remote",
]

_HOMES = {
    "Client": "gpulayer.client",
    "Item": "gpulayer.mapping",
    "Job": "gpulayer.handle",
    "MapResult": "gpulayer.mapping",
    "RemoteFunction": "gpulayer.remote_function",
    "current_job": "gpulayer.inside",
    "progress": "gpulayer.inside",
    "remote": "gpulayer.remote_function",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gpulayer")
    if name not in __all__:
        raise AttributeError(f"module 'gpulayer' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES.get(name, "gpulayer_broker.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
