"""What Megatron-LM says of a run in its logs: iterations, timers, memory, losses on other data."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from conf.run_folder.log_lines import ELAPSED, LAST, IterationLine, is_whole, iteration_line, progress

AHEAD = 24
"""How many lines may lie between the parts of one that was cut."""
LONGEST = 4096
"""Characters of both parts of a line that are put back together, so that nothing takes long."""
ALIKE = 24
"""How many characters at the begin of what landed inside may look as if they belonged there."""

_OF_NUMBERS = frozenset("0123456789.E+-")


class Lines:
    """Lines without their ends, in which those of other processes may have landed: looked at ahead, and mended."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._ahead: deque[str] = deque()
        self._cut = False
        self._read = 0

    def __iter__(self) -> Iterator[str]:
        while self._ahead or self._more():
            yield self._ahead.popleft()

    def _more(self) -> bool:
        line = next(self._lines, None)
        if line is None:
            return False
        self._read += 1
        self._cut = not line.endswith("\n")
        self._ahead.append(line[: None if self._cut else -1])
        return True

    @property
    def number(self) -> int:
        """That of the line that was given last, from 1."""
        return self._read - len(self._ahead)

    def peek(self, index: int) -> str | None:
        """The line that comes so many lines after the next; None after the last."""
        while len(self._ahead) <= index:
            if not self._more():
                return None
        return self._ahead[index]

    @property
    def at_cut(self) -> bool:
        """Whether the line that was given last has no end: the file was cut there, or is being written."""
        return self._cut and self.peek(0) is None

    def mend(
        self,
        line: str,
        literal: str,
        characters: str,
        pattern: re.Pattern[str],
        accept: Callable[[re.Match[str]], bool] = bool,
    ) -> re.Match[str] | None:
        """Puts a line that was given together with its other part, and what landed between them back.

        None if there is no such part. Of several ways, the one in which most was there before the other line.

        Args:
            literal: how the whole line begins.
            characters: what may come after that.
            pattern: of the whole line.
            accept: whether the whole line can be.
        """
        length = _common(line, literal)
        if length == len(literal):
            length = len(line) - len(line[length:].lstrip(characters))
        for index in range(AHEAD if length else 0):
            other = self.peek(index)
            if other is None:
                return None
            if length > len(literal) and other.lstrip(characters):
                continue
            for cut in range(length, max(length - ALIKE, 0), -1):
                match = pattern.fullmatch(line[:cut] + other)
                if match is not None and accept(match):
                    del self._ahead[index]
                    self._ahead.appendleft(line[cut:])
                    return match
        return None

    def rejoin(self, line: str, begin: int, ending: str) -> str | None:
        """The same for an iteration's line into which anything may have landed, after its first `begin` characters; the
        other part has `ending` in it.

        None also where the cut is inside a number: a digit of the other line would change it.
        """
        for index in range(AHEAD):
            other = self.peek(index)
            if other is None:
                return None
            if ending in other and len(line) + len(other) <= LONGEST:
                cuts = (cut for cut in range(len(line), begin - 1, -1) if is_whole(line[:cut] + other))
                cut = next(cuts, None)
                if cut is not None and not {line[cut - 1], other[0]} <= _OF_NUMBERS:
                    del self._ahead[index]
                    self._ahead.appendleft(line[cut:])
                    return line[:cut] + other
        return None


def _common(line: str, literal: str) -> int:
    """How many characters both begin with."""
    length = min(len(line), len(literal))
    if line[:length] == literal[:length]:
        return length
    return next(i for i in range(length) if line[i] != literal[i])


_TIMERS = re.compile(r"(?:max|\(min, max\)) time across ranks \(ms\):")
_TIMER = re.compile(r" {4}(\S.*?) \.*: (?:\((\d+\.\d+), (\d+\.\d+)\)|(\d+\.\d+))\s*")
"""The least and the largest time of all ranks or, with `--timing-log-option max`, the largest."""
_EVALUATION = re.compile(
    r"\s*validation(?:-\S+)? loss at (?:iteration (\d{1,12})(?: on (\w+) set)?|the end of training for (\w+) data) "
    r"\|(.*)"
)
_EVALUATED = {None: "validation", "val": "validation"}
_MIB = r"(\d+(?:\.\d+)?)"
_MEMORY = re.compile(
    rf"\[Rank (\d{{1,6}})\] \(after \d+ iterations\) memory \(MB\) \| allocated: {_MIB} \| max allocated: {_MIB} \| "
    rf"reserved: {_MIB} \| max reserved: {_MIB}"
)


@dataclass(frozen=True)
class Memory:
    """What a rank's allocator reports, MiB."""

    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float


@dataclass(frozen=True)
class Evaluation:
    """A loss on data that are not trained on."""

    iteration: int
    data: str
    """"validation" or "test"."""
    loss: float


