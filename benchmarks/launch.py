"""python -m benchmarks.launch: what `tdpp launch` adds to sbatch, on the tests' own Slurm cluster.

Rounds of turns: sbatch alone with the scripts of a run, `tdpp launch` of one experiment, and of a sweep of 20, each the
whole command as typed, its end included. The jobs are held (they wait for a time that does not come), so that nothing
but submission is measured. With `--results FILE` the figures are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.run_folder.rundir import RunDir
from tests.support.slurm import machines
from tests.support.slurm.cluster import Cluster

ROUNDS = 5
SWEPT = 20
ROOT = Path(__file__).resolve().parents[1]
RUN = ["experiment=seed_a100x1_a10x7", "container=none", "parallel.partition=null"]
"""32 ranks on a node of hgx and seven of gpu2: two jobs, or with het=hetjob one."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Seconds per experiment, the median over the rounds."""

    layout: str
    jobs: int
    """That an experiment submits."""
    sbatch_s: float
    one_s: float
    one_cpu_s: float
    """Processor time, which other work on the machine does not lengthen so much."""
    swept_s: float
    swept_cpu_s: float

    @property
    def line(self) -> str:
        one = f"{self.one_s:.2f} s ({self.one_s / self.sbatch_s:.0f} times, {self.one_s - self.sbatch_s:+.2f} s"
        swept = f"{self.swept_s:.2f} s ({self.swept_s / self.sbatch_s:.0f} times, {self.swept_s - self.sbatch_s:+.2f} s"
        return (
            f"{self.layout}: sbatch {self.sbatch_s:.3f} s; tdpp launch {one}; CPU {self.one_cpu_s:.2f} s); "
            f"in a sweep of {SWEPT} {swept}; CPU {self.swept_cpu_s:.2f} s) each"
        )


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Seconds that a command took, and those of processors."""

    wall: float
    cpu: float


def held(cluster: Cluster) -> None:
    """Occupies every node, so that what is submitted waits."""
    for options in (["--partition=hgx"], ["--partition=gpu2", "--nodes=7"]):
        done(cluster, "sbatch", "--exclusive", "--output=/dev/null", *options, "--wrap=sleep 3600")


def done(cluster: Cluster, *argv: str) -> Taken:
    """A command on the login node, to its end."""
    begun, before = time.perf_counter(), os.times()
    given = cluster.env | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(argv, env=given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(argv)} failed:\n{ended.stderr}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(wall=time.perf_counter() - begun, cpu=cpu)


def measured(cluster: Cluster, layout: str, prefix: Path) -> Figures:
    plain, one, swept = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="tdpp-launch-") as folder:
            given = [*RUN, f"executor.het={layout}", f"data.prefix={prefix}"]
            launch = [sys.executable, "-m", "launch.cli", "launch", *given, f"runs_dir={folder}/runs"]
            one.append(done(cluster, *launch))
            (run,) = RunDir.all(Path(folder) / "runs")
            scripts = sorted(str(path) for path in run.sbatch.iterdir())
            values = ",".join(str(100 + number) for number in range(SWEPT))
            swept.append(done(cluster, *launch, "-m", f"train.iterations={values}"))
            plain.append(sum(done(cluster, "sbatch", _free(script)).wall for script in scripts))
            cluster.run("scancel", "--state=PENDING", "--quiet", "--me")
    median = statistics.median
    return Figures(
        layout=layout,
        jobs=len(scripts),
        sbatch_s=median(plain),
        one_s=median(taken.wall for taken in one),
        one_cpu_s=median(taken.cpu for taken in one),
        swept_s=median(taken.wall for taken in swept) / SWEPT,
        swept_cpu_s=median(taken.cpu for taken in swept) / SWEPT,
    )


def _free(script: str) -> str:
    """The script without the job that it depends on, which may be gone."""
    path = Path(script)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("#SBATCH --dependency")))
    return script


def main() -> None:
    parser = argparse.ArgumentParser(description="What tdpp launch adds to sbatch.")
    parser.add_argument("--results", type=Path, help="a file for the figures, JSON")
    results = parser.parse_args().results
    load = os.getloadavg()[0]
    print(f"load average {load:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="tdpp-slurm-") as folder:
        cluster = Cluster(Path(folder) / "slurm", isolated=machines.may_isolate())
        try:
            cluster.start()
            held(cluster)
            prepare = ["data", "prepare", "--source", "stdlib", "--max-mb", "1", "--output", f"{folder}/stdlib"]
            done(cluster, sys.executable, "-m", "launch.cli", *prepare)
            prefix = Path(folder) / "stdlib_text_document"
            figures = [measured(cluster, layout, prefix) for layout in ("jobs", "hetjob")]
        finally:
            cluster.stop()
    for one in figures:
        print(one.line)
    if results is not None:
        kept = {"rounds": ROUNDS, "swept": SWEPT, "load": load, "layouts": [asdict(one) for one in figures]}
        results.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
