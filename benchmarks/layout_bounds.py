"""python -m benchmarks.layout_bounds [--seeds N] [--first N]: bounds of layouts by stage, against brute force.

Random clusters of up to six GPUs, of one or two kinds, with replicas on unlike nodes, layers that may differ,
leaf switches, links by pairs or measured collectives. For
some layouts, options and orders of each, the fastest of all partitions is found by replay; no bound may be above it.
What the bounds leave open is printed for each of them; the exit code is 1 if one is too high.
"""

from __future__ import annotations

import argparse
import math
import sys

import numpy as np

from fasop.search.bounds.lower_bound import LowerBounds
from fasop.search.by_stage.bounds.chains import Work, sized
from fasop.search.by_stage.bounds.layout_batch import LayoutBatch
from fasop.search.by_stage.bounds.layout_bounds import PlacedLayouts
from fasop.search.by_stage.candidate import Candidate
from fasop.search.by_stage.closing import BOXES
from tests.support.fasop.random_clusters import NETWORKS
from tests.support.fasop.staged_plans import fastest, small_case

LAYOUTS = 8
"""Plans but for their partition, of each cluster."""
ROOM = 1.2
"""Times the fastest partition: to where bounds are raised."""


def bounds_of(seed: int) -> list[tuple[float, dict[str, float]]]:
    """Return seconds of the fastest partition, and each bound, for some plans of a random cluster."""
    _, kinds, _, plans = small_case(seed, alike=seed % 4 != 0, network=[*NETWORKS][seed % 5])
    names, found = [kind.name for kind in kinds], []
    for plan in plans[seed % 3 :: max(1, len(plans) // LAYOUTS)]:
        one, taken = plan.training, fastest(plan)
        work = Work(one, kinds, sorted(set(one.parallel.layout.tensors)))
        placed = PlacedLayouts(LayoutBatch.of([one.parallel.layout]), plan.nodes, names)
        candidate = Candidate(one, plan.nodes, work, names)
        bounds = {
            "work": LowerBounds(kinds).of_work(
                [sized(one, tensor) for tensor in work.sizes], [one.parallel.recompute], kinds
            ),
            "shortest trip": float(placed.shortest_trip(one, work)[0]),
            "many layouts": float(placed.least_seconds(one, work)[int(one.parallel.sharded_optimizer), 0]),
            "trip": float(placed.trip_seconds(one, work)[int(one.parallel.sharded_optimizer), 0]),
            "one layout": candidate.bound,
        }
        candidate.tighten(ROOM * taken)
        bounds["whole layers"] = candidate.bound
        if candidate.alike:
            candidate.prove(candidate.search(math.inf)[0], BOXES[-1], ROOM * taken)
            bounds["longest paths"] = candidate.bound
        found.append((taken, bounds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Bounds of layouts by stage, against brute force.")
    parser.add_argument("--seeds", type=int, default=500, help="random clusters")
    parser.add_argument("--first", type=int, default=0, help="the first one's number")
    args = parser.parse_args()
    gaps, too_high, cases = dict[str, list[float]](), 0, 0
    for seed in range(args.first, args.first + args.seeds):
        for taken, bounds in bounds_of(seed):
            cases += 1
            for name, bound in bounds.items():
                if bound > taken * (1 + 1e-9):
                    too_high += 1
                    print(f"cluster {seed}: {name} says {bound} s, a partition takes {taken} s")
                if np.isfinite(taken):
                    gaps.setdefault(name, []).append(1 - bound / taken)
    print(f"{cases} plans of {args.seeds} clusters, {too_high} bounds too high")
    for name, of_bound in gaps.items():
        print(f"{name}: {np.mean(of_bound):.1%} open on average, at most {np.max(of_bound):.1%}")
    return int(too_high > 0)


if __name__ == "__main__":
    sys.exit(main())
