"""Logs: their text as lines, without bytes that terminals, launchers and crashes leave in it, and Megatron's line of an
iteration, which tdpp's engine and Megatron-LM, old and new, write (docs/formats.md)."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, BinaryIO

from conf.visible import plural, span

LINE_LIMIT = 1 << 26
"""Characters; what is longer is taken as several lines, so that no file can fill the memory with one."""
MOST_NUL = 1 << 28
"""NUL bytes in a row that are read where the file system does not say where a hole ends."""
_ESCAPES = r"\x1b(?:\[[0-?]*[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)|[ -/]*[0-~])"
"""Colours, cursor moves, a window's title (ECMA-48)."""
_OF_TERMINALS = re.compile(rf"{_ESCAPES}|[\x00\x07\x08\x0b-\x0d\u200b\u2060\ufeff]")
"""Also a byte order mark."""
_UNREADABLE = "\ufffd"
"""What stands for a byte that is not UTF-8, and here for a control character too: one of them may have been a digit."""
_CONTROL = re.compile(r"[\x01-\x06\x0e-\x1f\x7f-\x9f]")
_STAMP = re.compile(r" ?(?:\[[\d :.-]{1,32}\] )?$")
"""The time that Megatron-LM of today puts before an iteration."""


class LogText:
    """The lines of a log with their ends."""

    def __init__(self, file: BinaryIO) -> None:
        self._bytes = _WithoutNul(file)
        self._unreadable = 0
        self._first = ""

    @property
    def notes(self) -> list[str]:
        """What was left out so far. NUL bytes are no loss in a text in UTF-16, nor is the rest of its characters."""
        source, notes = self._bytes, []
        if source.wide:
            return []
        if source.nul:
            end = ", and what follows them is not read" if source.ended else ""
            notes.append(
                f"{plural(source.nul, 'NUL byte')} left out: the file was cut while a process wrote to it, its disk "
                f"was full, or its node failed; whatever stood there is lost{end}"
            )
        if self._unreadable:
            notes.append(
                f"{plural(self._unreadable, 'line')} with bytes that are no text, such as {self._first!r}: they are "
                "left out at a line's begin and end, and a number with one inside is not read"
            )
        return notes

    def __iter__(self) -> Iterator[str]:
        text = io.TextIOWrapper(io.BufferedReader(self._bytes, 1 << 20), encoding="utf-8", errors="replace")
        while line := text.readline(LINE_LIMIT):
            if not _is_plain(line):
                self._look_at(line)
            yield from pieces(line)

    def _look_at(self, line: str) -> None:
        plain = _readable(line)
        if (at := plain.find(_UNREADABLE)) >= 0:
            self._unreadable += 1
            self._first = self._first or plain[max(at - 20, 0) : at + 21].strip()


def pieces(line: str) -> Iterator[str]:
    """A line without stray characters and labels; in two, where an iteration's begins inside another one. U+FFFD stands
    for what cannot be read inside it."""
    plain = unlabelled(line if _is_plain(line) else _readable(line))
    begins = [_begin(plain, found.start()) for found in ITERATION.finditer(plain)] if "iteration" in plain else []
    for begin, end in pairwise([0, *(at for at in begins if plain[:at].strip()), len(plain)]):
        piece = unlabelled(_trimmed(plain[begin:end]))
        yield piece if end == len(plain) else f"{piece}\n"


def _is_plain(line: str) -> bool:
    """Whether there is nothing in the line that `_readable` would change; most lines are so."""
    return line.isascii() and line.rstrip("\n").isprintable()


def _readable(line: str) -> str:
    """The line without what terminals leave in it, and with one character for all that is no text."""
    return _CONTROL.sub(_UNREADABLE, _OF_TERMINALS.sub("", line))


def _trimmed(line: str) -> str:
    """The line without what cannot be read before and behind it."""
    if _UNREADABLE not in line:
        return line
    end = "\n" if line.endswith("\n") else ""
    return line.removesuffix("\n").strip(_UNREADABLE) + end


def _begin(line: str, at: int) -> int:
    """Where the line of an iteration begins whose word `iteration` is there."""
    before = _STAMP.search(line[max(at - 48, 0) : at])
    return at - len(before[0]) if before is not None else at


