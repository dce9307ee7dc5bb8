"""Preparing takes as much memory for much text as for little."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def peak_kib(tmp_path: Path, megabytes: int) -> int:
    source = tmp_path / f"{megabytes}.jsonl.gz"
    with gzip.open(source, "wt", compresslevel=1) as file:
        for number in range(megabytes * 1000):
            file.write(json.dumps({"text": f"{number} " + "x" * 980}) + "\n")
    code = (
        f"from data_prep.cli import main; main({['prepare', '--source', str(source), '--output', str(source)]})\n{PEAK}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    assert peak_kib(tmp_path, 60) < peak_kib(tmp_path, 6) + 10 * 1024
