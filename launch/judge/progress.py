"""How fast a run logs its iterations, which ranks hold it up, when it starts and ends, and what it costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from conf.run_folder.iteration_time import IterationTime, iteration_time
from conf.visible import plural, span
from launch.judge import gpu_health
from launch.judge.state import State
from launch.node.rank_failures import Doing, holding_up, in_words
from launch.observe.observation import Observation
from launch.screen import clock

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


_AT_WORK = (State.running, State.starting, State.not_finite)
"""The states in which more iterations will come; in any other nobody knows."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """When a run starts and ends, seen at one moment; times in seconds since 1970."""

    now_unix: float
    text: str = ""
    """For people; empty where nothing is known."""
    cell: str = "-"
    """The same for a cell of a table."""
    starts_unix: float | None = None
    """When Slurm expects to start all that is still in its queue."""
    ends_unix: float | None = None
    """When the last iteration is expected; of a run that is over, when its last node ended."""
    over: bool = False
    queued: bool = False
    """Whether `text` is about its start, and not about its end."""

    @property
    def left_s(self) -> float | None:
        """Until `ends_unix`; None of a run that is over, or where no end is expected."""
        return None if self.ends_unix is None or self.over else max(0.0, self.ends_unix - self.now_unix)


def outlook(seen: Observation, state: State) -> Outlook:
    now = seen.now_unix
    if seen.over:
        return _ended(seen)
    if state not in _AT_WORK:
        return Outlook(now_unix=now, text=f"no prediction while the run is {state}")
    if seen.stop_unix is not None:
        return Outlook(now_unix=now)
    if any(job.state and job.state.pending for job in seen.jobs):
        return _queued(seen)
    left = left_s(seen)
    if left is None:
        return Outlook(now_unix=now)
    soonest = "at most" if seen.plan.train.until else "about"
    last = seen.log[-1].unix
    if state is State.starting or last < began_unix(seen):  # it goes on from earlier iterations
        return Outlook(
            now_unix=now,
            text=f"{soonest} {span(left)} left after it starts training",
            cell=span(left),
            ends_unix=now + left,
        )
    ends = max(now, last + left)
    if ends == now:
        return Outlook(now_unix=now, text="due now", cell="due now", ends_unix=ends)
    left_text, at = span(ends - now), clock(ends, now)
    return Outlook(
        now_unix=now, text=f"{soonest} {left_text} left, ends {at}", cell=f"{left_text}, ends {at}", ends_unix=ends
    )


def _ended(seen: Observation) -> Outlook:
    began = [node.seen_unix for node in seen.nodes if node.started_unix is not None]
    if not began:
        return Outlook(now_unix=seen.now_unix, over=True)
    text = f"ended {clock(max(began), seen.now_unix)}, {span(seen.took_s or 0.0)} after its start"
    return Outlook(now_unix=seen.now_unix, text=text, ends_unix=max(began), over=True)


def _queued(seen: Observation) -> Outlook:
    """A run starts when the last of its jobs does; Slurm says nothing of a job that waits for another one."""
    now = seen.now_unix
    waiting = [job.state for job in seen.jobs if job.state and job.state.pending]
    expected = [state.start_unix for state in waiting if state.start_unix is not None]
    jobs = "its job" if len(waiting) == 1 else f"its {plural(len(waiting), 'job')}"
    if not expected:
        return Outlook(now_unix=now, text=f"Slurm does not say yet when it expects to start {jobs}", queued=True)
    starts = max(now, *expected)
    at, wait = clock(starts, now), span(starts - now)
    if len(expected) < len(waiting):
        text = f"Slurm does not expect to start {jobs} before {at}, in {wait}"
        return Outlook(now_unix=now, text=text, cell=f"starts after {at}", queued=True)
    return Outlook(
        now_unix=now,
        text=f"Slurm expects to start {jobs} at {at}, in {wait}",
        cell=f"starts {at}",
        starts_unix=starts,
        queued=True,
    )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Dollars, by the price of all nodes of the plan."""

    dollars: float
    limit: float | None
    """`train.max_cost`."""
    at_end: float | None
    """The expected cost at the end; None of a run that is over, or where no end is known."""

    def __str__(self) -> str:
        text = f"${self.dollars:.2f} so far" if self.at_end is not None else f"${self.dollars:.2f}"
        text += "" if self.limit is None else f" of train.max_cost={self.limit:g}"
        if self.at_end is None:
            return text
        if self.limit is not None and self.at_end > self.limit:
            return f"{text}, which all iterations would exceed: about ${self.at_end:.2f}"
        return f"{text}, about ${self.at_end:.2f} at the end"


def costs(seen: Observation, state: State) -> Costs | None:
    """None where the price of a node is not known, or nothing has begun. A run without `train.max_cost` counts its
    newest start alone."""
    train = seen.plan.train
    if train.price_per_hour is None or seen.took_s is None or seen.plan.rehearsal is not None:
        return None
    a_second = train.price_per_hour / 3600
    dollars = seen.took_s * a_second if seen.spent is None else seen.spent
    left = outlook(seen, state).left_s
    if left is None:
        return Costs(dollars=dollars, limit=train.max_cost, at_end=None)
    done = seen.log[-1].iteration if seen.log else 0
    to_send = max(0, seen.iterations - done) * (train.traffic_price or 0.0)
    return Costs(dollars=dollars, limit=train.max_cost, at_end=dollars + left * a_second + to_send)
