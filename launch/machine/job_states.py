"""The states of Slurm's jobs as squeue and sacct print them, and Slurm's way to write many names of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from conf.visible import rank_ranges


def expanded(nodelist: str = "") -> tuple[str, ...]:
    """`a[1-2,07-08],b` as a1, a2, a07, a08, b; a part that is written in another way stays as it is."""
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return tuple(host for part in parts if part != "None assigned" for host in _hosts(part))


def compressed(hosts: Iterable[str]) -> str:
    """`a1, a2, a3, b` as `a[1-3],b`, each host once: what `expanded` reads."""
    groups: dict[tuple[str, int], list[int]] = {}
    plain = []
    for host in sorted(set(hosts)):
        match = re.fullmatch(r"(.*?)(\d+)", host)
        if match is None:
            plain.append(host)
        else:
            groups.setdefault((match[1], len(match[2])), []).append(int(match[2]))
    return ",".join([*(_ranges(*key, numbers) for key, numbers in groups.items()), *plain])


def _ranges(before: str, width: int, numbers: list[int]) -> str:
    written = re.sub(r"\d+", lambda number: number[0].zfill(width), rank_ranges(numbers)).replace(" ", "")
    return before + (written if len(numbers) == 1 else f"[{written}]")


def _hosts(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\]([^\[\]]*)", part)
    if match is None:
        return [part]
    before, ranges, after = match.groups()
    numbers = []
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return [f"{before}{number}{after}" for number in numbers]


SQUEUE_FORMAT = "--format=%i|%T|%r|%L|%N|%S"
"""What `parse_squeue` reads."""
SACCT_FIELDS = "JobID%40,State%60,ExitCode,NodeList"
"""What `parse_sacct` reads."""
STARTS_FIELDS = "JobID%40,State%60,NodeList,End"
"""What `parse_starts` reads."""
PENDING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
FINAL = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
)
"""All other states, also those that later versions of Slurm add, are of a job that still has something to come:
https://slurm.schedmd.com/job_state_codes.html."""
LAUNCH_FAILURE = "JobLaunchFailure"
"""squeue's reason, such as that the job's output cannot be opened on its first node."""
_LAUNCH_FAILURE_CODE = "0:53"
"""The same as sacct's exit code."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job, or a component of a heterogeneous one, as Slurm describes it."""

    id: str
    state: str
    """The state's name alone, such as CANCELLED."""
    detail: str = ""
    """What follows it: `by 1000` of a cancelled job; the reason of a pending one, or of one that was not launched."""
    time_left: str = ""
    """The time that squeue writes; empty if it did not."""
    hosts: tuple[str, ...] = ()
    """The hosts of its nodes, by task; none before it has any."""
    start_unix: float | None = None
    """When Slurm expects to start a pending one, in seconds since 1970; None where it does not say."""

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def over(self) -> bool:
        return self.state in FINAL

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"job {self.id} is {self.state}{detail}"


def parse_squeue(text: str) -> dict[str, JobState]:
    states = []
    for line in text.splitlines():
        job, state, reason, left, *more = line.strip().split("|")
        given = (state in PENDING and reason != "None") or reason == LAUNCH_FAILURE
        states.append(
            JobState(
                id=job,
                state=state,
                detail=reason if given else "",
                time_left=left,
                hosts=expanded(*more[:1]),
                start_unix=_unix(*more[1:2]) if state in PENDING else None,
            )
        )
    return _together(states)


def _unix(written: str = "") -> float | None:
    """Reads a time as Slurm writes it, in the time zone of this machine; None for `N/A`."""
    try:
        return datetime.fromisoformat(written).timestamp()
    except ValueError:
        return None


def parse_sacct(text: str) -> dict[str, JobState]:
    """`CANCELLED by 1000` has two parts. A requeued job has a line only for its last start."""
    states = []
    for line in text.splitlines():
        job, given, *rest = line.strip().split("|")
        state, _, detail = given.partition(" ")
        if state == "FAILED" and rest[:1] == [_LAUNCH_FAILURE_CODE]:
            detail = LAUNCH_FAILURE
        states.append(JobState(id=job, state=state.rstrip("+"), detail=detail, hosts=expanded(*rest[1:2])))
    return _together(states)


def parse_starts(text: str) -> list[JobState]:
    """Every start of jobs, also those that ended because the job was requeued, in the order of their ends."""
    rows = [line.strip().split("|") for line in text.splitlines() if line.strip()]
    ended = sorted((row for row in rows if len(row) == 4 and _unix(row[3]) is not None), key=lambda row: row[3])
    return [
        JobState(id=job, state=state.split(" ")[0].rstrip("+"), hosts=expanded(hosts)) for job, state, hosts, _ in ended
    ]


def _together(states: Sequence[JobState]) -> dict[str, JobState]:
    """One state for each job: components are `<id>+<number>`, and the first that is not well speaks for all."""
    jobs: dict[str, list[JobState]] = {}
    for state in states:
        jobs.setdefault(state.id.partition("+")[0], []).append(state)

    return {
        job: replace(_whole(parts), hosts=_all_hosts(parts), start_unix=_last_start(parts))
        for job, parts in jobs.items()
    }


def _last_start(parts: Sequence[JobState]) -> float | None:
    """When Slurm expects the last of the pending components to start; None where it does not say so of all."""
    starts = [part.start_unix for part in parts if part.pending]
    known = [start for start in starts if start is not None]
    return max(known) if known and len(known) == len(starts) else None


def _all_hosts(parts: Sequence[JobState]) -> tuple[str, ...]:
    """Tasks go through the components by their numbers."""
    ordered = sorted(parts, key=lambda part: int(part.id.partition("+")[2] or 0))
    return tuple(host for part in ordered for host in part.hosts)


def _whole(parts: Sequence[JobState]) -> JobState:
    """What the states of a job's components come to."""
    ended = next((part for part in parts if part.over and part.state != "COMPLETED"), None)
    waiting = next((part for part in parts if part.pending and part.detail != "BeginTime"), None)
    if ended is not None and waiting is not None:
        # After a failure of its first node Slurm (22.05) puts only that component back into the queue, for ever.
        return JobState(
            id=ended.id,
            state=ended.state,
            detail=f"so the rest of the heterogeneous job, {waiting.id}, will never start",
        )
    return next((part for part in parts if not part.over), ended or parts[0])
