"""Which rank holds the others up: by what each of a node's ranks was doing when the node ended, or is doing now.

When a run stands still every rank waits for others, but for those that hold it up: one that somebody has stopped, or
one that does not come back from work of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.run_folder.json_values import typed
from conf.run_folder.run_files import parse_json, read_text
from conf.run_folder.rundir import RunDir
from launch.files.records import DoingRecord, RankRecord, Start
from launch.files.run_files import Faults
from megatron_ext.contract.errors import KILLED, RankFailure, RankPlace
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place

STILL_S = 10.0
"""A rank at work of its own may hold the others up after this time."""
_STOPPED = {"T": "was stopped by SIGSTOP or Ctrl-Z", "t": "is held by a debugger"}
_ALIVE = {"R": "runs", "S": "sleeps", "D": "waits for a disk or a driver"}
"""What a process does, by the kernel's letter (proc(5))."""


@dataclass(frozen=True, kw_only=True)
class Doing(RankPlace):
    """What a rank was doing when its node's worker looked last (docs/formats.md)."""

    pid: int
    does: str
    """`works`, `waits`, or `lost` another rank."""
    what: str
    """It waits for, or did before its own work."""
    iteration: int
    """0 before the first."""
    since_unix: float
    process: str
    """The kernel's letter for its process."""
    at: str = ""
    """Where in Python it stands still, such as `my.py:6 wait_for_nfs`; empty where that is not known."""
    stack: tuple[str, ...] = ()
    """Its frames, from the innermost on."""

    @property
    def stopped(self) -> bool:
        return self.process in _STOPPED


def read_doings(run: RunDir, plan: Plan, started_unix: Mapping[str, float], faults: Faults) -> tuple[Doing, ...]:
    """Reads what the ranks of these nodes do, but not what an earlier start left there."""
    return tuple(
        _doing(plan.ranks[entry.rank], node, entry.pid, entry.doing)
        for node, unix in started_unix.items()
        for entry in _ranks(run.node_ranks(node), plan, faults)
        if entry.doing is not None and entry.doing.since_unix >= unix
    )


def _ranks(path: Path, plan: Plan, faults: Faults) -> list[RankRecord]:
    """What nodes/<node>.ranks.json says of each of its ranks. In an elastic run an earlier plan may have had more."""
    ranks = len(plan.ranks)
    try:
        content = faults.tried(lambda: parse_json(read_text(path), str(path)), None)
    except FileNotFoundError:
        return []
    if content is None:
        return []
    if not isinstance(content, list):
        faults.add(f"{path} is damaged: it is not a JSON list")
        return []
    found = [
        faults.tried(lambda number=number, entry=entry: typed(RankRecord, entry, f"{path}[{number}]"), None)  # type: ignore[misc]
        for number, entry in enumerate(content)
    ]
    strange = [entry.rank for entry in found if entry is not None and entry.rank >= ranks]
    if strange and plan.elastic is None:
        faults.add(f"{path} is damaged: plan.json has no rank {strange[0]}")
    return [entry for entry in found if entry is not None and entry.rank < ranks]


def _doing(place: Place, node: str, pid: int, doing: DoingRecord) -> Doing:
    return Doing(rank=place.rank, stage=place.stage, dp=place.dp, tp=place.tp, node=node, pid=pid, **vars(doing))


def holding_up(doings: Sequence[Doing], plan: Plan, lost_unix: float | None, now_unix: float) -> list[Doing]:
    """The ranks that hold the others up, longest first: all that are stopped, or else those that are at work of their
    own while others are not. `lost_unix` is when the first rank gave up waiting, None if none has.

    Who gives up has waited for `train.comm_timeout_s`, and whom it waited for has stood still nearly as long. A rank
    that was at work for a moment only when others lost something else did not hold them up.
    """
    before = now_unix - STILL_S if lost_unix is None else lost_unix - plan.train.comm_timeout_s / 2
    # Whoever looks at a process with a debugger stops it for a moment.
    stopped = [doing for doing in doings if doing.stopped and (lost_unix is not None or doing.since_unix < before)]
    works = [doing for doing in doings if doing.does == "works" and doing.since_unix < before]
    ranks = len(plan.ranks)
    held = stopped or (works if len(works) < ranks or ranks == 1 else [])
    return sorted(held, key=lambda doing: doing.since_unix)


def in_words(held: Sequence[Doing], verb: str, until_unix: float) -> tuple[str, str]:
    """Which rank, and how; of at least one. `verb` is `stands still`, until now, or the like."""
    first, *others = held
    more = f"; the same holds for rank {', '.join(str(doing.rank) for doing in others)}" if others else ""
    return f"{first.place} {verb}", f"{_state(first, until_unix)}{more}"


def _state(doing: Doing, until_unix: float) -> str:
    where = ", ".join(_where(doing))
    if doing.stopped:
        return f"its process {doing.pid} {_STOPPED[doing.process]} ({where})"
    does = _ALIVE.get(doing.process, f"is in state {doing.process}")
    at = f" in {doing.at}" if doing.at else ""
    return f"computing for {until_unix - doing.since_unix:.0f} s{at} ({where}); its process {doing.pid} {does}"


def _where(doing: Doing) -> Iterator[str]:
    yield f"iteration {doing.iteration}" if doing.iteration else "before the first iteration"
    if doing.what:
        yield f"{'after' if doing.does == 'works' else 'in'}: {doing.what}"


def failures(run: RunDir, plan: Plan, node_rank: int, start: Start) -> list[RankFailure]:
    """Reads the failures of this start."""
    ranks = plan.nodes[node_rank].ranks
    found = [error for rank in ranks if (error := run.read(run.rank_error(rank), RankFailure))]
    return [error for error in found if error.start == str(start)]


def only_lost_others(
    run: RunDir, plan: Plan, node_rank: int, failed: Sequence[RankFailure], started_unix: float
) -> bool:
    """Whether the ranks of a node, which has started then, reported nothing but others that were gone, and none of them
    held those up."""
    if not failed or not all(error.symptom for error in failed):
        return False
    doings = read_doings(run, plan, {plan.node_names[node_rank]: started_unix}, Faults())
    return not holding_up(doings, plan, min(error.unix for error in failed), time.time())


def lost_a_rank(code: int, failed: Sequence[RankFailure]) -> bool:
    """Whether something was killed, or lost others; an error of a rank's own would come again.

    `code` is the worker's exit code, negative for a signal.
    """
    return code < 0 or (bool(failed) and all(error.symptom or error.type == KILLED for error in failed))
