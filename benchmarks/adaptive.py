"""python -m benchmarks.adaptive: the digits with a fixed batch and with one that adapts, after as many samples.

Both train the experiment vit_digits and are evaluated on its test images; of each seed there is a run of either.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 48_000
COMMON = ("experiment=vit_digits", "parallel.micro_batch_size=24", f"train.samples={SAMPLES}")
WAYS = {
    "fixed": (),
    "adaptive": ("adapt.rule=noise", "adapt.upper=384", "adapt.every=20"),
}


def tdpp(folder: Path, *words: str) -> None:
    """Runs a command as a user would, in a folder.

    Raises:
        SystemExit: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(f"tdpp {' '.join(words)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tdpp(folder, "data", "images", "--source", "digits", "--output", "data/digits")
        for way, own in WAYS.items():
            for seed in seeds:
                run = f"{way}{seed}"
                tdpp(folder, "launch", *COMMON, *own, f"train.seed={seed}", f"name={run}")
                tdpp(folder, "evaluate", run)
                (ran,) = (folder / "runs" / run).glob("2*")
                last = json.loads((ran / "metrics.jsonl").read_text().splitlines()[-1])
                found = json.loads((ran / "evaluation-test.json").read_text())["metrics"]["top-1"]
                print(
                    f"{way}, seed {seed}: {found:.1%} of the test images after {last['iteration']} updates and "
                    f"{last['consumed_samples']:,} samples"
                )


if __name__ == "__main__":
    main()
