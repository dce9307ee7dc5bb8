"""The words of a configuration, as a caller in Python gives them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conf.errors import CompositionError
from conf.utf8 import uses_utf8


def checked(overrides: Sequence[str]) -> tuple[str, ...]:
    """Raises CompositionError unless they are texts in a list: a text alone would be read letter by letter."""
    if not uses_utf8():
        raise CompositionError(
            f"this Python uses the encoding {sys.getfilesystemencoding()} for names of files, but a run's files are "
            "UTF-8; start it with 'python -X utf8', or with PYTHONUTF8=1"
        )
    if isinstance(overrides, str):
        raise CompositionError(f"overrides={overrides!r} must be a list of words; write [{overrides!r}]")
    if not isinstance(overrides, Sequence):
        raise CompositionError(
            f"overrides={overrides!r} must be a list of words KEY=VALUE, such as ['model=tiny', 'train.iterations=6']"
        )
    if wrong := [word for word in overrides if not isinstance(word, str)]:
        raise CompositionError(f"overrides has {wrong[0]!r}, which must be a string KEY=VALUE, such as 'model=tiny'")
    return tuple(overrides)
