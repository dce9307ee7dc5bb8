"""metrics.jsonl as it grows, and as a start of the run cuts it back to the checkpoint that it goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class MetricsFile:
    """Reads each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._offset = 0
        self._last = -1

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines since the last call, and whether the file has been cut back since: then they are all of its lines.

        What is not a metrics line, or not whole yet, is left out.
        """
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                known = (status.st_dev, status.st_ino)
                cut = self._file is not None and (known != self._file or status.st_size < self._offset)
                if cut:
                    self._offset, self._last = 0, -1
                self._file = known
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return [], False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in map(_parsed, whole.splitlines()):
            if line is not None and line["iteration"] > self._last:
                self._last = line["iteration"]
                found.append(line)
        return found, cut


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and type(line.get("iteration")) is int else None
