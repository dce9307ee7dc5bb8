"""python -m benchmarks.simulation: the CPU seconds of simulated trainings, and how they agree with others.

The first part plays 90 epochs on 64 sets of nodes with each rule. The second compares simulated trainings
(benchmarks/simulation_cases.py) with virtual rehearsals of them, and with runs whose layers sleep, without the first
iteration. `--only WORDS` compares those with the words in their name, and no other part runs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import sleeping
from benchmarks.simulation_cases import CASES, Case, write_cluster
from benchmarks.sleeping import Pass
from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.commands.simulate import played
from launch.commands.simulating.arguments import parse
from launch.control.planning.predictions import rehearsal_times

EPOCH, EPOCHS = 1_281_167, 90
WORDS = (
    *("cluster=a100x8_a10x8", "cluster.groups.a100.count=4", "cluster.groups.a10.count=12", "model=xl", "train=gpt2"),
    *(
        "train.precision=fp16",
        "parallel.tensor=4",
        "parallel.pipeline=1",
        "parallel.data=32",
        "parallel.partition=null",
    ),
    *("parallel.global_batch_size=64", "parallel.micro_batch_size=1", f"train.epochs={EPOCHS}", f"epoch={EPOCH}"),
    *("adapt.upper=4096", "noise=100,3000"),
)
RULES = ("noise", "similarity", "goodput")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Seconds of a training without its first iteration."""

    simulated_s: float
    took_s: float
    iterations: int
    batches: tuple[int, int]
    """The smallest and the largest one."""

    def __str__(self) -> str:
        return f"{self.took_s:.2f} s, simulated {self.simulated_s:.2f} s ({self.simulated_s / self.took_s - 1:+.1%})"


def rehearsed(case: Case, cluster: Path) -> Compared:
    """A whole virtual rehearsal."""
    words = [*case.words, f"cluster={cluster}"]
    noise = [] if case.noise is None else [f"executor.noise='{case.noise}'"]
    experiment = with_length(compose([*words, "executor.rehearse=virtual", *noise]))
    with tempfile.TemporaryDirectory() as folder:
        run = sleeping.run(Path(folder), experiment, None)
        return _compared(run, words, case.noise)


def slept(case: Case, cluster: Path) -> Compared:
    """A run whose layers sleep for as long as is predicted of them; simulated with the noise that it measured."""
    words = [*case.words, f"cluster={cluster}"]
    experiment = with_length(compose(words))
    every = rehearsal_times(experiment)
    stages = [experiment.parallel.layout.stage_dp_tp(rank)[0] for rank in range(len(every))]
    least = {
        stage: min(
            (times for of, times in zip(stages, every, strict=True) if of == stage), key=lambda of: of.forward_ns
        )
        for stage in stages
    }
    passes = [Pass(of.forward_ns[0] / 1e9, of.backward_ns[0] / 1e9) for _, of in sorted(least.items())]
    slower = [times.forward_ns[0] / least[stage].forward_ns[0] for stage, times in zip(stages, every, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        run = sleeping.run(Path(folder), experiment, passes, lambda rank, _: slower[rank])
        noise = None
        if case.noise is not None:
            noise = f"{folder}/noise.csv"
            decisions = [json.loads(line) for line in run.decisions.read_text().splitlines()]
            points = {one["consumed_samples"]: one["noise_scale"] for one in reversed(decisions) if one["noise_scale"]}
            rows = "".join(f"{samples},{scale}\n" for samples, scale in sorted(points.items()))
            Path(noise).write_text(f"samples,noise_scale\n{rows}")
        return _compared(run, words, noise)


def _compared(run: RunDir, words: Sequence[str], noise: str | None) -> Compared:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    asked = [*words, *([] if noise is None else [f"noise={noise}"])]
    own = compose(words).node_order
    (one,) = played(parse([*asked, f"nodes={own}"]))[0].trainings
    course = one.legs[0].trajectory
    batches = [line["consumed_samples"] for line in lines]
    sizes = [after - before for before, after in zip([0, *batches], batches, strict=False)]
    return Compared(
        simulated_s=one.seconds - float(course.seconds[0]),
        took_s=sum(line["elapsed_ms"] for line in lines[1:]) / 1e3,
        iterations=len(lines),
        batches=(min(sizes), max(sizes)),
    )


def compare(only: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = write_cluster(Path(folder))
        for case in CASES:
            if only not in case.name:
                continue
            for what, run, wanted in (("rehearsal", rehearsed, case.rehearsed), ("sleeping run", slept, case.slept)):
                if wanted:
                    found = run(case, cluster)
                    print(
                        f"{case.name}: {what} of {found.iterations} iterations with batches of {found.batches[0]} to "
                        f"{found.batches[1]}: {found}, load {os.getloadavg()[0]:.0f}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, metavar="WORDS")
    only = parser.parse_args().only
    if only is not None:
        compare(only)
        return
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    played(parse([*WORDS, "adapt.rule=noise", "nodes=a10"]))  # imports
    for rule in RULES:
        began = time.process_time()
        results, _ = played(parse([*WORDS, f"adapt.rule={rule}"]))
        iterations = sum(one.iterations for one in results.trainings)
        print(
            f"{rule}: {EPOCHS} epochs on {len(results.trainings)} sets of nodes, {iterations:,} iterations: "
            f"{time.process_time() - began:.2f} CPU s"
        )
    compare("")


if __name__ == "__main__":
    main()
