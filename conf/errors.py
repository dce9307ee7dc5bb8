"""The base of every error that a user can cause and can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from conf.visible import shortened


class TdppError(Exception):
    """A problem told in one message: the key, its value, the rule, the way out.

    The command line prints it without a traceback and exits with `exit_code`. Each room has one subclass;
    any other exception is a fault of ours and keeps its traceback.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        """What the message quotes may be as long as a file: it is shortened."""
        super().__init__(shortened(message))


class UsageError(TdppError):
    """A command line that no command takes: an unknown option, or a word that is missing."""

    exit_code = 2


class ConfigError(TdppError):
    """A configuration that breaks a rule of `conf`."""


class CompositionError(ConfigError):
    """Words or files that cannot be composed. Its message names the word, or the file and its line."""


class RunFolderError(TdppError):
    """A run folder that cannot be found, made or read."""


class OutputError(TdppError):
    """A file that a command is to write, and cannot."""


class ClosedError(RunFolderError):
    """A part of a run that this user may not read."""


@contextmanager
def reworded(
    kind: type[Exception], before: str, after: str = "", of: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """An error of `of` within becomes one of `kind`, whose message has the reason between `before` and `after`."""
    try:
        yield
    except of as error:
        from megatron_ext.contract.files import why  # few commands fail

        raise kind(f"{before}{why(error)}{after}") from error
