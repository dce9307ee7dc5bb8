"""tdpp for Python: start, load and search from a notebook or a script of your own (docs/python.md).

Importing it imports nothing else before one of its names is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conf.errors import TdppError
    from reports.notebook import load_sweep
    from tdpp.planning import compose, search
    from tdpp.runs import Run, launch, load

__all__ = ["Run", "TdppError", "compose", "launch", "load", "load_sweep", "search"]


def __getattr__(name: str) -> object:
    """The names above, imported when they are asked for (PEP 562)."""
    match name:
        case "TdppError":
            module = import_module("conf.errors")
        case "load_sweep":
            module = import_module("reports.notebook")
        case "compose" | "search":
            module = import_module("tdpp.planning")
        case "Run" | "launch" | "load":
            module = import_module("tdpp.runs")
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
