"""Laws are tried on many examples without a limit on each one's time, which a busy machine would break."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
