"""python -m benchmarks.freedoms [--results FILE]: what each freedom of a plan brings, by searches.

Of each cluster the fastest even plan that `tdpp search by_stage=true` finds (one tensor size, one number of replicas,
equal shares) stands beside the fastest with unequal shares and the fastest whose stages differ in replicas or tensor
sizes, where these are faster, and what is proved of all of the last kind that were looked at.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans

XL = ("model=xl", "train.precision=fp16")
FEW = ("cluster=a100x1_a10x7", *XL, "cluster.groups.gpu2.count=1")
CASES = {
    "1 x 4 A100 + 7 x 4 A10, batch 64": ("cluster=a100x1_a10x7", *XL, "parallel.global_batch_size=64"),
    "8 x 4 A10, batch 64": ("cluster=a10x8", *XL, "parallel.global_batch_size=64"),
    "8 x 8 A100 + 8 x 8 A10, batch 64": ("cluster=a100x8_a10x8", *XL, "parallel.global_batch_size=64"),
    "8 x 8 A100 + 8 x 8 A10, batch 512": ("cluster=a100x8_a10x8", *XL, "parallel.global_batch_size=512"),
    "1 x 4 A100 + 1 x 4 A10, batch 8": (*FEW, "parallel.global_batch_size=8"),
    "1 x 4 A100 + 1 x 4 A10, batch 4": (*FEW, "parallel.global_batch_size=4"),
}


def named(plan: Plan) -> str:
    p = plan.parallel
    return f"tensor {p.tensor}, replicas {p.replicas or p.data}, {p.partition}, {p.schedule}, {p.node_order}"


def of_case(words: Sequence[str]) -> dict[str, object]:
    outcome = best_plans(read(words), Arguments(top=2, by_stage=True))
    plans, even, looked = outcome.plans, outcome.even, outcome.looked
    assert looked is not None
    found: dict[str, object] = {
        "even_ms": None if even is None else round(even.total * 1e3, 1),
        "even_plan": None if even is None else named(even),
    }
    shares = next((plan for plan in plans if plan.parallel.alike and plan.parallel.shares), None)
    by_stage = next((plan for plan in plans if not plan.parallel.alike), None)
    if even is not None and shares is not None and shares.total >= even.total:
        shares = None
    found["shares_ms"] = None if shares is None else round(shares.total * 1e3, 1)
    found["shares_plan"] = None if shares is None else f"{named(shares)}, shares {shares.parallel.shares}"
    found["by_stage_ms"] = None if by_stage is None else round(by_stage.total * 1e3, 1)
    found["by_stage_plan"] = None if by_stage is None else named(by_stage)
    found["looked_at"] = f"{looked.said}, {looked.layouts} on {looked.nodes}"
    found["at_most"] = round(max(0.0, 1 - looked.least / plans[0].total), 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What each freedom of a plan brings.")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    found = {}
    print(
        "| cluster, batch | even plan | unequal shares | replicas or tensor sizes by stage | of all of these none is |"
    )
    print("|---|---|---|---|---|")
    for name, words in CASES.items():
        found[name] = one = of_case(words)
        cells = [_cell(one, freedom) for freedom in ("even", "shares", "by_stage")]
        print(f"| {name} | {' | '.join(cells)} | > {one['at_most']:.1%} faster |", flush=True)
    if args.results is not None:
        args.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _cell(one: dict[str, object], freedom: str) -> str:
    even, took = one["even_ms"], one[f"{freedom}_ms"]
    if not isinstance(took, float):
        return "none found faster"
    gain = "" if freedom == "even" or not isinstance(even, float) else f" ({even / took - 1:+.1%})"
    return f"{took:.1f} ms{gain}"


if __name__ == "__main__":
    main()
