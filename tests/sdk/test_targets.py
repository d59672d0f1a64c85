"""Where submits go."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulayer.client import Client
from gpulayer.targets import resolve_target
from gpulayer_broker.errors import BadSetting, ConfigError, QueueUnreachable, UnknownName, UnsafeEviction
from tests.servers import QueueServer

HERE = {"HOME": "/nonexistent"}


def test_nothing_said_means_the_private_set_up() -> None:
    target = resolve_target(environ=HERE)

    assert target.is_private
    assert target.name == "local"


def test_the_environment_names_a_queue() -> None:
    target = resolve_target(environ={**HERE, "GPULAYER_REDIS_URL": "redis://queue:6380/1"})

    assert not target.is_private
    assert str(target.endpoint()) == "redis://queue:6380/1"


def test_a_flag_wins_over_a_target_and_both_over_the_environment() -> None:
    environ = {**HERE, "GPULAYER_REDIS_URL": "redis://one", "GPULAYER_TARGET": "local"}

    assert resolve_target(environ=environ).is_private
    assert resolve_target("local", environ={**HERE, "GPULAYER_REDIS_URL": "redis://one"}).is_private
    assert resolve_target("local", redis="redis://two", environ=environ).url == "redis://two"


def test_a_name_that_nobody_saved_is_told() -> None:
    with pytest.raises(UnknownName, match="no target is saved as 'cloud'"):
        resolve_target("cloud", environ=HERE)


def test_a_server_s_address_is_not_passed_over_in_silence() -> None:
    with pytest.raises(ConfigError, match="GPULAYER_URL"):
        resolve_target(environ={**HERE, "GPULAYER_URL": "https://server"})


def test_the_private_set_up_can_be_refused() -> None:
    with pytest.raises(ConfigError, match="GPULAYER_PRIVATE"):
        resolve_target(environ={**HERE, "GPULAYER_PRIVATE": "off"})


def test_a_job_starts_no_private_set_up_of_its_own() -> None:
    with pytest.raises(ConfigError, match="this is job j_1"):
        resolve_target(environ={**HERE, "GPULAYER_JOB_ID": "j_1"})


def test_inside_a_job_of_a_private_set_up_its_queue_and_store_are_meant() -> None:
    inside = {
        "GPULAYER_JOB_ID": "j_1",
        "GPULAYER_REDIS_URL": "unix:///run/q",
        "GPULAYER_STORE": "/state/store",
    }
    for name in (None, "local"):
        target = resolve_target(name, environ={**HERE, **inside})
        assert (target.url, str(target.store)) == ("unix:///run/q", "/state/store")
        assert target.is_trusted
        assert not target.is_private

    named = resolve_target(redis="redis://other", environ={**HERE, **inside})
    assert not named.is_trusted


def test_an_address_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadSetting, match="redis://"):
        resolve_target(redis="http://queue", environ=HERE)


def test_a_queue_that_is_not_there_is_told_at_once() -> None:
    with (
        Client(redis="unix:///tmp/gpulayer-no-such.sock") as client,
        pytest.raises(QueueUnreachable, match="no queue answers at unix:///tmp/gpulayer-no-such"),
    ):
        client.jobs()


def test_a_client_connects_when_it_is_first_used() -> None:
    client = Client(redis="unix:///tmp/gpulayer-no-such.sock")

    assert "redis" in repr(client)
    client.close()


def test_a_server_that_would_lose_jobs_is_refused(queue_server: Callable[..., QueueServer]) -> None:
    server = queue_server("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")

    with (
        Client(redis=server.endpoint.url) as client,
        pytest.raises(UnsafeEviction, match="allkeys-lru"),
    ):
        client.jobs()


def test_a_variable_without_sense_is_named_when_a_client_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULAYER_LEASE_S", "long")

    with Client() as client, pytest.raises(BadSetting, match="GPULAYER_LEASE_S: 'long' is not a duration"):
        client.jobs()
