"""python -m benchmarks.pareto: how long the front of time against cost takes over 9 x 9 cluster sizes.

Nodes of eight GPUs, none to eight of A100 and of A10 each, at the published prices, with GPT-2 XL; no baseline is run.
"""

from __future__ import annotations

import os
import resource
import time

from fasop.search.arguments import Arguments, First
from fasop.search.front import COST
from fasop.search.front_search import front
from fasop.search.inputs import read

WORDS = (*("cluster=a100x8_a10x8", "model=xl", "train=gpt2", "train.precision=fp16", "parallel.global_batch_size=64"),)


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    inputs = read(WORDS)
    wall, cpu = time.perf_counter(), time.process_time()
    found = front(inputs, Arguments(pareto=First.time))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    fastest, cheapest = found.plans[0], found.plans[-1]
    print(*found.summary, sep="\n")
    print(f"{cpu:.1f} CPU s on one core, {wall:.1f} s, {mib:.0f} MiB")
    for name, plan in (("fastest", fastest), ("cheapest", cheapest)):
        cost = 1000 * COST.known(plan, inputs.run)
        print(f"  {name}: {plan.total * 1e3:.0f} ms, ${cost:.2f} for 1000 iterations, {plan.parallel.node_order}")


if __name__ == "__main__":
    main()
