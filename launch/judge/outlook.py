"""When a run starts, and when it ends, as far as that can be said."""

from __future__ import annotations

from dataclasses import dataclass

from conf.visible import plural, span
from launch.judge.pace import began_unix, left_s
from launch.judge.state import State
from launch.observe.observation import Observation
from launch.screen import clock

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
    return Costs(dollars=dollars, limit=train.max_cost, at_end=None if left is None else dollars + left * a_second)
