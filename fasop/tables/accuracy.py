"""What a run took, beside what was predicted of it: in all, term by term and stage by stage.

Putting one term at a time as it was measured into the same replay shows which term of the model is off; with all of
them as measured, what is left is what the replay itself does not know. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import mean

from fasop.costs.calibration import Calibration
from fasop.costs.hardware import Factors
from fasop.errors import SearchError
from fasop.simulation.iteration import Durations, replay
from fasop.simulation.predict import Prediction
from fasop.simulation.ranks.replay import StageTimes

TERMS = tuple(field.name for field in fields(Factors))
MESSAGES = ("send_forward", "send_backward", "busy_forward", "busy_backward")
"""Fields of `StageTimes` for messages."""
SMALL_S = 1e-6
"""What is predicted to take less has no factor: any measurement would be many times as much."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run took, as medians over its steady iterations."""

    run: str
    """Its name."""
    iteration_s: float
    iterations: int
    """That were measured."""
    stages: Sequence[MeasuredStage]
    """None of a run without events, such as one of Megatron-LM."""
    embedding: float
    """To sum its gradients over the first and the last stage, once both have begun."""
    emulated: bool
    """A rehearsal: the times were given, not computed."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """What the slowest of a stage's ranks took, for each time of its own."""

    forward: Sequence[float]
    """Seconds of one micro-batch, for each chunk; on the last one with the loss."""
    backward: Sequence[float]
    send_forward: float | None
    """From a send until the receiver has it, of those that it waits for; None where it waits for none."""
    send_backward: float | None
    gradients: float
    """What is left of summing them, once all replicas have begun."""
    optimizer: float
    """With the norm, but without waiting for other stages."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One term of the model: mean over the stages that have it, per iteration."""

    name: str
    predicted: float
    measured: float
    iteration_s: float
    """What the prediction would be, had this one term been known."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    measured: Measured
    prediction: Prediction
    durations: Durations | None
    """Durations as measured; what was not measured is as predicted. None where a run is compared as a whole alone."""
    terms: Sequence[Term]
    """None of such a run."""
    replayed_s: float | None
    """The iteration with all terms as measured."""

    @property
    def error(self) -> float:
        """Return the prediction's error as a part of what was measured; positive where it took less than predicted."""
        return self.prediction.iteration_s / self.measured.iteration_s - 1

    @property
    def worst(self) -> Term | None:
        """The term that, known, would change the prediction most."""
        return max(self.terms, key=lambda term: abs(term.iteration_s - self.prediction.iteration_s), default=None)


def compare(measured: Measured, prediction: Prediction) -> Comparison:
    """Compare one run with `prediction`, which is that of its frozen configuration.

    It is compared as a whole alone where it has no events, or stages have no one time of a kind, since replicas take
    unequal shares or stages have unlike numbers of them.
    """
    if not measured.stages or prediction.by_rank:
        return Comparison(measured=measured, prediction=prediction, durations=None, terms=(), replayed_s=None)
    known = _as_measured(prediction.durations, measured)
    with_one = {name: _put(prediction.durations, known, (name,)) for name in TERMS}
    terms = [
        Term(
            name=name,
            predicted=_mean(name, prediction.durations, prediction),
            measured=_mean(name, known, prediction),
            iteration_s=replay(prediction.schedule, with_one[name])[0],
        )
        for name in TERMS
    ]
    return Comparison(
        measured=measured,
        prediction=prediction,
        durations=known,
        terms=terms,
        replayed_s=replay(prediction.schedule, known)[0],
    )


def _as_measured(predicted: Durations, measured: Measured) -> Durations:
    optimizer = [stage.optimizer for stage in measured.stages]
    return replace(
        predicted,
        times=[_with(times, stage) for times, stage in zip(predicted.times, measured.stages, strict=True)],
        gradients=[stage.gradients for stage in measured.stages],
        embedding=measured.embedding,
        optimizer=optimizer,
        weights=list(map(min, predicted.weights, optimizer)),
    )


