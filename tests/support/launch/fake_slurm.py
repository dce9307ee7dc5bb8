"""Slurm's commands with a queue in a folder: jobs wait in it until they are cancelled, and nothing ever starts them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPTS = {
    "sbatch": """
[ "$1" = --test-only ] && exit 0
id=$((100 + $(cat "$queue/count")))
echo $((id - 99)) > "$queue/count"
sed -n "s/^#SBATCH --comment='\\(.*\\)'/\\1/p" "$1" > "$queue/$id.job"
echo "Submitted batch job $id"
""",
    "squeue": """
for word; do [ "$word" = '--format=%i|%k' ] && by_comment=yes; done
for job in "$queue"/*.job; do
    [ -e "$job" ] || continue
    id=$(basename "$job" .job)
    if [ "$by_comment" ]; then echo "$id|$(cat "$job")"; else echo "$id|PENDING|Priority|5:00"; fi
done
""",
    "scancel": """
for word; do rm -f "$queue/$word.job"; done
""",
    "sacct": """
echo "Slurm accounting storage is disabled" >&2
exit 1
""",
}


def put_on_path(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Returns where the queue is: a file for each job that waits, `<id>.job`."""
    queue, programs = folder / "queue", folder / "bin"
    queue.mkdir()
    programs.mkdir()
    (queue / "count").write_text("0")
    for name, script in SCRIPTS.items():
        (programs / name).write_text(f"#!/bin/sh\nqueue='{queue}'\n{script}")
        (programs / name).chmod(0o755)
    patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return queue
