"""How fast a run logs its iterations, whether the next one is late, and which ranks hold the others up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from launch.judge import gpu_health
from launch.node.stalled_rank import Doing, holding_up, in_words
from launch.observe.observation import Observation

STALL_LINES = 5
"""A run stalls when no line came for as long as this many usually take, and at least for `STALL_S`."""
STALL_S = 30.0


def median_ms(seen: Observation) -> float:
    """Milliseconds per iteration, the median of the logged lines; the first, which warms up, only if it is alone."""
    lines = seen.log[1:] or seen.log
    return statistics.median(line.elapsed_ms for line in lines)


def usual_s(seen: Observation) -> float:
    """From one line of the log to the next. A batch that adapts may have grown many times since the first lines."""
    milliseconds = seen.log[-1].elapsed_ms if _grows(seen) else median_ms(seen)
    return milliseconds / 1e3 * seen.plan.train.log_interval


def left_s(seen: Observation) -> float | None:
    """Seconds to the last iteration at the pace so far, with the evaluations until then; None where nothing is known,
    or nothing more will come."""
    if not seen.log or seen.over:
        return None
    last, interval = seen.log[-1].iteration, seen.plan.train.eval_interval
    samples_s = _samples_left_s(seen)
    if samples_s is not None:
        return samples_s
    seconds = (seen.iterations - last) * median_ms(seen) / 1e3
    took = [line.evaluation_s for line in seen.log if line.evaluation_s is not None]
    if interval is not None and took and last < seen.iterations:
        count = seen.iterations // interval - last // interval + (seen.iterations % interval > 0)
        seconds += count * statistics.median(took)
    return seconds


def _grows(seen: Observation) -> bool:
    return seen.plan.adapt is not None and seen.plan.adapt.measures


def _samples_left_s(seen: Observation) -> float | None:
    """The same of a batch that adapts, which ends when its samples are trained: at the pace of the last line, without
    evaluations. None of any other."""
    last, samples = seen.log[-1], seen.plan.train.samples
    if not _grows(seen) or samples is None or not last.consumed_samples:
        return None
    before = seen.log[-2] if len(seen.log) > 1 else None
    iterations = last.iteration - (before.iteration if before else 0)
    trained = last.consumed_samples - ((before.consumed_samples or 0) if before else 0)
    return max(0, samples - last.consumed_samples) * last.elapsed_ms / 1e3 * iterations / max(1, trained)


def began_unix(seen: Observation) -> float:
    """When the last of the nodes joined this start; 0 while none has."""
    return max((node.started_unix or 0.0 for node in seen.nodes), default=0.0)


def is_late(seen: Observation) -> bool:
    """Whether the next line of the log has not come for far longer than usual.

    The lines of an earlier start say nothing of how long a run is silent that was started again; and before its
    first own line it imports torch, reads the checkpoint, and its ranks meet.
    """
    if not seen.log or seen.log[-1].iteration == seen.iterations:
        return False
    last, began = seen.log[-1].unix, began_unix(seen)
    patience = max(
        STALL_S, STALL_LINES * usual_s(seen), gpu_health.GRACE_S if began > last else 0, _evaluation_patience_s(seen)
    )
    return seen.now_unix - max(last, began) >= patience


def _evaluation_patience_s(seen: Observation) -> float:
    """How long the next line may be waited for because an evaluation comes before it; 0 if none does."""
    train, last = seen.plan.train, seen.log[-1].iteration
    if train.eval_interval is None:
        return 0.0
    evaluated = min(last - last % train.eval_interval + train.eval_interval, seen.iterations)
    if last - last % train.log_interval + train.log_interval < evaluated:
        return 0.0
    longest = max((line.evaluation_s or 0.0 for line in seen.log), default=0.0)
    return STALL_LINES * longest if longest else gpu_health.GRACE_S


def lost_unix(seen: Observation) -> float | None:
    """When the first rank lost another one."""
    return min((error.unix for error in seen.errors if error.symptom), default=None)


def held_up_by(seen: Observation) -> list[Doing]:
    """The ranks for which the others wait, or waited until they gave up."""
    return holding_up(seen.doings, seen.plan, lost_unix(seen), seen.now_unix)


def held_up_words(seen: Observation, held: Sequence[Doing], now: str = "stands still") -> tuple[str, str]:
    """Which rank, and how; of at least one, what `held_up_by` gives. `now` is said of it while none has given up."""
    lost = lost_unix(seen)
    return in_words(held, now, seen.now_unix) if lost is None else in_words(held, "stood still", lost)
