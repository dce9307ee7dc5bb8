"""What `launch` cannot do, in one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conf.errors import TdppError
from megatron_ext.contract.errors import EngineError


class LaunchError(TdppError):
    """A run that cannot be started, watched or stopped."""


@contextmanager
def of_engine() -> Iterator[None]:
    """Errors of the engine become errors of this room."""
    try:
        yield
    except EngineError as error:
        raise LaunchError(str(error)) from error
