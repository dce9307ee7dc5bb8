"""python -m benchmarks.transformers_memory [FAMILY …]: memory of models of transformers as predicted, and as given out.

No GPU is needed: ranks train with the CUDA build of torch under the tests' stand-in for CUDA (`benchmarks.gpu_counts`
says how to get it), whose allocator is torch's own. Two models of each family with sizes drawn at random, and one of
which adapters alone are trained, as in tests/cuda/test_memory.py. Prints a row of docs/accuracy.md for each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import transformers

from benchmarks.gpu_counts import Counter, words_of
from conf.compose import compose
from fasop.simulation.predict import predict
from launch.commands.launching.preflight import with_length
from tests.cuda.test_memory import ADAPTERS_FROM, MIB, prepared
from tests.megatron_ext.families.test_huggingface import NAMED

BESIDE = ("fragments", "communicators", "context")
"""What a stage's memory has that torch's allocator does not give out."""


def row(kind: str, number: int, folder: Path) -> str:
    """The table's row of one model: of each stage the rank whose prediction is furthest off."""
    (case, chosen), counter = prepared(kind, number, folder), Counter(folder)
    run = counter.run_of(case, *chosen)
    counter.ours(run, case.gpus, BESIDE=str(Path(transformers.__file__).parents[1]))
    words = [*words_of(case), *chosen, f"data.prefix={run.plan.data_prefix}"]
    predicted = []
    for stage in predict(with_length(compose(words))).stages:
        parts = {name: amount.of(sum(stage.layers)) / MIB for name, amount in stage.memory.by_term().items()}
        predicted.append(sum(size for name, size in parts.items() if name not in BESIDE))
    found: dict[int, tuple[float, float]] = {}
    for place in run.plan.ranks:
        report = json.loads((run.run.path / "memory" / f"rank-{place.rank:05d}.json").read_text())
        given = report["mib"]["max_allocated"]
        error = predicted[place.stage] / given - 1
        found[place.stage] = max(found.get(place.stage, (0.0, 0.0)), (given, error), key=lambda one: abs(one[1]))
    cells = [
        *(kind, f"{run.plan.pipeline} x {run.plan.tensor}", chosen[0].rpartition("=")[2]),
        "yes" if number >= ADAPTERS_FROM else "no",
        "yes" if "recompute=full" in case.words else "no",
        ", ".join(f"{given:.0f}" for given, _ in found.values()),
        ", ".join(f"{error:+.1%}" for _, error in found.values()),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    for kind in sys.argv[1:] or NAMED:
        for number in range(ADAPTERS_FROM + 1):
            with tempfile.TemporaryDirectory() as folder:
                print(row(kind, number, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
