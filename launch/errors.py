"""What `launch` cannot do, in one message."""

from __future__ import annotations

from conf.errors import TdppError


class LaunchError(TdppError):
    """A run that cannot be started, watched or stopped."""
