"""What doctor and profile find, in JSON files that grow: what is known so far is always on the disk, whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_ext.contract.plan import Plan

FOLDER = "doctor"
"""In the run's folder."""


class Note:
    """One process writes it; any other reads it with `read`."""

    def __init__(self, path: Path, **values: Any) -> None:
        self._path = path
        self._values: Dict[str, Any] = {}
        self.tell(**values)

    def tell(self, **values: Any) -> None:
        """Adds to what is written, or replaces it."""
        self._values.update(values)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self._values) + "\n", encoding="utf-8")
        partial.replace(self._path)


def read(path: Path) -> Optional[Dict[str, Any]]:
    """What a note says so far; None while there is none."""
    try:
        content: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def of_node(plan: Plan, node: str) -> Path:
    return plan.folder / FOLDER / f"{node}.json"


def of_rank(plan: Plan, rank: int) -> Path:
    return plan.folder / FOLDER / f"rank-{rank:05d}.json"