class _WithoutNul(io.RawIOBase):
    """The bytes of a file but for NUL; so text in UTF-16, too, is read as far as it is ASCII."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._row = 0
        """NUL bytes since the last other one."""
        self.nul = 0
        self.wide = False
        """Whether the file begins with the byte order mark of UTF-16."""
        self.ended = False
        """Whether so many NUL bytes came that no more is read."""
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while found := self._file.read(len(buffer)):
            if not self._begun:
                self._begun, self.wide = True, found[:2] in (b"\xff\xfe", b"\xfe\xff")
                found = found[2:] if self.wide else found
            rest = found.replace(b"\0", b"")
            self.nul += len(found) - len(rest)
            if rest:
                self._row = 0
                buffer[: len(rest)] = rest
                return len(rest)
            self._row += len(found)
            if not self._skipped():
                break
        return 0

    def _skipped(self) -> bool:
        """Moves to the end of a hole, which may be larger than any disk; False if nothing comes any more."""
        if self._row > MOST_NUL:
            self.ended = True
            return False
        at = self._file.tell()
        try:
            after = os.lseek(self._file.fileno(), at, os.SEEK_DATA)
        except OSError:  # also: no data up to the end
            return False
        self.nul += after - at
        self._file.seek(after)
        return True


_TASK = r"(?:P\d{1,4} )? {0,7}\d{1,7}: (?!\d+\.\d\d\s*$)"
"""The prefix of `srun --label`. A number and a time alone are the second half of `     rank  0: 957.35`, into which
another process printed (reports/readers/upstream_log.py)."""
_RANK = r"\[[A-Za-z_][\w-]{0,31}\d{1,7}\]:"
"""The prefix of torchrun: `[default7]:`, `[rank15]:`."""
_LOGGER = r"(?:DEBUG|INFO|WARNING):[\w.]{1,100}:"
_MPI = r"\[\d{1,7},\d{1,7}\]<std(?:out|err)>:"
"""The prefix of `mpirun --tag-output`."""
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

_EVALUATION = re.compile(r" validation at iteration ([0-9]{1,12}) \|")
WIDTH = 120
"""Columns of a line that people read."""
_LAST = {"grad norm": "grad norm", "learning rate": "lr", "global batch size": "batch", "loss scale": "scale"}
"""What people read last, by the names of Megatron's line; a scale of 1 is not said."""
_COUNTED = {"number of skipped iterations": "skipped", LAST: "nan"}
"""Said only where there are some."""


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
    """Energy of an iteration, where Megatron-LM was asked for it (`--log-energy`)."""
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
    fields = _fields("|".join(closed))
    if rest.strip() or not {"lm loss", LAST} & fields.keys():  # one that was cut: half a number, or no loss
        return None
    if _UNREADABLE in line:  # in a number, or in the name of one
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


def for_people(line: str, width: int = WIDTH) -> str:
    """An iteration's or an evaluation's line without what is zero or can be derived, in `width` columns; every other
    line, and one that is damaged, as it is."""
    if (evaluated := _EVALUATION.match(line)) is not None:
        fields = _fields(line[evaluated.end() :])
        seconds = fields.pop("seconds", None)
        parts = [f"evaluation after iteration {evaluated[1]}", *(f"{name} {_brief(x)}" for name, x in fields.items())]
        took = _seconds(seconds)
        return _joined([*parts, *([span(took, 3)] if took else [])], width)
    head, known = _HEAD.match(line), iteration_line(line)
    if head is None or known is None:
        return line
    fields = _fields(line[head.end() :])
    losses = [f"loss {_brief(fields.pop(name))}" for name in ("lm loss", "loss") if name in fields]
    parts = [f"iteration {known.iteration:>{len(head[2])}}/{head[2]}", *losses, f"{known.elapsed_ms:,.1f} ms"]
    parts += [f"{name} {int(fields[key])}" for key, name in _COUNTED.items() if int(fields.get(key, "0"))]
    told = {ELAPSED[:-1], "consumed samples", *_COUNTED, *_LAST}
    parts += [f"{key} {_brief(x)}" for key, x in fields.items() if key not in told]
    parts += [f"{name} {_brief(fields[key])}" for key, name in _LAST.items() if fields.get(key, "1.0") != "1.0"]
    return _joined(parts, width)


def _fields(text: str) -> dict[str, str]:
    """The fields of a line, by their names."""
    return dict(part.strip().rpartition(": ")[::2] for part in text.split("|") if ": " in part)


def _brief(number: str) -> str:
    """With four digits; what is whole, such as 16 or 65536.0, or no number, as it is."""
    try:
        return f"{float(number):#.4g}" if re.search(r"\.\d*([1-9]|E)", number) else number.strip().removesuffix(".0")
    except ValueError:
        return number


def _seconds(text: str | None) -> float:
    """0 where the line does not say; a line of an older engine is rounded to tenths, so its 0 says nothing either."""
    try:
        return float(text or 0.0)
    except ValueError:
        return 0.0


def _joined(parts: list[str], width: int) -> str:
    """Joins as many of the parts as there is room for."""
    while len(text := "  ".join(parts)) > width and len(parts) > 1:
        parts.pop()
    return text
