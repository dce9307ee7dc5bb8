"""Preparing takes as much memory for much text as for little."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
"""In KiB. The one of getrusage would begin with that of the process that started it."""


def peak_kib(tmp_path: Path, megabytes: int) -> int:
    source = tmp_path / f"{megabytes}.jsonl.gz"
    with gzip.open(source, "wt", compresslevel=1) as file:
        for number in range(megabytes * 1000):
            file.write(json.dumps({"text": f"{number} " + "x" * 980}) + "\n")
    argv = ["prepare", "--source", str(source), "--output", str(source)]
    code = f"from launch.commands.data import main; main({argv})\n{PEAK}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    assert peak_kib(tmp_path, 60) < peak_kib(tmp_path, 6) + 10 * 1024
