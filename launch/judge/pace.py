"""How fast a run logs its iterations, whether the next one is late, and which ranks hold the others up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from conf.run_folder.iteration_time import IterationTime, iteration_time
from launch.judge import gpu_health
from launch.node.rank_failures import Doing, holding_up, in_words
from launch.observe.observation import Observation

STALL_LINES = 5
"""A run stalls when no line came for as long as this many usually take, and at least for `STALL_S`."""
STALL_S = 30.0


def time_of(seen: Observation) -> IterationTime | None:
    """What is shown as the run's iteration time; None before the first line of its log."""
    return iteration_time(seen.times)


def _median_ms(seen: Observation) -> float:
    """Returns the median of an iteration with the plan's batch, once something is logged."""
    time = time_of(seen)
    assert time is not None, "the log has a line"
    return time.ms * seen.plan.global_batch_size if time.per_sample else time.ms


def usual_s(seen: Observation) -> float:
    """Returns the seconds from one line of the log to the next. A batch that adapts may have grown since the first."""
    milliseconds = seen.log[-1].elapsed_ms if seen.adapts else _median_ms(seen)
    return milliseconds / 1e3 * seen.plan.train.log_interval


def left_s(seen: Observation) -> float | None:
    """Seconds to the last iteration at the pace so far, with the evaluations until then; None where nothing is known,
    or nothing more will come."""
    if not seen.log or seen.over:
        return None
    if seen.adapts and seen.log[-1].consumed_samples:
        rate, batch = _newest(seen)
        samples = max(0, (seen.plan.train.samples or 0) - seen.log[-1].consumed_samples)
        return samples / rate + _evaluations_s(seen, seen.log[-1].iteration + math.ceil(samples / batch))
    return (seen.iterations - seen.log[-1].iteration) * _median_ms(seen) / 1e3 + _evaluations_s(seen, seen.iterations)


def samples_per_s(seen: Observation) -> float | None:
    """Returns the rate at the newest batch, where it adapts; None where the log does not say it."""
    if not seen.log or not seen.log[-1].consumed_samples or not seen.log[-1].elapsed_ms:
        return None
    return _newest(seen)[0] if seen.adapts else seen.plan.global_batch_size / _median_ms(seen) * 1e3


def _newest(seen: Observation) -> tuple[float, float]:
    """Samples a second and those of an iteration, over the newest lines that have the last one's batch."""
    found: tuple[float, float, float] | None = None
    for before, line in zip((None, *seen.log[:-1])[::-1], seen.log[::-1], strict=True):
        if before is None and found is not None:
            break  # what lies before the first line of a long log is not known
        iterations = line.iteration - (before.iteration if before else 0)
        samples = (line.consumed_samples or 0) - ((before.consumed_samples or 0) if before else 0)
        batch = samples / max(1, iterations)
        if found is not None and batch != found[2]:
            break
        trained, seconds, _ = found or (0.0, 0.0, batch)
        found = trained + samples, seconds + iterations * line.elapsed_ms / 1e3, batch
    assert found is not None, "the log has a line"
    return max(1.0, found[0]) / max(1e-9, found[1]), max(1.0, found[2])


def _evaluations_s(seen: Observation, end: int) -> float:
    """What evaluations take from the last line to that iteration, the last one of the run."""
    last, interval = seen.log[-1].iteration, seen.plan.train.eval_interval
    took = [line.evaluation_s for line in seen.log if line.evaluation_s is not None]
    if interval is None or not took or last >= end:
        return 0.0
    return (end // interval - last // interval + (end % interval > 0)) * statistics.median(took)


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
    if seen.start.restarts and any(node.state == "absent" and node.alive for node in seen.nodes):
        return False  # it waits for Slurm
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
