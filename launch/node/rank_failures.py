"""What the ranks of a node say of their failures."""

from __future__ import annotations

import time
from collections.abc import Sequence

from conf.run_folder.rundir import RunDir
from launch.files.attempt import Start
from launch.files.faults import Faults
from launch.node.stalled_rank import holding_up, read_doings
from megatron_ext.contract.failure import KILLED, RankFailure
from megatron_ext.contract.plan import Plan


def failures(run: RunDir, plan: Plan, node_rank: int, start: Start) -> list[RankFailure]:
    """Of this start."""
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
