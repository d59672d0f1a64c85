"""What several modules of this folder begin with: a queue that knows one kind of CPU job, driven by hand.

Laws are tried on many examples without a limit on each one's time, which a busy machine would break.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from gpulayer_broker.connection import Link
from tests.queueing import Hand, signature

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    """Jobs of the plain CPU signature fit workers of class k1."""
    hand = Hand(link, root)
    hand.introduce(signature(), {"k1": ()})
    return hand
