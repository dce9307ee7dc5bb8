"""Our engine and its profile on one GPU: a prepared plan, in a run folder of its own, started as a node's agent starts
it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.profiled import Result, counts_of_file
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import PROFILE

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, TIMED = 5, 10
ITERATIONS = WARM_UP + TIMED + 1
"""Iterations of a run, unless its case says more; the last one is traced, the TIMED before it are timed."""


@contextmanager
def run_folder(case: Path, device: str, changes: Mapping[str, Any]) -> Iterator[Path]:
    """The prepared plan of a case in a new run folder, for this device and with these changes of plan.json; of its
    `train`, those of `changes["train"]`. Its data lie in the folder `data` beside the case's."""
    content = json.loads((case / "plan.json").read_text())
    data, train = case.parent / "data" / Path(content["data_prefix"]).name, content["train"]
    content |= {"device": device, "data_prefix": str(data), "timeline": True, **changes}
    content["train"] = train | changes.get("train", {})
    with tempfile.TemporaryDirectory() as folder:
        for part in ("nodes", "events", "errors", "checkpoints", "memory", "traces"):
            (Path(folder) / part).mkdir()
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32) + "\n")
        plan = Path(folder) / "plan.json"
        plan.write_text(json.dumps(content))
        yield plan


def python(
    words: Sequence[str | Path],
    seconds: float | None = None,
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] = {},
) -> str:
    """What this Python prints with these words, in the repository's root; it finds modules in `paths`, too.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
        TimeoutError: it took longer, and was ended with all that it had started.
    """
    found = [os.environ.get("PYTHONPATH", ""), str(ROOT), *map(str, paths)]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found)), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"ended after {seconds:.0f} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise RuntimeError(printed[-1000:] + errors[-3000:])
    return printed


def losses(plan: Path) -> list[float]:
    """What the run of this plan has logged, an iteration each."""
    return [line["loss"] for line in _log(plan)]


def _log(plan: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Plan.read(plan).files.metrics.read_text().splitlines()]


def ours(
    case: Path, device: str, seconds: float | None, changes: Mapping[str, Any], altered: Sequence[str] = ()
) -> Result:
    """Trains a prepared case; rates are those of its log lines after the warm-up, counts those of the last iteration.
    `altered` are words of `benchmarks.gpu.altered`.

    Raises:
        RuntimeError, TimeoutError: as `python`.
    """
    iterations = Plan.read(case / "plan.json").train.iterations
    worker = ["megatron_ext.worker"] if not altered else ["benchmarks.gpu.altered", *altered]
    with run_folder(case, device, {"trace_iteration": iterations, **changes}) as path:
        python(["-m", *worker, path, "0"], seconds)
        plan, lines = Plan.read(path), _log(path)
        each_s = statistics.median(line["elapsed_ms"] for line in lines[-1 - TIMED : -1]) / 1e3
        return Result(
            plan.global_batch_size / each_s,
            json.loads(plan.files.rank_memory(0).read_text())["mib"],
            [line["loss"] for line in lines],
            counts_of_file(plan.files.rank_trace(0, iterations)),
        )


def profile(case: Path, device: str, seconds: float | None) -> dict[str, Any]:
    """What `megatron_ext.profile` notes of the request that was prepared with the plan.

    Raises:
        RuntimeError, TimeoutError: as `python`.
    """
    with run_folder(case, device, {}) as path:
        request = (case / "request.json").read_text()
        python(["-m", "megatron_ext.profile", path, "0"], seconds, environment={PROFILE: request})
        return json.loads(Plan.read(path).files.profile_rank(0).read_text())
