"""python -m launch.on_end RUN [alarms]: tells that a run has ended, if it has, or with `alarms` what happens meanwhile,
each kind once and by the same ways.

The agent of the run's last node starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from conf.errors import RunFolderError, TdppError
from conf.run_folder import gpu_lines
from conf.run_folder.run_files import read_part
from conf.run_folder.rundir import RunDir
from launch.control.notify import Notice, notify_end, send_once, settings_in
from launch.files.locks import owner_of
from launch.files.run_files import Faults
from launch.judge.alarms import alarms
from launch.observe.iterations import SampleWait, iterations_in, lines_in

FIRST_BYTES, LAST_BYTES = 1 << 20, 4 << 20
"""Read of the beginning and of the end of metrics.jsonl."""
GPU_BYTES = 1 << 18
WAIT_BYTES = 1 << 13
"""Read of both ends of a rank's waits: some 120 lines of a minute."""


def notify_alarms(run: RunDir, environment: Mapping[str, str] = os.environ) -> None:
    """Looks at a run that goes on, and tells what was not told before. Raises TdppError: the run's files are damaged,
    or others could have written what is to be run."""
    if not run.notify.is_file() or owner_of(run) != os.geteuid():
        return
    settings = settings_in(run)
    plan = run.read_plan()
    nodes = [node.name for node in plan.nodes]
    waits = {f"rank {rank} on {node.name}": _waits(run.rank_waits(rank)) for node in plan.nodes for rank in node.ranks}
    read = {node: Faults().tail(run.node_gpu(node), GPU_BYTES).decode(errors="replace") for node in nodes}
    gpus = {node: entries for node, text in read.items() if (entries := gpu_lines.entries(text))}
    waits = {rank: lines for rank, lines in waits.items() if lines}
    begun, newest = _head(run.metrics, FIRST_BYTES), Faults().tail(run.metrics, LAST_BYTES)
    for alarm in alarms([*iterations_in(begun)], [*iterations_in(newest)], gpus, waits):
        notice = Notice(run=run, state="running", rule=alarm.kind, reason=alarm.text, exit_code=None)
        send_once(run.path / f"alarm-{alarm.kind}.json", {"text": alarm.text}, settings, notice, environment)


def _waits(path: Path) -> list[SampleWait]:
    """The first and the last lines, more than an hour of each; of a short file some twice."""
    return [*lines_in(_head(path, WAIT_BYTES) + b"\n" + Faults().tail(path, WAIT_BYTES), SampleWait)]


def _head(path: Path, size: int) -> bytes:
    with suppress(OSError, RunFolderError):
        return read_part(path, 0, size)
    return b""


if __name__ == "__main__":
    try:
        tell = notify_alarms if sys.argv[2:] == ["alarms"] else notify_end
        tell(RunDir(Path(sys.argv[1])))
    except TdppError as error:
        sys.exit(f"the run's end could not be reported: {error}")
