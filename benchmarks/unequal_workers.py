"""python -m benchmarks.unequal_workers FOLDER: small trainings on workers of speeds 1:3.

They compare equal shares with solved ones, and a fixed batch with one that adapts. They are the experiments
vit_jabas_digits and gnmt_iidp_pairs, each launched as a user would, in a folder that is kept; report-EXPERIMENT there
has the page that compares their runs. What is computed is real; each process also waits until the time that its node is
given for a micro-batch has passed (benchmarks/pacing.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.pacing import SITECUSTOMIZE, VARIABLE

ROOT = Path(__file__).resolve().parents[1]
FIXED = ("adapt.rule=none", "adapt.upper=null", "adapt.every=100")
WAYS = {
    "vit_jabas_digits": {
        "even": ("parallel.shares=null", *FIXED),
        "solved": FIXED,
        "adaptive": (),
    },
    "gnmt_iidp_pairs": {"even": ("parallel.shares=null",), "solved": ()},
}
PACES = {"vit_jabas_digits": "240,720", "gnmt_iidp_pairs": "800,2400"}
"""Milliseconds of a micro-batch on the fast and on the slow node: more than what two cores need, up to a load of about
five."""
SHORT = {
    "vit_jabas_digits": (),
    "gnmt_iidp_pairs": ("parallel.global_batch_size=64", "train.iterations=40", "train.eval_interval=10"),
}
"""Words of all runs, so that they take minutes at this pace."""
QUALITY = {"vit_jabas_digits": ("valid_top-1", 1.0), "gnmt_iidp_pairs": ("valid_loss", -1.0)}
"""A metric of evaluations, and whether more of it is better (1) or worse (-1)."""


def tdpp(folder: Path, *words: str, pace: str = "") -> None:
    """Runs a command as a user would, in a folder.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    if pace:
        environment[VARIABLE] = pace
    command = [sys.executable, "-m", "launch.cli", *words]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"tdpp {' '.join(words)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")


def prepare(folder: Path, experiment: str) -> None:
    """The data, unless they are there; of GNMT sentences of 100 words, each of which has one translation."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    if experiment == "vit_jabas_digits":
        tdpp(folder, "data", "images", "--source", "digits", "--output", "data/digits")
        return
    drawn, lines = random.Random(0), []
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe", "ra", "so", "ti", "vu", "ze") for b in "bdfgklmnrs"]
    translated = dict(zip(words, drawn.sample([word[::-1] for word in words], len(words)), strict=True))
    for _ in range(6000):
        sentence = drawn.choices(words, k=drawn.randint(3, 8))
        lines.append(f"{' '.join(sentence)}\t{' '.join(translated[word] for word in sentence)}\n")
    (folder / "toy.tsv").write_text("".join(lines))
    words_of = ("--source-lang", "xx", "--target-lang", "yy", "--train-bpe", "480")
    tdpp(folder, "data", "pairs", "--source", "toy.tsv", *words_of, "--output", "data/pairs")


def told(run: Path, metric: str, sign: float) -> str:
    """What a run reached, in how many updates and seconds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [sign * line[key] for line in lines for key in line if key == metric]
    times = [line["elapsed_ms"] for line in lines[1:]]
    best = f"best {metric} {sign * max(found):.4g}" if found else "not evaluated"
    return (
        f"{lines[-1]['iteration']} updates, {lines[-1]['consumed_samples']:,} samples, "
        f"median {statistics.median(times):.1f} ms an iteration, {best}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="is made, and keeps the runs and the page")
    parser.add_argument("--only", choices=list(WAYS), help="one of the experiments")
    usual = "; ".join(f"{pace} for {experiment}" for experiment, pace in PACES.items())
    parser.add_argument("--pace", metavar="MS,MS", help=f"of a micro-batch on either node, 1:3 ({usual})")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="of all runs, such as train.samples=9600")
    given = parser.parse_intermixed_args()
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for experiment in [given.only] if given.only else WAYS:
        prepare(folder, experiment)
        runs = []
        for way, own in WAYS[experiment].items():
            name = f"{experiment}-{way}"
            words = (f"experiment={experiment}", *own, *SHORT[experiment], *given.words, f"name={name}")
            tdpp(folder, "launch", *words, pace=given.pace or PACES[experiment])
            (run,) = (folder / "runs" / name).glob("2*")
            runs.append(str(run))
            print(f"{name} (load {os.getloadavg()[0]:.0f}): {told(run, *QUALITY[experiment])}", flush=True)
        tdpp(folder, "report", *runs, "--output", f"report-{experiment}")


if __name__ == "__main__":
    main()
