"""python -m megatron_ext.worker PLAN.json NODE_RANK: runs the ranks of one node until they end.

torch is imported once and the ranks are forked from it, which makes 32 of them ready in seconds. This parent
holds the store where all ranks meet (on the node of rank 0), watches its ranks, and when one fails ends the others. It
ends with 0 when all its ranks did, 1 when one failed, 143 when it was told to stop (SIGTERM or SIGINT), 75 when it
was asked to save and end (SIGUSR2) and its ranks have done so. No rank outlives it. It leaves SIGTERM to an agent that
says so (`contract.worker.AGENT`).
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Callable, List, Optional

from torch.distributed import Store  # type: ignore[attr-defined]

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.contract.worker import die_with_parent, left_to_agent
from megatron_ext.engine.log import Unlogged, log_unlogged
from megatron_ext.parallel import interruption, meeting
from megatron_ext.parallel.meeting import LocalStore, join_store, open_store
from megatron_ext.rank_processes import Ranks, name_memory_errors, signals_blocked
from megatron_ext.timeline.event_files import EventBuffer, EventFiles
from megatron_ext.timeline.progress import Wait
from megatron_ext.timeline.surroundings import note_surroundings
from megatron_ext.train import train


class Stopped(Exception):
    """This process was told to stop."""


Job = Callable[[Plan, Place, Store], None]
"""What a rank does once it can meet the others at the store."""


def main(argv: List[str], job: Optional[Job] = None) -> int:
    """Runs the node's ranks, which train or do another `job`; the exit code as in the module's docstring."""
    plan_path, node_rank = Path(argv[0]), int(argv[1])
    signal.signal(interruption.SIGNAL, signal.SIG_IGN)  # until there are ranks to tell
    try:
        plan = Plan.read(plan_path)
        die_with_parent(signal.SIGTERM)
        with name_memory_errors():
            return _run_node(plan, node_rank, job)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


def _run_node(plan: Plan, node_rank: int, job: Optional[Job]) -> int:
    parent = os.getppid()

    def stop(signum: int, _: Optional[FrameType]) -> None:
        if signum == signal.SIGTERM and os.getppid() == parent and left_to_agent():
            return
        raise Stopped(signal.Signals(signum).name)

    local = LocalStore() if meeting.local_store_suffices(plan) else None
    records = plan.timeline and job is None
    buffers = {rank: EventBuffer() for rank in plan.nodes[node_rank].ranks if records}
    events = EventFiles(plan, buffers)
    join = partial(join_store, plan) if local is None else local.join
    unlogged = Unlogged()
    do = job or partial(train, buffers=buffers, unlogged=unlogged)

    def rank(place: Place) -> None:
        with Wait("finding the other ranks"):
            store = join()
        do(plan, place, store)

    ranks = Ranks(plan, node_rank, rank)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(interruption.SIGNAL, ranks.forward)
    try:
        first = node_rank == plan.ranks[0].node
        if first:
            plan.files.address.unlink(missing_ok=True)
        with signals_blocked():
            ranks.start()
            events.start()
        if job is None:
            note_surroundings(plan, node_rank)
        store = open_store(plan) if first and local is None else None
        code = ranks.wait()
        if store is not None:
            store.close()
    except Stopped:
        code = 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(interruption.SIGNAL, signal.SIG_IGN)  # while Python ends, it would kill: handlers are gone then
        ranks.end()
        events.finish()
        try:
            log_unlogged(plan, unlogged)
        except OSError as error:  # the disk is full, which is not how the run ended
            print(f"error: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
