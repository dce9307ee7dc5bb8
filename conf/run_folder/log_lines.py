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
_MPI = r"\[\d{1,7},\d{1,7}\]<std(?:out|err)>:"
"""Of `mpirun --tag-output`."""
_LABELS = rf"(?:{_TASK}|{_RANK}|{_LOGGER}|{_MPI})*"
"""What may stand before a line."""
_LABEL = re.compile(_LABELS)
ITERATION = re.compile(r"\biteration\s{1,99}(\d{1,12})/\s{0,99}(\d{1,12}) \|")
_HEAD = re.compile(rf"{_LABELS}\s*(?:\[[^\]]*\]\s*)?{ITERATION.pattern}")
"""Megatron-LM of today puts the time in brackets before it."""
ELAPSED = "elapsed time per iteration (ms):"
LAST = "number of nan iterations"
"""The field that the line ends with."""
_FIELDS = {
    *("consumed samples", ELAPSED[:-1], "learning rate", "global batch size", "loss", "loss scale", "grad norm"),
    *("num zeros", "params norm", "number of skipped iterations", LAST),
    *("throughput per GPU (TFLOP/s/GPU)", "energy per GPU (J/iter/GPU)", "power per GPU (W/GPU)"),
}
_FIELD = re.compile(r" (\S[^|:]*): +(?:-?\d+(?:\.\d+)?(?:E[+-]\d+)?|-?nan|-?inf) ", re.IGNORECASE)

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


def is_whole(line: str) -> bool:
    """Whether it is the line of an iteration in which every field is known and has a number."""
    head = _HEAD.match(line)
    fields = line[head.end() :].rstrip().split("|") if head is not None else []
    found = [_FIELD.fullmatch(field) for field in fields[:-1]]
    names = {field[1] for field in found if field is not None}
    known = all(name in _FIELDS or (name.endswith(" loss") and name.count(" ") < 3) for name in names)
    return fields[-1:] == [""] and None not in found and ELAPSED[:-1] in names and known


def iteration_line(line: str) -> IterationLine | None:
    """What a line of a log says of an iteration; None if it is another line, or one that is damaged."""
    head = _HEAD.match(line)
    if head is None:
        return None
    *closed, rest = line[head.end() :].split("|")
    fields = dict(part.strip().rpartition(": ")[::2] for part in closed)
    if rest.strip() or not {"lm loss", LAST} & fields.keys():  # one that was cut: half a number, or no loss
        return None

    def number(name: str) -> float | None:
        return float(fields[name]) if name in fields else None

    def count(name: str) -> int | None:
        return int(fields[name]) if name in fields else None

    try:
        loss = number("lm loss")
        return IterationLine(
            iteration=int(head[1]),
            consumed_samples=count("consumed samples"),
            elapsed_ms=float(fields[ELAPSED[:-1]]),
            learning_rate=number("learning rate"),
            loss=math.nan if loss is None else loss,
            loss_scale=number("loss scale"),
            grad_norm=number("grad norm"),
            tflops_per_rank=number("throughput per GPU (TFLOP/s/GPU)"),
            energy_j_per_rank=number("energy per GPU (J/iter/GPU)"),
            power_w_per_rank=number("power per GPU (W/GPU)"),
            skipped=count("number of skipped iterations") or 0,
            nan=count(LAST) or 0,
        )
    except (ValueError, KeyError):
        return None
