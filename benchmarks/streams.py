"""python -m benchmarks.streams [--results FILE]: pipelines without a flush, as predicted and as they run.

Of vgg-tiny and gnmt-tiny, profiled on this machine's CPU, the fastest partition that is predicted for stages of 1-1,
2-1 and 3-1 replicas is launched as a user would. A machine with fewer cores than ranks takes longer than predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conf.compose import compose
from fasop.simulation.predict import predict
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.data.pairs import side_prefix
from megatron_ext.data.samples import SPLITS

LAYOUTS = ("1-1", "2-1", "3-1")
MICRO_BATCH, MICRO_BATCHES, ITERATIONS = 8, 24, 25
MODELS = {"vgg-tiny": ("data=digits",), "gnmt-tiny": ("model.untie_embeddings_and_output_weights=true",)}


def tdpp(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *words], capture_output=True, text=True, env=os.environ, check=False
    )
    if done.returncode:
        raise RuntimeError(f"tdpp {' '.join(words)}: {done.stderr}")


def data(model: str, folder: Path) -> str:
    """The prefix of samples that are all as long as those of a profile."""
    if model == "vgg-tiny":
        tdpp("data", "images", "--source", "digits", "--output", str(folder / "digits"))
        return str(folder / "digits")
    sized = compose([f"model={model}", "parallel=single", *MODELS[model]]).model.sized(1)
    random, prefix = np.random.default_rng(0), folder / "pairs"
    for split in SPLITS:
        for side, length in (("source", sized.sequence_length - 1), ("target", sized.decoder_tokens - 1)):
            every = [random.integers(4, sized.vocab_size, length) for _ in range(512)]
            write_indexed(side_prefix(prefix, split, side), every, np.dtype("<u2"))
    return str(prefix)


def of_layout(words: Sequence[str], layout: str, folder: Path) -> dict[str, object]:
    """Compares one layout: predicted and measured milliseconds of a mini-batch, the medians of iterations over
    theirs."""
    ranks = sum(map(int, layout.split("-")))
    sizes = [
        *(*words, f"cluster.groups.local.gpus_per_node={ranks}", "parallel.schedule=pipedream", "parallel.pipeline=2"),
        *(f"parallel.replicas={layout}", f"parallel.micro_batch_size={MICRO_BATCH}", "parallel.data=1"),
        *(
            f"parallel.global_batch_size={MICRO_BATCH * MICRO_BATCHES}",
            f"train.iterations={ITERATIONS}",
            "train.log_interval=1",
        ),
    ]
    layers = compose([*sizes, "parallel.partition=null"]).model.sized(1).counted
    predicted = {
        cut: predict(compose([*sizes, f"parallel.partition={cut}-{layers - cut}"])).iteration_s
        for cut in range(1, layers)
    }
    cut = min(predicted, key=predicted.__getitem__)
    partition = f"{cut}-{layers - cut}"
    runs = folder / layout
    tdpp("launch", *sizes, f"parallel.partition={partition}", f"runs_dir={runs}", f"name={layout}")
    (metrics,) = runs.rglob("metrics.jsonl")
    elapsed = [json.loads(line)["elapsed_ms"] for line in metrics.read_text().splitlines()]
    measured = statistics.median(elapsed[5:]) / MICRO_BATCHES
    expected = predicted[cut] * 1e3 / MICRO_BATCHES
    return {
        "partition": partition,
        "replicas": layout,
        "predicted_ms": round(expected, 3),
        "measured_ms": round(measured, 3),
        "measured_to_predicted": round(measured / expected, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipelines without a flush, as predicted and as they run.")
    parser.add_argument("--results", type=Path, help="where to write the figures as JSON")
    arguments = parser.parse_args()
    found: dict[str, object] = {"cores": len(os.sched_getaffinity(0))}
    for model, more in MODELS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            profile = folder / "profile.yaml"
            words = [f"model={model}", *more, f"data.prefix={data(model, folder)}"]
            tdpp("profile", *words, f"micro_batches={MICRO_BATCH}", "seconds=10", f"profile={profile}")
            words.append(f"cluster.gpus.cpu.profile={profile}")
            found[model] = [of_layout(words, layout, folder) for layout in LAYOUTS]
            print(json.dumps({model: found[model]}), flush=True)
    print(json.dumps(found))
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
