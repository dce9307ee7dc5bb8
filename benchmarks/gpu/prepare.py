"""python -m benchmarks.gpu.prepare FOLDER: a plan and data for every case of `benchmarks.gpu_training`.

It runs where tdpp is installed, without a GPU, and FOLDER then goes to a machine that has torch, numpy, a GPU, and
nothing else of tdpp's. The losses of the case `tiny` on this CPU go with it, for the GPU's to be compared with.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gpu.run import BATCHES, losses, run_folder
from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.data.indexed_dataset import write_indexed

DOCUMENTS = 8
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


@dataclass(frozen=True)
class Case:
    """A model and how it trains: micro-batch size, micro-batches an iteration, and what else its plan says."""

    model: str
    micro: int
    micro_batches: int
    overrides: tuple[str, ...] = ()
    precision: str = "bf16"


GPT2_124M = ("model.layers=12", "model.hidden=768", "model.heads=12")
CASES = {
    "tiny": Case("tiny", 2, 2, precision="fp32"),
    "gpt2-124m": Case("small", 8, 4, GPT2_124M),
    "gpt2-124m-dropout": Case("small", 8, 4, (*GPT2_124M, *DROPOUT)),
    "gpt2-124m-fp16": Case("small", 8, 4, GPT2_124M, precision="fp16"),
    "gpt2-124m-2-streams": Case("small", 8, 4, (*GPT2_124M, "parallel.streams=2")),
    "gpt2-124m-4-streams": Case("small", 8, 4, (*GPT2_124M, "parallel.streams=4")),
    "gpt2-xl": Case("xl", 4, 4, ("model.heads=25",)),
    "llama-1b": Case("llama-1b", 1, 4),
}


def plan_of(name: str, data: Path) -> Plan:
    """The plan of a case, for one rank on the CPU; `benchmarks.gpu.run` sends it to the GPU."""
    case = CASES[name]
    overrides = [
        "parallel=single",
        f"model={case.model}",
        f"parallel.micro_batch_size={case.micro}",
        f"parallel.global_batch_size={case.micro * case.micro_batches}",
        "train=gpt2",
        f"train.iterations={BATCHES}",
        "train.lr_warmup_iterations=2",
        "train.log_interval=1",
        f"train.precision={case.precision}",
        "train.checkpoint=false",
        "train.comm_timeout_s=600",
        f"data.prefix={data}",
        "data.split='1,0,0'",
        *case.overrides,
    ]
    return make_plan(compose(overrides), name)


def prepare(folder: Path, names: list[str]) -> None:
    """Writes FOLDER/CASE/plan.json and random tokens of its vocabulary."""
    for name in names:
        data = folder / name / "tokens"
        data.parent.mkdir(parents=True, exist_ok=True)
        plan = plan_of(name, data)
        model = plan.model
        tokens = (BATCHES * plan.global_batch_size + DOCUMENTS) * (model.sequence_length + 1)
        dtype = np.dtype(np.uint16 if model.vocab_size <= 2**16 else np.int32)
        random = np.random.default_rng(0).integers(0, model.vocab_size, tokens, dtype=dtype)
        write_indexed(data, np.array_split(random, DOCUMENTS), dtype)
        (folder / name / "plan.json").write_text(json.dumps(plan.as_json()))
    if "tiny" in names:
        with run_folder(folder / "tiny", "cpu", {}) as path:
            command = [sys.executable, "-m", "megatron_ext.worker", str(path), "0"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (folder / "tiny" / "losses.json").write_text(json.dumps(losses(path)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    prepare(arguments.folder.resolve(), arguments.cases)


if __name__ == "__main__":
    main()
