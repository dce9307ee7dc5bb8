"""Why a rank ended: errors/rank-*.json, and a line on its stderr."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from contextlib import contextmanager
from typing import Iterator

from megatron_ext.contract.errors import EngineError, address_space_left, shortage
from megatron_ext.contract.failure import KILLED, RankFailure
from megatron_ext.contract.files import write_json
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.worker import start_of_run

MIN_ADDRESS_SPACE = 2**30
"""Some dozen threads of a rank reserve as much; the C++ library ends a rank that cannot have one, without a reason."""


def report(plan: Plan, place: Place, error: BaseException, symptom: bool) -> None:
    _report_as(plan, place, type(error).__name__, str(error), traceback.format_exc(), symptom)


def report_killed(plan: Plan, place: Place, signum: int, kernel_kills: int) -> None:
    name = signal.Signals(signum).name
    message = f"killed by {name}{_hint(plan, signum, kernel_kills)}"
    print(f"[{place}] error: {message}", file=sys.stderr, flush=True)
    _report_as(plan, place, KILLED, message, "", symptom=_by_watchdog(plan, signum))


def _hint(plan: Plan, signum: int, kernel_kills: int) -> str:
    """`kernel_kills` are those for want of memory since the ranks were started."""
    if _by_watchdog(plan, signum):
        return ": by torch's watchdog of NCCL, because a message failed or took too long, or a kernel failed"
    if signum != signal.SIGKILL:
        room = address_space_left()  # of this process, with which a rank begins
        if room is None or room > MIN_ADDRESS_SPACE:
            return ""
        return f": probably out of memory: ulimit -v leaves a rank {room // 2**20} MiB when it starts"
    if kernel_kills:
        return f": out of memory: since the ranks started, the kernel has killed {kernel_kills} on this node for that"
    return ": by somebody, or by the kernel because memory ran out"


def _by_watchdog(plan: Plan, signum: int) -> bool:
    """It ends its own process when another one is lost. A failed kernel comes to light there, too: where no other
    rank tells a cause, the one that tells this first had it."""
    return signum == signal.SIGABRT and plan.device == "cuda"


def _report_as(plan: Plan, place: Place, kind: str, message: str, trace: str, symptom: bool) -> None:
    failure = RankFailure(
        rank=place.rank,
        stage=place.stage,
        dp=place.dp,
        tp=place.tp,
        node=plan.nodes[place.node].name,
        start=start_of_run(),
        unix=time.time(),
        type=kind,
        message=message,
        traceback=trace,
        symptom=symptom,
    )
    write_json(plan.files.rank_error(place.rank), vars(failure))


@contextmanager
def name_memory_errors() -> Iterator[None]:
    """Turns the many errors by which memory or threads run out into one message."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        lack = shortage(error)
        if lack is None:
            raise
        raise EngineError(lack) from error
