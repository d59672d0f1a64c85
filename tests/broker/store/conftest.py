"""A store and a folder to ship, for the tests of what travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer_broker.store.local import LocalStore


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"
