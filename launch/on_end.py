"""python -m launch.on_end RUN [alarms]: tells that a run has ended, if it has, or with `alarms` what happens meanwhile,
each kind once and by the same ways.

The agent of the run's last node starts it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from conf.errors import RunFolderError, TdppError
from conf.run_folder import gpu_lines
from conf.run_folder.run_files import opened, read_tail
from conf.run_folder.rundir import RunDir
from conf.visible import visible
from launch.control.notify import Notice, notify_end, send, settings_in
from launch.files.owner import owner_of
from launch.judge.alarms import alarms
from launch.observe.iterations import SampleWait, iterations_in, lines_in

FIRST_BYTES, LAST_BYTES = 1 << 20, 4 << 20
"""Read of the beginning and of the end of metrics.jsonl."""
GPU_BYTES = 1 << 18
WAIT_BYTES = 1 << 13
"""Read of both ends of a rank's waits: some 120 lines of a minute."""


def notify_alarms(run: RunDir, environment: Mapping[str, str] = os.environ) -> None:
    """Looks at a run that goes on, and tells what was not told before.

    Raises:
        TdppError: the run's files are damaged, or others could have written what is to be run.
    """
    if not run.notify.is_file() or owner_of(run) != os.geteuid():
        return
    settings = settings_in(run)
    plan = run.read_plan()
    nodes = [node.name for node in plan.nodes]
    waits = {f"rank {rank} on {node.name}": _waits(run.rank_waits(rank)) for node in plan.nodes for rank in node.ranks}
    gpus = {node: entries for node in nodes if (entries := _gpu_entries(run.node_gpu(node)))}
    waits = {rank: lines for rank, lines in waits.items() if lines}
    for alarm in alarms(
        [*iterations_in(_head(run.metrics, FIRST_BYTES))], [*iterations_in(_tail(run.metrics, LAST_BYTES))], gpus, waits
    ):
        told = run.path / f"alarm-{alarm.kind}.json"
        try:
            os.close(os.open(told, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        notice = Notice(run=run, state="running", rule=alarm.kind, reason=alarm.text, exit_code=None)
        failures = send(settings, notice, environment)
        run.write_json(told, {"unix": time.time(), "text": alarm.text, "failures": failures})
        for failure in failures:
            print(visible(f"{run.name}: {failure}"), file=sys.stderr, flush=True)


def _waits(path: Path) -> list[SampleWait]:
    """The first and the last lines, more than an hour of each; of a short file some twice."""
    return [*lines_in(_head(path, WAIT_BYTES), SampleWait), *lines_in(_tail(path, WAIT_BYTES), SampleWait)]


def _head(path: Path, size: int) -> bytes:
    with suppress(OSError), opened(path) as file:
        return _whole_lines(file.read(size))
    return b""


def _tail(path: Path, size: int) -> bytes:
    with suppress(OSError, RunFolderError):
        content, cut = read_tail(path, size)
        return _whole_lines(content[content.find(b"\n") + 1 :] if cut else content)
    return b""


def _whole_lines(content: bytes) -> bytes:
    """A text without its last line, if that may still be being written."""
    return content[: content.rfind(b"\n") + 1]


def _gpu_entries(path: Path) -> tuple[gpu_lines.GpuEntry, ...]:
    with suppress(OSError, RunFolderError):
        return gpu_lines.entries(read_tail(path, GPU_BYTES)[0].decode(errors="replace"))
    return ()


if __name__ == "__main__":
    try:
        tell = notify_alarms if sys.argv[2:] == ["alarms"] else notify_end
        tell(RunDir(Path(sys.argv[1])))
    except TdppError as error:
        sys.exit(f"the run's end could not be reported: {error}")
