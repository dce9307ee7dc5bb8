"""What a run tells: Megatron's log lines for people and their scripts, metrics.jsonl for programs."""

from __future__ import annotations

import json
import math
import mmap
import struct
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple
from typing import Counter as CounterOf

from megatron_ext.contract.files import json_line, write_atomic
from megatron_ext.contract.goal import SPLIT
from megatron_ext.contract.models.counts import flops_per_sample
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.evaluation import Evaluation
from megatron_ext.engine.goal import Spending
from megatron_ext.engine.results import Progress, StepResult
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE

_LENGTH = struct.Struct("Q")
ROOM = 2**20
"""Bytes for lines, some 2,000 iterations. Where that is not enough the oldest half is given up."""


class Unlogged:
    """A line for each iteration since the last one that was logged, in their order."""

    def __init__(self, room: int = ROOM) -> None:
        self._memory = mmap.mmap(-1, _LENGTH.size + room)
        self._room = room

    def add(self, line: str) -> None:
        """Adds a line. One that is cut off by the rank's death does not count."""
        content = line.encode() + b"\n"
        kept = self._lines()
        if len(kept) + len(content) > self._room:
            self.clear()
            kept = kept[kept.index(b"\n", len(kept) // 2) + 1 :]
            self._put(0, kept)
        self._put(len(kept), content)

    def clear(self) -> None:
        _LENGTH.pack_into(self._memory, 0, 0)

    def lines(self) -> List[str]:
        return self._lines().decode().splitlines()

    def _lines(self) -> bytes:
        begin, (length,) = _LENGTH.size, _LENGTH.unpack_from(self._memory)
        return self._memory[begin : begin + length]

    def _put(self, at: int, content: bytes) -> None:
        begin = _LENGTH.size + at
        self._memory[begin : begin + len(content)] = content
        _LENGTH.pack_into(self._memory, 0, at + len(content))


def iteration_line(plan: Plan, metrics: Dict[str, Any], batch: int, own: Mapping[str, Optional[float]] = {}) -> str:
    """One line in Megatron's format from one object of metrics.jsonl; like Megatron it leaves out what there is not.

    `batch` is the global one of the iteration, `own` are the metrics of the task.
    """
    loss, norm = metrics["loss"], metrics["grad_norm"]
    return "".join(
        [
            f" iteration {metrics['iteration']:8d}/{plan.train.iterations:8d} |",
            f" consumed samples: {metrics['consumed_samples']:12d} |",
            f" elapsed time per iteration (ms): {metrics['elapsed_ms']:.1f} |",
            f" learning rate: {metrics['learning_rate']:.3E} |",
            f" global batch size: {batch:5d} |",
            "" if loss is None else f" {'lm loss' if plan.model.tokens else 'loss'}: {loss:.6E} |",
            *(f" {name}: {value:.6E} |" for name, value in own.items() if value is not None),
            f" loss scale: {metrics['loss_scale']:.1f} |",
            "" if plan.rehearsal is not None else f" grad norm: {math.inf if norm is None else norm:.3f} |",
            f" number of skipped iterations: {metrics['skipped']:3d} |",
            f" number of nan iterations: {metrics['nan']:3d} |",
        ]
    )


def evaluation_line(iteration: int, evaluation: Evaluation) -> str:
    """One line in Megatron's format of what an evaluation gave."""
    values = "".join(f" {name}: {value:.6E} |" for name, value in evaluation.metrics.items())
    return f" validation at iteration {iteration} |{values} seconds: {evaluation.seconds:.3f} |"


def _evaluation_metrics(evaluation: Optional[Evaluation]) -> Dict[str, Optional[float]]:
    """What metrics.jsonl says of one."""
    if evaluation is None:
        return {}
    found = {f"{SPLIT}_{name}": _finite(value) for name, value in evaluation.metrics.items()}
    return {**found, "evaluation_s": evaluation.seconds}


class _IterationTotals:
    """Iterations of which a line tells."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._losses: List[float] = []
        self._own: Dict[str, List[float]] = {}
        self._loads: List[Sequence[Sequence[float]]] = []
        self._iterations = 0
        self._samples = 0
        self._skipped = 0
        self._lengths: CounterOf[Tuple[int, int]] = Counter()

    def add(self, result: StepResult, progress: Progress) -> None:
        self._iterations += 1
        self._samples += progress.global_batch_size
        model = self._plan.model
        self._lengths.update(
            (sizes.get(SEQUENCE, model.sequence_length), sizes.get(DECODER_SEQUENCE, model.decoder_tokens))
            for sizes in result.sizes
        )
        if result.skipped:
            self._skipped += 1
        elif result.loss is not None:
            self._losses.append(result.loss)
            if result.expert_loads:
                self._loads.append(result.expert_loads)
            for name, value in result.metrics.items():
                self._own.setdefault(name, []).append(value)

    def metrics(self, iteration: int, seconds: float, result: StepResult, progress: Progress) -> Dict[str, Any]:
        """Up to `iteration`, whose result is given; all of them took so long."""
        each = seconds / self._iterations
        norm = result.grad_norm
        return {
            "iteration": iteration,
            "unix": time.time(),
            "consumed_samples": progress.consumed_samples,
            "elapsed_ms": each * 1e3,
            "learning_rate": progress.learning_rate,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "loss_scale": result.loss_scale,
            "grad_norm": None if norm is None else _finite(norm),
            **self._throughput(each),
            "skipped": self._skipped,
            "nan": 0,
            **self.own(),
        }

    def own(self) -> Dict[str, Optional[float]]:
        """Metrics of the task."""
        return {name: _finite(sum(values) / len(values)) for name, values in self._own.items()}

    def expert_loads(self) -> List[List[float]]:
        """[layers][experts]; empty where there are none."""
        count = len(self._loads)
        return [[round(sum(of) / count, 4) for of in zip(*rows)] for rows in zip(*self._loads)]

    def _throughput(self, seconds: float) -> Dict[str, float]:
        """Returns the throughput of an iteration that takes so long; nobody knows the operations of a user's module."""
        plan = self._plan
        samples_per_s = self._samples / self._iterations / seconds
        tokens, operations = float(plan.model.tokens), flops_per_sample(plan.model)
        if self._lengths:
            models = {
                lengths: replace(plan.model, sequence_length=lengths[0], decoder_sequence_length=lengths[1])
                for lengths in self._lengths
            }
            count = sum(self._lengths.values())
            tokens = sum(models[one].tokens * times for one, times in self._lengths.items()) / count
            operations = sum(flops_per_sample(models[one]) * times for one, times in self._lengths.items()) / count
        found = {"tokens_per_s": tokens * samples_per_s} if tokens else {"samples_per_s": samples_per_s}
        if operations:
            found["tflops_per_rank"] = operations * samples_per_s / plan.world_size / 1e12
        return found


class TrainingLog:
    """Gathers iterations and, every `log_interval` of them, prints a line and appends to metrics.jsonl."""

    def __init__(
        self,
        plan: Plan,
        path: Path,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
        spending: Optional[Spending] = None,
        unlogged: Optional[Unlogged] = None,
        shows: bool = True,
    ) -> None:
        """What the file tells of iterations after `start` is dropped: they are trained anew. `clock` tells seconds;
        `unlogged` takes each iteration that has no line yet. Without `shows` it prints nothing."""
        keep_lines(path, start)
        keep_lines(plan.files.experts, start)
        self._plan = plan
        self._adapts = plan.adapt is not None and plan.adapt.measures
        self._path = path
        self._clock = clock
        self._spending = spending
        self._unlogged = unlogged
        self._shows = shows
        self._gathered = _IterationTotals(plan)
        self._since = self._before = clock()

    def add(
        self,
        iteration: int,
        result: StepResult,
        progress: Progress,
        evaluation: Optional[Evaluation] = None,
        last: bool = False,
    ) -> None:
        """Notes a finished iteration and, if there is one, the evaluation after it.

        An iteration that was evaluated, or is the `last` one, always has a line; the time that the evaluation took
        counts to no iteration.
        """
        self._gathered.add(result, progress)
        if iteration % self._plan.train.log_interval and not last and evaluation is None:
            self._note(iteration, result, progress)
            return
        now = self._clock() - (0.0 if evaluation is None else evaluation.seconds)
        metrics = {
            **self._gathered.metrics(iteration, now - self._since, result, progress),
            **_evaluation_metrics(evaluation),
            **self._run_metrics(progress),
        }
        _write(self._plan, self._path, metrics, progress.global_batch_size, self._gathered.own(), self._shows)
        loads = self._gathered.expert_loads()
        if loads:
            with self._plan.files.experts.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"iteration": iteration, "loads": loads}) + "\n")
        if evaluation is not None:
            print(evaluation_line(iteration, evaluation), flush=True)
        if self._unlogged is not None:
            self._unlogged.clear()
        self._gathered = _IterationTotals(self._plan)
        self._since = self._before = self._clock()

    def _note(self, iteration: int, result: StepResult, progress: Progress) -> None:
        if self._unlogged is None:
            return
        now, alone = self._clock(), _IterationTotals(self._plan)
        alone.add(result, progress)
        metrics = {**alone.metrics(iteration, now - self._before, result, progress), **self._run_metrics(progress)}
        self._unlogged.add(json.dumps([metrics, progress.global_batch_size, alone.own()]))
        self._before = now

    def _run_metrics(self, progress: Progress) -> Dict[str, float]:
        return {
            **({} if self._spending is None else {"cost": self._spending.dollars}),
            **({"global_batch_size": progress.global_batch_size} if self._adapts else {}),
        }


def log_unlogged(plan: Plan, unlogged: Unlogged) -> None:
    """A line for each iteration that was trained but not logged, once the rank that logs is gone. Their loss is a
    single iteration's, so the last ones show how a run diverged."""
    for metrics, batch, own in map(json.loads, unlogged.lines()):
        _write(plan, plan.files.metrics, metrics, batch, own)


def _write(
    plan: Plan, path: Path, metrics: Dict[str, Any], batch: int, own: Mapping[str, Optional[float]], shows: bool = True
) -> None:
    if shows:
        print(iteration_line(plan, metrics, batch, own), flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None


def keep_lines(path: Path, iteration: int) -> None:
    """Drops the lines of metrics.jsonl after `iteration`, and one that was cut short; damaged ones stay as they are."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _iteration(line) <= iteration]
    write_atomic(path, "".join(kept).encode(errors="surrogateescape"))


def _iteration(line: str) -> float:
    """Returns the iteration of a line; -1 for a damaged one."""
    found = (json_line(line) or {}).get("iteration")
    return found if isinstance(found, (int, float)) else -1
