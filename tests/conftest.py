"""What holds for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# A machine that does other things, too, makes a test slow, not wrong.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")

# A shell without job control has what it starts in the background ignore Ctrl-C, and with it all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
