"""Pages about runs, made from what is in their folders; and the same in a notebook: `run = reports.load("demo")`.

Printing help imports this package, so that pandas and Plotly are imported once one of its functions is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.notebook import load, load_sweep

__all__ = ["load", "load_sweep"]


def __getattr__(name: str) -> object:
    """`load` and `load_sweep` are those of `reports.notebook` (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reports import notebook

    return getattr(notebook, name)
