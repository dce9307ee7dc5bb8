"""How often the nodes of a run fail, from the records of the newest runs on such nodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.contract.reliability import DAY_S, USUAL_DAYS

if TYPE_CHECKING:
    from launch.history.record import RunRecord

TRUSTED = 0.25
"""The usual rate counts as much as so many failures that were seen: few records soon say more than it."""
NEWEST = 25
"""So many runs, the newest of those whose records are kept, say how often nodes fail; a launch waits for no more."""


def mean_time_between_failures(gpus: Sequence[str], runs: Path, known: float = 0.0) -> float:
    """Returns after how many seconds one of some nodes fails, on average; infinite if none ever does.

    Args:
        gpus: the kind of GPU of each node of which nobody said how often it fails.
        runs: the folder of the runs that show how often such nodes fail.
        known: how often the others fail a day, all together.
    """
    a_day = known + (DAY_S / between_failures(gpus, _newest(runs)) if gpus else 0.0)
    return DAY_S / a_day if a_day else math.inf


def between_failures(gpus: Sequence[str], records: Iterable[RunRecord]) -> float:
    """Returns the same from records. Only what no program does counts as a failure of a node."""
    days, failures = Counter[str](), Counter[str]()
    for record in records:
        for host in record.hosts:
            days[host.gpu] += max(0.0, record.ended_unix - record.began_unix) / DAY_S  # type: ignore[assignment]
            failures[host.gpu] += host.failed_itself
    each = {gpu: (failures[gpu] + TRUSTED) / (days[gpu] + TRUSTED * USUAL_DAYS) for gpu in set(gpus)}
    return DAY_S / sum(each[gpu] for gpu in gpus)


def _newest(runs: Path) -> list[RunRecord]:
    if not runs.is_dir():
        return []
    from launch.history.ledger import folders, kept  # few launches have a history, and it is slow to import

    found: list[RunRecord] = []
    for folder in sorted(folders(runs), key=attrgetter("name"), reverse=True):  # a name begins with its time
        if (record := kept(folder.path)) is not None:
            found.append(record)
            if len(found) == NEWEST:
                break
    return found
