"""python -m benchmarks.gpu_counts [CASE …]: kernels, host waits and bytes of the engine beside those of others.

No GPU is needed: all run with the CUDA build of torch under the tests' stand-in for CUDA. `make test-cuda` installs
that torch, and CUDA_VENV names its folder. Each case is run eagerly in bf16, in iterations of two micro-batches, of
which the second adds to gradients and the first need not. Beside it run, in the same process each and on the same plan,
a plain loop with weights in bf16, one under autocast and, with `--megatron-core FOLDER`, Megatron-Core; FOLDER is what
`pip install --no-deps --target FOLDER megatron-core` made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.images import photographs
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support import ROOT
from tests.support.cuda.machine import WORKER, Counts, Machine, counts
from tests.support.megatron_ext.engine_run import EngineRun, make_run

GPT = (
    *("model=small", "model.layers=12", "model.hidden=768", "model.heads=12", "model.sequence_length=1024"),
    *("model.vocab_size=50257", "model.vocab_multiple=128", "parallel.micro_batch_size=4"),
)
VIT = ("model=vit-b16", "parallel.micro_batch_size=8")
LLAMA = ("model=llama-1b", "model.layers=4", "parallel.micro_batch_size=1")
HIDDEN, DROPOUT = "model.hidden_dropout=0.1", "model.hidden_dropout=0.1 model.attention_dropout=0.1"
ONE, TWO = "parallel=single", "parallel.data=2 parallel.pipeline=1 parallel.partition=12"
HALVES = "parallel.data=2 parallel.pipeline=1 parallel.partition=4"
MICRO_BATCHES, DOCUMENTS, TOKENS, VOCABULARY = 2, 64, 4096, 50257
PLAIN, AUTOCAST, MEGATRON_CORE = "plain-bf16", "plain", "megatron-core"
NAMES = {PLAIN: "a plain loop in bf16", AUTOCAST: "a plain loop under autocast", MEGATRON_CORE: "Megatron-Core"}
COUNTED = ROOT / "benchmarks" / "gpu" / "counted.py"


@dataclass(frozen=True)
class Case:
    gpus: int
    model: Sequence[str]
    words: str
    beside: Sequence[str] = field(default=())
    """Others that train the same."""


CASES = {
    "GPT-2 124M": Case(1, GPT, ONE, (PLAIN, AUTOCAST, MEGATRON_CORE)),
    "with hidden dropout": Case(1, GPT, f"{ONE} {HIDDEN}", (PLAIN,)),
    "with hidden and attention dropout": Case(1, GPT, f"{ONE} {DROPOUT}", (PLAIN, MEGATRON_CORE)),
    "Llama-1B, 4 layers": Case(1, LLAMA, ONE, (PLAIN, AUTOCAST, MEGATRON_CORE)),
    "ViT-B/16": Case(1, VIT, ONE, (PLAIN, AUTOCAST)),
    "recomputed": Case(1, GPT, f"{ONE} parallel.recompute=full"),
    "some layers recomputed": Case(1, GPT, f"{ONE} parallel.recompute=full:3"),
    "in two streams": Case(1, GPT, f"{ONE} parallel.streams=2"),
    "data parallel": Case(2, GPT, TWO),
    "sharded optimizer": Case(2, GPT, f"{TWO} parallel.sharded_optimizer=true"),
    "offloaded": Case(1, GPT, f"{ONE} parallel.offload=optimizer"),
    "activations offloaded": Case(1, GPT, f"{ONE} parallel.offload=activations"),
    "two stages, activations offloaded": Case(
        2, GPT, "parallel.data=1 parallel.pipeline=2 parallel.partition=6-6 parallel.offload=activations"
    ),
    "ZB-H1, all offloaded": Case(
        2,
        GPT,
        "parallel.data=1 parallel.pipeline=2 parallel.partition=6-6 parallel.schedule=zb_h1 parallel.offload=both",
    ),
    "sharded and offloaded": Case(2, GPT, f"{TWO} parallel.sharded_optimizer=true parallel.offload=optimizer"),
    "scattered gradients": Case(2, LLAMA, f"{HALVES} parallel.zero=2"),
    "scattered gradients of tied words": Case(2, GPT, f"{TWO} parallel.zero=2"),
    "gathered weights": Case(2, LLAMA, f"{HALVES} parallel.zero=3"),
    "gathered weights of tied words": Case(2, GPT, f"{TWO} parallel.zero=3"),
    "two stages": Case(2, GPT, "parallel.data=1 parallel.pipeline=2 parallel.partition=6-6"),
}


def words_of(case: Case) -> list[str]:
    """What configures a case, but for its data."""
    (micro,) = (int(word.partition("=")[2]) for word in case.model if "micro_batch_size" in word)
    replicas = next((int(word.partition("=")[2]) for word in case.words.split() if "data=" in word), 1)
    batch = micro * MICRO_BATCHES * replicas
    return [
        *(*case.model, *case.words.split(), "cluster.gpus.cpu.name=GPU", "data.split='1,0,0'"),
        *(f"parallel.global_batch_size={batch}", "train.checkpoint=false", "train.precision=bf16"),
        *("train.iterations=4", "train.lr_warmup_iterations=1", "train.log_interval=1"),
    ]


@dataclass(frozen=True)
class Counter:
    """Counts in a folder."""

    folder: Path
    megatron_core: Path | None = None

    def run_of(self, case: Case, *overrides: str) -> EngineRun:
        """A plan of this case with random tokens or images."""
        given = [*words_of(case), *overrides]
        folder = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        if case.model is VIT:
            photographs(self.folder / "images", DOCUMENTS, 224)
            return make_run(folder, self.folder / "images", *given, base=())
        data = self.folder / "data"
        if not data.with_suffix(".idx").exists():
            tokens = np.random.default_rng(0).integers(0, VOCABULARY, DOCUMENTS * TOKENS, dtype=np.uint16)
            write_indexed(data, np.split(tokens, DOCUMENTS), np.dtype(np.uint16))
        return make_run(folder, data, *given, base=())

    def ours(self, run: EngineRun, gpus: int, **environment: str) -> list[Counts]:
        """The third iteration, of each rank."""
        return self._third(gpus, WORKER, run.run.plan, "0", "fused", environment=environment)

    def other(self, run: EngineRun, contender: str) -> list[Counts]:
        """The same of `NAMES`."""
        return self._third(1, COUNTED, contender, run.run.plan)

    def _third(self, gpus: int, *words: str | Path, environment: Mapping[str, str] | None = None) -> list[Counts]:
        machine = Machine(gpus, Path(tempfile.mkdtemp(dir=self.folder)))
        paths = [ROOT] if self.megatron_core is None else [ROOT, self.megatron_core]
        own = {
            "STANDIN_LARGEST": str(2**20),  # gradients need not be true
            "PYTHONPATH": ":".join(map(str, paths)),
            **(environment or {}),
        }
        ended = machine.run(*words, environment=own)
        if ended.returncode:
            raise RuntimeError(ended.stdout + ended.stderr)
        return [counts(log, 3) for log in machine.logs()]


def cells(found: list[Counts]) -> list[str]:
    """Counts those of the first micro-batch, the second, the rest; host waits, and MiB to NCCL. Ranks that differ have
    one each."""
    of_ranks = []
    for one in found:
        sent = sum(message.bytes for message in one.messages if message.call != "recv")
        kernels = [str(one.by_micro_batch[number]) for number in ("0", "1", "")]
        of_ranks.append([*kernels, str(sum(one.waits.values())), f"{sent / 2**20:,.1f}"])
    return [", ".join(dict.fromkeys(cell)) for cell in zip(*of_ranks, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--megatron-core", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    print("| | first micro-batch | later ones | rest of the iteration | host waits | MiB to NCCL |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        counter = Counter(Path(name), arguments.megatron_core and arguments.megatron_core.resolve())
        for name in arguments.cases or CASES:
            case = CASES[name]
            run = counter.run_of(case)
            print(f"| {name} |", " | ".join(cells(counter.ours(run, case.gpus))), "|", flush=True)
            for other in case.beside:
                if other != MEGATRON_CORE or counter.megatron_core is not None:
                    print(f"| … {NAMES[other]} |", " | ".join(cells(counter.other(run, other))), "|", flush=True)


if __name__ == "__main__":
    main()
