"""Pages about runs, made from what is in their folders; and the same in a notebook: `run = reports.load("demo")`.

Printing help imports this package, so that pandas and Plotly are imported by its functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from reports.notebook import Run


def load(run: str | Path | None = None, runs_dir: str | Path = "runs", **sizes: int) -> Run:
    """A run or a log: see `reports.notebook.load`."""
    from reports import notebook

    return notebook.load(run, runs_dir, **sizes)


def load_sweep(*runs: str | Path, runs_dir: str | Path = "runs") -> pd.DataFrame:
    """Several runs, a row each: see `reports.notebook.load_sweep`."""
    from reports import notebook

    return notebook.load_sweep(*runs, runs_dir=runs_dir)
