"""Megatron's log line of an iteration, which tdpp's engine and Megatron-LM, old and new, write (docs/formats.md)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_TASK = r"(?:P\d{1,4} )? {0,7}\d{1,7}: (?!\d+\.\d\d\s*$)"
"""Of `srun --label`. A number and a time alone are the second half of `     rank  0: 957.35`, into which another
process printed (reports/readers/cut_lines.py)."""
_RANK = r"\[[A-Za-z_][\w-]{0,31}\d{1,7}\]:"
"""Of torchrun: `[default7]:`, `[rank15]:`."""
_LOGGER = r"(?:DEBUG|INFO|WARNING):[\w.]{1,100}:"
_LABELS = rf"(?:{_TASK}|{_RANK}|{_LOGGER})*"
"""What may stand before a line."""
_LABEL = re.compile(_LABELS)
_HEAD = re.compile(rf"{_LABELS}\s*(?:\[[^\]]*\]\s*)?iteration\s+(\d{{1,12}})/\s*(\d{{1,12}}) \|")
"""Megatron-LM of today puts the time in brackets before it."""

_EVALUATION = re.compile(r" validation at iteration [0-9]{1,12} \|")


@dataclass(frozen=True, kw_only=True)
class IterationLine:
    """What the line says, None where it does not. `elapsed_ms` is the mean per iteration since the line before."""

    iteration: int
    consumed_samples: int | None
    elapsed_ms: float
    learning_rate: float | None
    loss: float
    """NaN where the line has none: Megatron-LM leaves out a loss that is not a number."""
    loss_scale: float | None
    grad_norm: float | None
    tflops_per_rank: float | None
    energy_j_per_rank: float | None
    """Of an iteration, where Megatron-LM was asked for it (`--log-energy`)."""
    power_w_per_rank: float | None
    skipped: int
    nan: int


def unlabelled(line: str) -> str:
    """The line without what a launcher or a logger put before it."""
    label = _LABEL.match(line)
    return line[label.end() :] if label is not None and label.end() else line


def is_iteration_line(line: str) -> bool:
    return _HEAD.match(line) is not None


def is_evaluation_line(line: str) -> bool:
    """Whether it is what tdpp's engine prints of an evaluation."""
    return _EVALUATION.match(line) is not None


def progress(line: str) -> tuple[int, int] | None:
    """The iteration that a line of a log tells of, and that of the end; None if it is another line."""
    head = _HEAD.match(line)
    return None if head is None else (int(head[1]), int(head[2]))


def iteration_line(line: str) -> IterationLine | None:
    """What a line of a log says of an iteration; None if it is another line, or one that is damaged."""
    head = _HEAD.match(line)
    if head is None:
        return None
    fields = dict(part.strip().rpartition(": ")[::2] for part in line[head.end() :].split("|"))

    def number(name: str) -> float | None:
        return float(fields[name]) if name in fields else None

    def count(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    try:
        loss = number("lm loss")
        return IterationLine(
            iteration=int(head[1]),
            consumed_samples=count("consumed samples"),
            elapsed_ms=float(fields["elapsed time per iteration (ms)"]),
            learning_rate=number("learning rate"),
            loss=math.nan if loss is None else loss,
            loss_scale=number("loss scale"),
            grad_norm=number("grad norm"),
            tflops_per_rank=number("throughput per GPU (TFLOP/s/GPU)"),
            energy_j_per_rank=number("energy per GPU (J/iter/GPU)"),
            power_w_per_rank=number("power per GPU (W/GPU)"),
            skipped=count("number of skipped iterations") or 0,
            nan=count("number of nan iterations") or 0,
        )
    except (ValueError, KeyError):
        return None
