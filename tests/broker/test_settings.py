"""Settings: who wins over whom, what is refused and how it is told; folders that nobody else can reach into."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gpulayer_broker.errors import BadSetting
from gpulayer_broker.settings import Settings, load_settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "project" / "below").mkdir(parents=True)
    return tmp_path


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)


def load(home: Path, flags: dict[str, Any] | None = None, /, **environ: str) -> Settings:
    return load_settings(flags, environ={"HOME": str(home), **environ}, folder=home / "project" / "below")


def test_the_defaults_are_those_of_the_contract(home: Path) -> None:
    settings = load(home)

    assert settings == Settings()
    assert (settings.lease_s, settings.heartbeat_s, settings.lease_grace_s, settings.term_grace_s) == (
        60,
        10,
        10,
        10,
    )
    assert settings.namespace == "default"
    assert settings.private


def test_flag_wins_over_environment_over_project_over_user_file(home: Path) -> None:
    write(
        home / ".config" / "gpulayer",
        'namespace = "user"\nlease_s = 61\nheartbeat_s = 11\nidle_stop_s = "2m"',
    )
    write(home / "project" / ".gpulayer", 'namespace = "project"\nlease_s = 62\nheartbeat_s = 12')

    settings = load(
        home, {"namespace": "flag", "lease_s": None}, GPULAYER_NAMESPACE="env", GPULAYER_LEASE_S="63"
    )

    assert settings.namespace == "flag"
    assert settings.lease_s == 63
    assert settings.heartbeat_s == 12
    assert settings.idle_stop_s == 120


def test_the_nearest_project_file_counts(home: Path) -> None:
    write(home / "project" / ".gpulayer", 'namespace = "far"')
    write(home / "project" / "below" / ".gpulayer", 'namespace = "near"')

    assert load(home).namespace == "near"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lese_s = 3", r"config\.toml: unknown setting 'lese_s': did you mean 'lease_s'\?"),
        ("lease_s = 'soon'", r"config\.toml: lease_s: 'soon' is not a duration"),
        ("log_tail_bytes = '3 parsecs'", r"config\.toml: log_tail_bytes: '3 parsecs' is not a size"),
        ("source_files = 1.5", r"config\.toml: source_files: '1\.5' is not a whole number"),
        ("private = 'maybe'", r"config\.toml: private: 'maybe' is neither on nor off"),
        ("redis_url = 'ftp://x'", r"config\.toml: redis_url: queue address 'ftp://x': expected redis://"),
        ("namespace = 3", r"config\.toml: namespace: '3' is not text"),
        ("namespace =", r"config\.toml is not TOML"),
        ("namespace = " + "[" * 5000, r"config\.toml is not TOML"),
    ],
)
def test_a_bad_file_is_told_by_file_and_key_in_one_line(home: Path, text: str, told: str) -> None:
    write(home / "project" / ".gpulayer", text)

    with pytest.raises(BadSetting, match=told) as raised:
        load(home)
    assert "\n" not in str(raised.value)


def test_a_bad_variable_is_named(home: Path) -> None:
    with pytest.raises(BadSetting, match="GPULAYER_LEASE_S: 'x' is not a duration"):
        load(home, GPULAYER_LEASE_S="x")


def test_variables_of_jobs_are_no_settings(home: Path) -> None:
    assert load(home, GPULAYER_JOB_ID="j_0", GPULAYER_LESE_S="3", GPULAYER_LEASE_S="") == Settings()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"heartbeat_s": 40}, "at most half of lease_s"),
        ({"lease_s": 0}, "lease_s is 0: it is at least"),
        ({"namespace": "a}b"}, "namespace"),
        ({"namespace": ""}, "namespace"),
        ({"lost_workers": "0"}, "lost_workers is 0: it is at least 1"),
    ],
)
def test_a_value_without_sense_is_refused(home: Path, values: dict[str, Any], told: str) -> None:
    with pytest.raises(BadSetting, match=told):
        load(home, values)


def test_the_private_set_up_can_be_refused(home: Path) -> None:
    assert not load(home, GPULAYER_PRIVATE="off").private


def test_a_password_in_the_address_is_not_in_the_repr(home: Path) -> None:
    settings = load(home, GPULAYER_REDIS_URL="redis://u:s3cret@host/0")

    assert settings.redis_url == "redis://u:s3cret@host/0"
    assert "s3cret" not in repr(settings)


def test_a_project_file_that_others_can_write_is_not_read(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(home / "project" / ".gpulayer", "namespace = 'planted'")
    os.chmod(home / "project" / ".gpulayer" / "config.toml", 0o666)

    with caplog.at_level(logging.WARNING):
        assert load(home).namespace == "default"
    assert "not read" in caplog.text


def test_a_project_file_of_another_user_is_not_read(home: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    write(home / "project" / ".gpulayer", "namespace = 'planted'")
    os.chown(home / "project" / ".gpulayer" / "config.toml", 12345, 12345)

    assert load(home).namespace == "default"


def test_changed_values_are_read_like_a_files() -> None:
    assert Settings().changed(lease_s="2m", heartbeat_s=1).lease_s == 120
    with pytest.raises(BadSetting, match="unknown setting 'leese_s'"):
        Settings().changed(leese_s=1)


def test_settings_travel_to_another_process_by_its_environment(home: Path) -> None:
    settings = load(home, {"lease_s": 2.5, "heartbeat_s": 0.5, "private": False, "log_tail_bytes": 8192})

    assert load(home, None, **settings.as_environment()) == settings
    assert Settings().as_environment() == {}


RUBBISH = ("rubbish", "-5", "0", "nan", "1" * 5000, " ", "5 parsecs", "\udcff", "a\nb")


@pytest.mark.parametrize("name", [each.name for each in fields(Settings)])
def test_a_value_without_sense_is_told_in_one_short_line_that_names_its_variable(
    home: Path, name: str
) -> None:
    variable = f"GPULAYER_{name.upper()}"
    refusals = []
    for value in RUBBISH:
        try:
            load(home, **{variable: value})
        except BadSetting as error:
            refusals.append(str(error))

    assert len(refusals) >= 4
    for line in refusals:
        assert line.startswith(f"{variable}: ")
        assert len(line) < 300
        assert "\n" not in line


def test_what_two_settings_are_beside_each_other_names_both_places(home: Path) -> None:
    write(home / "project" / ".gpulayer", "lease_s = 6")

    with pytest.raises(BadSetting, match="heartbeat_s \\(4\\) is at most half of lease_s \\(6\\)") as refused:
        load(home, GPULAYER_HEARTBEAT_S="4", GPULAYER_IDLE_STOP_S="5m")

    places = str(refused.value).partition(": heartbeat_s")[0]
    assert places == f"{home / 'project' / '.gpulayer' / 'config.toml'}, GPULAYER_HEARTBEAT_S"