def _with(times: StageTimes, measured: MeasuredStage) -> StageTimes:
    """Return the times as measured. How long messages occupied links was not: as predicted, or for as long as they
    took."""
    ahead = times.send_forward if measured.send_forward is None else measured.send_forward
    back = times.send_backward if measured.send_backward is None else measured.send_backward
    return replace(
        times,
        forward=measured.forward,
        backward=measured.backward,
        send_forward=ahead,
        send_backward=back,
        busy_forward=min(ahead, times.sends("forward-send")[1]),
        busy_backward=min(back, times.sends("backward-send")[1]),
    )


def _put(base: Durations, known: Durations, names: Iterable[str]) -> Durations:
    """`base`, with these terms as in `known`."""
    for name in names:
        if name in ("gradients", "embedding", "optimizer"):
            base = replace(base, **{name: getattr(known, name)})
        else:
            keys = MESSAGES if name == "messages" else (name,)
            pairs = zip(base.times, known.times, strict=True)
            base = replace(base, times=[replace(a, **{key: getattr(b, key) for key in keys}) for a, b in pairs])
    return base


def _mean(name: str, durations: Durations, prediction: Prediction) -> float:
    """Seconds of an iteration that a term takes, the mean over the stages that have it."""
    values = by_stage(name, durations, prediction)
    return mean(values) if values else 0.0


def by_stage(name: str, durations: Durations, prediction: Prediction) -> list[float]:
    """Seconds of an iteration: all micro-batches' passes, and for messages both ways of all."""
    count = prediction.schedule["micro_batches"]
    if name == "embedding":
        return [durations.embedding]
    if name == "gradients":
        return list(durations.gradients)
    if name == "optimizer":
        return list(durations.optimizer)
    if name == "messages":
        hops = zip(durations.times[:-1], durations.times[1:], strict=True)
        both_ways = count * prediction.schedule["chunks"]
        return [both_ways * (here.send_forward + there.send_backward) for here, there in hops]
    return [count * sum(getattr(times, name)) for times in durations.times]


def calibration(comparisons: Sequence[Comparison]) -> Calibration:
    """Measured over predicted time by node group and term, from all runs together.

    What stages of several groups took counts for each of them. A term that was not measured, or that hardly takes
    time, has the factor 1.

    Raises:
        SearchError: no run has events, or a factor is beyond what a calibration can mend.
    """
    sums: dict[str, dict[str, list[float]]] = {}
    for one in comparisons:
        for name in TERMS if one.durations else ():
            for groups, predicted, measured in _pairs(name, one):
                for group in groups:
                    of = sums.setdefault(group, {}).setdefault(name, [0.0, 0.0])
                    of[0] += predicted
                    of[1] += measured
    if not sums:
        raise SearchError(
            "calibrate: the runs have no times by stage to calibrate with; use runs with profile.timeline=true, "
            "without "
            "parallel.shares and parallel.replicas"
        )
    return Calibration(
        runs=[one.measured.run for one in comparisons if one.durations],
        groups={
            group: Factors(**{name: of[1] / of[0] for name, of in terms.items() if of[0] > SMALL_S})
            for group, terms in sums.items()
        },
    )


def _pairs(name: str, one: Comparison) -> Iterator[tuple[Iterable[str], float, float]]:
    """What was measured of a term: of which node groups, predicted and measured seconds."""
    assert one.durations is not None
    groups = [stage.groups for stage in one.prediction.stages]
    if name == "embedding":
        groups = [(*groups[0], *groups[-1])]
    elif name == "messages":
        groups = [(*here, *there) for here, there in pairwise(groups)]
    stages = one.measured.stages
    known = [here.send_forward is not None and there.send_backward is not None for here, there in pairwise(stages)]
    values = (by_stage(name, durations, one.prediction) for durations in (one.prediction.durations, one.durations))
    for number, (of, predicted, measured) in enumerate(zip(groups, *values, strict=True)):
        if name != "messages" or known[number]:
            yield dict.fromkeys(of), predicted, measured