@dataclass(frozen=True)
class UpstreamLog:
    metrics: tuple[Mapping[str, Any], ...]
    """Lines like those of metrics.jsonl, by iteration; of an iteration that was run twice, the later line."""
    timers: Mapping[str, tuple[float | None, float]]
    """Least and largest time of all ranks in ms, medians of what was logged; the first block, which warms up, only
    if it is alone. The least is None where only the largest is logged."""
    memory: Mapping[int, Memory]
    """What each rank reported last; Megatron-LM asks one replica only."""
    evaluations: tuple[Evaluation, ...] = ()
    """Sorted by iteration."""
    notes: tuple[str, ...] = ()
    """What could not be read of iterations, a sentence each."""

    def with_tokens(self, tokens_per_sample: int, global_batch_size: int) -> UpstreamLog:
        """The same with `tokens_per_s`, which follows from the samples since the line before: the batch may grow while
        it trains. `global_batch_size` counts where lines do not say how many samples were consumed."""
        each = [_batch(before, line) or global_batch_size for before, line in pairwise(self.metrics)]
        batches = [*(each[:1] or [global_batch_size]), *each]  # the first line's run may have begun at a checkpoint

        def with_rate(line: Mapping[str, Any], samples: float) -> Mapping[str, Any]:
            elapsed_ms = line["elapsed_ms"]
            return {**line, "tokens_per_s": samples * tokens_per_sample / elapsed_ms * 1e3} if elapsed_ms > 0 else line

        return replace(self, metrics=tuple(map(with_rate, self.metrics, batches)))


def _batch(before: Mapping[str, Any], line: Mapping[str, Any]) -> float | None:
    """Samples of each iteration from one line to the next; None where they do not say it."""
    first, last = before.get("consumed_samples"), line.get("consumed_samples")
    if first is None or last is None or last <= first:
        return None
    return float((last - first) / (line["iteration"] - before["iteration"]))


def parse(lines: Iterable[str]) -> UpstreamLog:
    """Reads the lines of all nodes' logs, node after node; whatever else is in them is passed over.

    Timers count from the first logged iteration on: before it they are those of the set-up.
    """
    metrics: dict[int, Mapping[str, Any]] = {}
    timers: dict[str, list[tuple[float | None, float]]] = {}
    memory: dict[int, Memory] = {}
    evaluations: dict[tuple[int, str], Evaluation] = {}
    damaged: list[str] = []
    timed = False
    """Whether the lines are those of timers: only then one with a single number is."""
    source = Lines(lines)
    for line in source:
        if ELAPSED in line or progress(line) is not None:
            timed = False
            if (logged := _logged(line, source, damaged)) is not None:
                metrics[logged.iteration] = {key: value for key, value in asdict(logged).items() if value is not None}
        elif _TIMERS.match(line):
            timed = True
        elif timed and metrics and (match := _TIMER.fullmatch(line)):
            least = None if match[2] is None else float(match[2])
            timers.setdefault(match[1], []).append((least, float(match[3] or match[4])))
        elif match := _MEMORY.match(line):
            memory[int(match[1])] = Memory(*map(float, match.groups()[1:]))
        elif (evaluated := _evaluation(line, max(metrics, default=0))) is not None:
            evaluations[evaluated.iteration, evaluated.data] = evaluated
    return UpstreamLog(
        metrics=tuple(metrics[iteration] for iteration in sorted(metrics)),
        timers={name: _middle(pairs[1:] or pairs) for name, pairs in timers.items()},
        memory=dict(sorted(memory.items())),
        evaluations=tuple(evaluations[key] for key in sorted(evaluations)),
        notes=(*damaged, *_gaps(sorted(metrics))),
    )


def _logged(line: str, source: Lines, damaged: list[str]) -> IterationLine | None:
    """What an iteration's line says, if need be put together with its other half; adds to `damaged` what is lost."""
    logged, reached = iteration_line(line), progress(line)
    if logged is None and reached is not None and not line.rstrip().endswith("|"):
        whole = source.rejoin(line, line.index("|") + 1, LAST.partition(" of ")[2])
        logged = iteration_line(whole) if whole is not None else None
    if logged is None and not source.at_cut:
        named = "an iteration" if reached is None else f"iteration {reached[0]}"
        damaged.append(f"the line of {named} is damaged and left out: … {line.strip()[-60:]!r}")
    return logged


def _gaps(iterations: Sequence[int]) -> list[str]:
    """Where the log skips iterations, though it has them at regular intervals before and after."""
    steps = [after - before for before, after in pairwise(iterations)]
    notes = []
    for index, step in enumerate(steps):
        beside = {steps[at] for at in (index - 1, index + 1) if 0 <= at < len(steps)}
        usual = min(beside, default=step)
        if len(beside) == 1 and step > usual and step % usual == 0:
            lost = step // usual - 1
            first, last = iterations[index] + usual, iterations[index + 1] - usual
            which = f"iteration {first}" if lost == 1 else f"{lost} iterations from {first} to {last}"
            notes.append(f"the log has no line of {which}, though it has one every {usual} iterations around there")
    return notes


def _evaluation(line: str, last: int) -> Evaluation | None:
    """What a line says of a loss on other data; `last` is the iteration that was logged last."""
    match = _EVALUATION.fullmatch(line)
    if match is None:
        return None
    fields = dict(part.strip().rpartition(": ")[::2] for part in match[4].split("|"))
    try:
        loss = float(fields["lm loss value"])
    except (KeyError, ValueError):
        return None
    data = match[2] or match[3]
    return Evaluation(int(match[1] or last), _EVALUATED.get(data, str(data)), loss)


def _middle(pairs: list[tuple[float | None, float]]) -> tuple[float | None, float]:
    known = [least for least, _ in pairs if least is not None]
    return median(known) if known else None, median(largest for _, largest in pairs)
