"""Our engine on one GPU: a prepared plan, in a run folder of its own, started as a node's agent starts it."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.profiled import Result, counts_of_file
from megatron_ext.contract.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, TIMED = 5, 14
BATCHES = WARM_UP + TIMED + 1
"""Iterations of a run; the last one is traced, and so not timed."""
WITH_PARTS = (
    "import sys; from megatron_ext.parallel import cross_entropy as of; of.PART = int(sys.argv.pop(1)); "
    "of.fuses = lambda device: False; "
    "from megatron_ext.worker import main; sys.exit(main(sys.argv[1:]))"
)
"""The worker with another size of the loss's parts, which no plan names."""


@contextmanager
def run_folder(case: Path, device: str, changes: dict[str, Any]) -> Iterator[Path]:
    """The prepared plan of a case in a new run folder, for this device and with these changes of plan.json; of its
    `train`, those of `changes["train"]`."""
    content = json.loads((case / "plan.json").read_text())
    content |= {"device": device, "data_prefix": str(case / "tokens"), "timeline": True, **changes}
    content["train"] = json.loads((case / "plan.json").read_text())["train"] | changes.get("train", {})
    with tempfile.TemporaryDirectory() as folder:
        for part in ("nodes", "events", "errors", "checkpoints", "memory", "traces"):
            (Path(folder) / part).mkdir()
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32) + "\n")
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps(content))
        yield plan


def losses(plan: Path) -> list[float]:
    """What the run of this plan has logged, an iteration each."""
    return [json.loads(line)["loss"] for line in Plan.read(plan).files.metrics.read_text().splitlines()]


def ours(case: Path, device: str, changes: dict[str, Any], part: int | None = None) -> Result:
    """Trains a prepared case; rates are those of its log lines after the warm-up, counts those of the last iteration.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    with run_folder(case, device, {"trace_iteration": BATCHES, **changes}) as path:
        start = ["-m", "megatron_ext.worker"] if part is None else ["-c", WITH_PARTS, str(part)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *start, str(path), "0"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout[-1000:] + done.stderr[-3000:])
        files = Plan.read(path).files
        lines = [json.loads(line) for line in files.metrics.read_text().splitlines()]
        mib = json.loads(files.rank_memory(0).read_text())["mib"]
        return Result(
            statistics.median(line["tokens_per_s"] for line in lines[WARM_UP : WARM_UP + TIMED]),
            mib,
            [line["loss"] for line in lines],
            counts_of_file(files.rank_trace(0, BATCHES)),
        )
