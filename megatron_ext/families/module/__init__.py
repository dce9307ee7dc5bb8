"""A module of the user's own, of which only the number of blocks is known without torch."""

from __future__ import annotations

from megatron_ext.contract.models.model import SIZES, Family


class _Module(Family):
    name = "module"
    summary = "A module from your own Python file (docs/your-model.md)."
    user_code = True
    measured = True
    counts_all = True
    lacks = SIZES
    options = ("code", "code_digest", "capture")


FAMILY = _Module()
