"""Where submits go: this user's private set-up, or a queue at an address.

The nearest place wins: `--redis`, `--target`, GPULAYER_TARGET, GPULAYER_REDIS_URL, the project's and the user's
config.toml, and `local`, the private set-up, where nothing says otherwise. Inside a job of a private set-up `local` is
that set-up, whose worker told the job where it is. Nothing is connected here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.endpoint import Endpoint
from gpulayer_broker.errors import ConfigError, UnknownName
from gpulayer_broker.settings import Settings, load_settings

LOCAL = "local"


@dataclass(frozen=True)
class Target:
    """A queue to submit to. `url` is None for the private set-up, which is started when it is needed.

    `store` is the folder of the blobs of the private set-up that a job runs on, whose queue its own jobs go to.
    """

    name: str
    settings: Settings
    url: str | None = None
    store: Path | None = None

    @property
    def is_private(self) -> bool:
        """Whether it is this user's own set-up, seen from outside: started and healed by its clients."""
        return self.url is None

    @property
    def is_trusted(self) -> bool:
        """Whether this user alone owns queue and workers, so that what they send may be unpickled."""
        return self.is_private or self.store is not None

    def endpoint(self) -> Endpoint:
        """Where the queue answers now; starts or heals the private set-up."""
        if self.url is not None:
            return Endpoint.parse(self.url)
        from gpulayer.private import ensure_private

        return ensure_private(self.settings)


def resolve_target(
    target: str | None = None,
    *,
    redis: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Target:
    """The target that flags, environment and files name."""
    if redis is not None:
        Endpoint.parse(redis)
    settings = load_settings({"redis_url": redis}, environ=environ)
    if redis:
        return Target("redis", settings, settings.redis_url)
    name = target or environ.get("GPULAYER_TARGET") or ""
    if name not in ("", LOCAL):
        raise UnknownName(
            f"no target is saved as '{name}': '{LOCAL}' is this user's own, --redis URL names a queue",
            value=name,
        )
    if inside := _from_inside(settings, environ):
        return inside
    if not name and environ.get("GPULAYER_URL"):
        raise ConfigError(
            "GPULAYER_URL names a server, which this release cannot use: unset it, or give --redis URL"
        )
    if not name and settings.redis_url:
        return Target("redis", settings, settings.redis_url)
    _refuse_private(settings, environ)
    return Target(LOCAL, settings)


def _from_inside(settings: Settings, environ: Mapping[str, str]) -> Target | None:
    """The queue that a job of a private set-up was given by its worker."""
    store = environ.get("GPULAYER_STORE")
    if environ.get("GPULAYER_JOB_ID") and store and settings.redis_url:
        return Target("job", settings, settings.redis_url, Path(store))
    return None


def _refuse_private(settings: Settings, environ: Mapping[str, str]) -> None:
    if not settings.private:
        raise ConfigError(
            "no queue is given and the private set-up is switched off (GPULAYER_PRIVATE): "
            "give --redis URL or GPULAYER_REDIS_URL"
        )
    if environ.get("GPULAYER_JOB_ID"):
        # A job's HOME is its scratch folder: a set-up started there would be nobody's.
        raise ConfigError(
            f"this is job {environ['GPULAYER_JOB_ID']}, which has no queue of its own: "
            "pass GPULAYER_REDIS_URL on with --env to submit from inside it"
        )
