"""What a rehearsed plan knows of its times."""

from __future__ import annotations

from typing import Collection, List

from megatron_ext.contract.adaptive.config import NONE
from megatron_ext.contract.plan_check import Faults, Rules, Values


def _rehearsal(plan: Values) -> Faults:
    rehearsal, adapt = plan["rehearsal"] or {}, plan.get("adapt") or {}
    if rehearsal.get("ranks") is None:
        return
    yield from _times("rehearsal.ranks", rehearsal["ranks"], plan)
    others = rehearsal.get("other_sizes") or []
    for number, other in enumerate(others):
        yield from _times(f"rehearsal.other_sizes[{number}].ranks", other["ranks"], plan)
    timed = {plan.get("micro_batch_size"), *(other["size"] for other in others)}
    lacking = {size for sizes in adapt.get("micro_batch_sizes") or () for size in sizes} - timed
    if lacking:
        yield "rehearsal.other_sizes", sorted(timed), f"with the times of micro-batches of {min(lacking)} samples"
    yield from _rehearsed_streams(plan, rehearsal.get("in_streams") or [], timed)
    samples = [point["samples"] for point in rehearsal.get("noise") or ()]
    if adapt.get("rule", NONE) != NONE and not samples:
        yield "rehearsal.noise", rehearsal.get("noise"), "given with adapt.rule"
    if samples != sorted({*samples}):
        yield "rehearsal.noise", samples, "samples in increasing order"


def _rehearsed_streams(plan: Values, timed: List[Values], sizes: Collection[int]) -> Faults:
    """Whether there are times for all streams that replicas may have, with each size of micro-batches."""
    of_replicas = (plan.get("adapt") or {}).get("streams") or ()
    counts = [*(plan.get("streams") or ()), *(one for sizes in of_replicas for of_size in sizes for one in of_size)]
    most = max(counts, default=1)
    lacking = {*sizes} - {one["size"] for one in timed}
    if most > 1 and lacking:
        yield "rehearsal.in_streams", [one["size"] for one in timed], f"with micro-batches of {min(lacking)} samples"
    for number, one in enumerate(timed):
        key = f"rehearsal.in_streams[{number}]"
        yield from _times(f"{key}.ranks", one["ranks"], plan)
        if len(one["rates"]) != len(plan["ranks"]) or min(map(len, one["rates"])) < most:
            yield f"{key}.rates", one["rates"], f"of {len(plan['ranks'])} ranks, for up to {most} streams each"
        if len(one["copy_ns"]) != len(plan["ranks"]):
            yield f"{key}.copy_ns", one["copy_ns"], f"of {len(plan['ranks'])} ranks"


def _times(key: str, times: List[Values], plan: Values) -> Faults:
    """Faults of the ranks' times."""
    count, chunks = len(plan["ranks"]), plan["chunks"]
    if len(times) != count:
        yield key, len(times), f"of {count} ranks"
    for number, of_rank in enumerate(times):
        for of_chunks in ("forward_ns", "backward_ns"):
            if len(of_rank.get(of_chunks, range(chunks))) != chunks:
                yield f"{key}[{number}].{of_chunks}", of_rank[of_chunks], f"of chunks={chunks} numbers"


RULES: Rules = [
    (("rehearsal", "ranks", "chunks"), _rehearsal),
]
