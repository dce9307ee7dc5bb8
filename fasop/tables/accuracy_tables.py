"""What a run took beside what was predicted, as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from conf.visible import plural
from fasop.tables.accuracy import TERMS, Comparison, by_stage
from fasop.tables.explain import Table

WELL = 0.01
"""A term that would change the prediction by no more than this is not called off."""


def runs(comparisons: Sequence[Comparison]) -> Table:
    """A row for each run: in all."""
    rows = [
        [
            one.measured.run,
            f"{one.prediction.iteration_s * 1e3:.1f}",
            f"{one.measured.iteration_s * 1e3:.1f}",
            f"{one.error:+.1%}",
            str(one.measured.iterations),
            f"{one.prediction.basis}{', emulated' if one.measured.emulated else ''}",
        ]
        for one in comparisons
    ]
    return ("run", "predicted ms", "measured ms", "error", "iterations", "times"), rows


def together(comparisons: Sequence[Comparison]) -> str:
    """How right the predictions of several runs were, in words."""
    errors = [abs(one.error) for one in comparisons]
    return f"{plural(len(errors), 'run')}: mean error {mean(errors):.1%}, worst {max(errors):.1%}"


def terms(one: Comparison) -> Table:
    """A row for each term: its mean over the stages, and the prediction had it been known."""
    rows = [
        [
            term.name,
            f"{term.predicted * 1e3:.2f}",
            f"{term.measured * 1e3:.2f}",
            _off(term.predicted, term.measured),
            f"{term.iteration_s * 1e3:.1f}",
            f"{term.iteration_s / one.measured.iteration_s - 1:+.1%}",
        ]
        for term in one.terms
    ]
    if one.replayed_s is not None:
        whole = f"{one.replayed_s * 1e3:.1f}", f"{one.replayed_s / one.measured.iteration_s - 1:+.1%}"
        rows.append(["all terms", "", "", "", *whole])
    return ("term", "predicted ms", "measured ms", "error", "if known, iteration ms", "error then"), rows


def stages(one: Comparison) -> Table:
    """A row for each stage: predicted and measured milliseconds of an iteration."""
    assert one.durations is not None
    names = [name for name in TERMS if name != "embedding"]
    both = (one.prediction.durations, one.durations)
    values = [[by_stage(name, durations, one.prediction) for name in names] for durations in both]
    rows = []
    for number, stage in enumerate(one.prediction.stages):
        cells = [
            f"{predicted[number] * 1e3:.1f} / {measured[number] * 1e3:.1f}" if number < len(predicted) else ""
            for predicted, measured in zip(*values, strict=True)
        ]
        rows.append([str(number), ", ".join(stage.gpus), "+".join(map(str, stage.layers)), *cells])
    return ("stage", "GPU", "layers", *names), rows


def shared(run: str, ranks: int, cores: int) -> str:
    """Why a run took longer than any prediction of it."""
    return (
        f"{run}: {ranks} ranks took turns on the {plural(cores, 'core')} of this machine; a prediction assumes one "
        "each, so the difference says nothing about its terms"
    )


def verdict(one: Comparison) -> Iterator[str]:
    """What is off, in words."""
    if one.worst is None:
        why = "has no events" if not one.measured.stages else "has unequal shares of the batch"
        yield f"{one.measured.run} {why}, so only its total is compared"
        return
    assert one.replayed_s is not None
    change = one.worst.iteration_s / one.prediction.iteration_s - 1
    if abs(change) > WELL:
        off = _off(one.worst.predicted, one.worst.measured)
        off = "total right, stages not" if off in ("+0.0%", "-0.0%") else off
        yield (
            f"largest error: {one.worst.name} ({off}); its measured value would change the prediction by "
            f"{change:+.1%} and leave an error of {one.worst.iteration_s / one.measured.iteration_s - 1:+.1%}"
        )
    else:
        yield f"no term changes the prediction by more than {WELL:.0%}"
    left = one.replayed_s / one.measured.iteration_s - 1
    if abs(left) > WELL:
        yield (
            f"with all terms as measured, an error of {left:+.1%} remains, for example from time between events or "
            f"from varying iterations"
        )


def _off(predicted: float, measured: float) -> str:
    """The error of a prediction."""
    if not measured:
        return "" if not predicted else "was not there"
    return f"{predicted / measured - 1:+.1%}"
