"""PipeDream's own files: the configuration of its driver, and the stages and ranks of a model, read and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conf.schema.model import Model

WORD = "pipedream="
"""The beginning of a word of the command line that names a driver's file."""
ModelOf = Callable[[Sequence[str]], Model]
"""The model that words of its group choose."""
