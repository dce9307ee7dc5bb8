"""Calling Hydra's application with a command line: its arguments, its errors, and what it logs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TextIO

from launch.sweep.batches import CHOICE

_INFO = ("-i", "--info")
_FULL_ERROR = "HYDRA_FULL_ERROR"


@contextmanager
def called_with(argv: Sequence[str]) -> Iterator[None]:
    """Within it, an application of Hydra's reads these arguments, and raises its errors."""
    has_info = any(word.partition("=")[0] in _INFO for word in argv)
    with _arguments(_with_launcher(argv)), _errors_raised(), _info_printed() if has_info else nullcontext():
        yield


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads its arguments from sys.argv, and takes options only before or after all overrides."""
    before = sys.argv
    sys.argv = ["tdpp launch", *sorted(argv, key=lambda argument: argument not in ("-m", "--multirun"))]
    try:
        yield
    finally:
        sys.argv = before


def _with_launcher(argv: Sequence[str]) -> list[str]:
    """With our launcher beside the first override: Hydra takes overrides only in one row, and --info would take it."""
    overrides = (n for n, word in enumerate(argv) if word.startswith("~") or ("=" in word and not word.startswith("-")))
    place = next(overrides, 0)
    return [*argv[:place], CHOICE, *argv[place:]]


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Hydra then raises what it would otherwise print and exit with."""
    before = os.environ.get(_FULL_ERROR)
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    finally:
        del os.environ[_FULL_ERROR]
        if before is not None:
            os.environ[_FULL_ERROR] = before


@contextmanager
def _info_printed() -> Iterator[None]:
    """Hydra logs what --info asks for, and logging only notes that stdout is closed or full; here that is raised."""
    logger, handler = logging.getLogger("hydra"), _Stdout(sys.stdout)
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


class _Stdout(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Called where the error of `emit` is at hand."""
        raise
