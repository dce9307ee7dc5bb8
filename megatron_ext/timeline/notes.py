"""What doctor and profile find, in JSON files that grow: what is known so far is always on the disk, whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional

from megatron_ext.contract.files import write_json


class GrowingNote:
    """One process writes it; any other reads it with `read`."""

    def __init__(self, path: Path, **values: Any) -> None:
        self._path = path
        self._values: Dict[str, Any] = {}
        self.update(**values)

    def update(self, **values: Any) -> None:
        """Adds to what is written, or replaces it."""
        self._values.update(values)
        write_json(self._path, self._values)


def read(path: Path) -> Optional[Dict[str, Any]]:
    """What a note says so far; None while there is none."""
    try:
        content: Dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content
