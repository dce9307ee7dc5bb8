"""python -m benchmarks.translation: what a small model learns of German and English on two cores, in BLEU.

The pairs are sentences of 3 to 12 words of LibreOffice's help, from Debian's packages, which `apt-get download`
fetches, or those of `--prefix`. The test set has whole pages that training never sees, and training has no sentence
that is nearly in it. Two replicas and two stages train the same model, each launched as a user would; beside their BLEU
stands that of copying the source. docs/translation.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.families.tasks import task_of
from megatron_ext.tasks.task import DECODER_SEQUENCE, SEQUENCE

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("libreoffice-help-de", "libreoffice-help-en-us")
CLEANING = (
    *("--source-lang", "de", "--target-lang", "en", "--min-words", "3", "--max-words", "12"),
    *("--train-bpe", "2500", "--split", "92,2,6"),
)
SIZES: dict[str, dict[str, float]] = {
    "transformer-tiny": {"hidden": 192, "hidden_dropout": 0, "attention_dropout": 0},
    "gnmt-tiny": {"hidden": 192, "hidden_dropout": 0.1},
}
LAYOUTS = {"data parallel": {"data": 2, "pipeline": 1}, "pipelined": {"data": 1, "pipeline": 2}}


def called(folder: Path, *arguments: str) -> str:
    """What `tdpp` prints, run in a folder; ends the benchmark where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "launch.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tdpp {' '.join(arguments)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def prepared(folder: Path) -> Path:
    """The prefix of LibreOffice's help as pairs."""
    subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    packages = sorted(map(str, folder.glob("libreoffice-help-*.deb")))
    called(folder, "data", "pairs", "--source", *packages, *CLEANING, "--output", str(folder / "help"))
    return folder / "help"


def copying(prefix: Path) -> float:
    """BLEU of the test set's source as it is."""
    from sacrebleu import corpus_bleu

    source, target = (Path(f"{prefix}-test.{side}.txt").read_text().splitlines() for side in ("source", "target"))
    return float(corpus_bleu(source, [target]).score)


def padding(given: list[str]) -> float:
    """The part of an epoch's tokens that only pad the others."""
    plan = make_plan(compose(given), "benchmark/padding")
    task = task_of(plan)
    pairs = task.epoch("train")
    assert pairs is not None
    numbers = np.arange(pairs // plan.global_batch_size * plan.global_batch_size)
    samples = task.samples("train", len(numbers))
    own = task.sizes(plan.micro_batch_size)
    computed = 0
    for micro_batch in numbers.reshape(-1, plan.micro_batch_size):
        sizes = {**own, **samples.sizes(micro_batch)}
        computed += plan.micro_batch_size * (sizes[SEQUENCE] + sizes[DECODER_SEQUENCE])
    return float(1 - samples.lengths(numbers).sum() / computed)


def overrides(model: str, prefix: Path, layout: dict[str, int], options: argparse.Namespace) -> list[str]:
    """What `tdpp launch` is given; the first of two stages has the encoder."""
    vocabulary = json.loads(Path(f"{prefix}.json").read_text())["vocab_size"]
    sizes = compose([f"model={model}", "parallel.partition=null"]).model.sized(1)
    partition = f"{sizes.layers}-{sizes.decoder_count}" if layout["pipeline"] == 2 else "null"
    return [
        *(f"model={model}", f"model.vocab_size={vocabulary}", f"data.prefix={prefix}", "data.bucketing=40"),
        *(f"model.{key}={value}" for key, value in SIZES[model].items()),
        *(f"model.{key}sequence_length={options.length}" for key in ("", "decoder_")),
        *(f"parallel.{key}={value}" for key, value in layout.items()),
        *(f"parallel.partition={partition}", f"parallel.micro_batch_size={options.sentences // 2}"),
        *(f"parallel.global_batch_size={options.sentences}", f"train.precision={options.precision}"),
        *(f"train.iterations={options.iterations}", f"train.lr={options.lr}", "train.adam_beta2=0.98"),
        *(f"train.lr_warmup_iterations={max(1, options.iterations // 6)}", "train.log_interval=50"),
        *("executor=local", "container=none", "executor.wait=true"),
    ]


def measured(folder: Path, name: str, given: list[str]) -> dict[str, Any]:
    """Seconds of training, and what `tdpp evaluate` says of the test set."""
    begun = time.monotonic()
    called(folder, "launch", f"name={name}", *given)
    seconds = time.monotonic() - begun
    found = json.loads(called(folder, "evaluate", name, "--split", "test", "--json"))
    return {"command": f"tdpp launch {' '.join(given)}", "seconds": seconds, **found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.translation", description="BLEU on unseen pages.")
    parser.add_argument("--prefix", type=Path, help="pairs that are there already")
    parser.add_argument("--model", default="transformer-tiny", choices=("transformer-tiny", "gnmt-tiny"))
    parser.add_argument("--iterations", type=int, default=1800)
    parser.add_argument("--sentences", type=int, default=64, help="of a global batch, an even number")
    parser.add_argument("--length", type=int, default=40, help="tokens of a sentence at most, its mark among them")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    return parser


def main() -> None:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix = prepared(folder) if options.prefix is None else options.prefix.absolute()
        found: dict[str, Any] = {"copying": copying(prefix)}
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; copying {found['copying']:.1f} BLEU")
        given = overrides(options.model, prefix, LAYOUTS["data parallel"], options)
        found["padding"] = {str(batches): padding([*given, f"data.bucketing={batches}"]) for batches in ("null", 40)}
        print("padding without and with bucketing:", *(f"{share:.1%}" for share in found["padding"].values()))
        for words, layout in LAYOUTS.items():
            one = measured(folder, words.replace(" ", "-"), overrides(options.model, prefix, layout, options))
            found[words] = one
            bleu = one["bleu"]
            print(
                f"{options.model}, {words}: {bleu['score']:.1f} BLEU, perplexity {one['perplexity']:.1f}, "
                f"{one['seconds']:.0f} s for {options.iterations} iterations; {bleu['signature']}",
                flush=True,
            )
        data, pipelined = (found[words]["bleu"]["score"] for words in LAYOUTS)
        print(f"{abs(data - pipelined):.2f} BLEU apart; pipelined {pipelined - found['copying']:+.1f} over copying")
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
