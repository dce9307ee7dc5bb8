"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# A machine that does other things, too, makes a test slow, not wrong.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")
