"""python -m benchmarks.gpu_counts [CASE …]: kernels, host waits and bytes of GPT-2 124M, beside a plain loop's.

No GPU is needed: both run with the CUDA build of torch under the tests' stand-in for CUDA. `make test-cuda` installs
that torch, and CUDA_VENV names its folder. Kernels of a micro-batch are half the difference of iterations of four and
of two, which tells those of the rest of an iteration apart. Both run eagerly in bf16, on micro-batches of 4 x 1,024.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from megatron_ext.data.indexed_dataset import write_indexed
from tests.support.cuda.machine import WORKER, Counts, Machine, counts
from tests.support.megatron_ext.engine_run import make_run

GPT = (
    *("model=small", "model.layers=12", "model.hidden=768", "model.heads=12", "model.sequence_length=1024"),
    *("model.vocab_size=50257", "model.vocab_multiple=128"),
)
ONE, TWO = "parallel=single", "parallel.data=2 parallel.pipeline=1 parallel.partition=12"
CASES = {
    "GPT-2 124M": (1, ONE),
    "with dropout": (1, f"{ONE} model.hidden_dropout=0.1"),
    "with attention dropout as well": (1, f"{ONE} model.hidden_dropout=0.1 model.attention_dropout=0.1"),
    "recomputed": (1, f"{ONE} parallel.recompute=full"),
    "in two streams": (1, f"{ONE} parallel.streams=2"),
    "data parallel": (2, TWO),
    "sharded optimizer": (2, f"{TWO} parallel.sharded_optimizer=true"),
    "two stages": (2, "parallel.data=1 parallel.pipeline=2 parallel.partition=6-6"),
}
MICRO, SEQUENCE, VOCABULARY = 4, 1024, 50257
PLAIN = "the plain loop"
LOOP = """
import ctypes, os, sys, torch
from torch import nn
from torch.nn import functional as F
from benchmarks.textbook import Block
from megatron_ext.contract.models.model import ModelConfig

class Gpt(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.word, self.position = nn.Embedding(model.padded_vocab_size, model.hidden), nn.Embedding(1024, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)

    def forward(self, tokens):
        x = self.word(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

model = Gpt(ModelConfig(12, 768, 12, 1024, 50257, 50304)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
mark = ctypes.CDLL(None).standin_mark
for iteration in (1, 2, 3, 4):
    mark(f"begin {iteration}".encode())
    for _ in range(int(sys.argv[1])):
        tokens = torch.zeros(4, 1025, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    mark(f"end {iteration}".encode())
os._exit(0)
"""


def third(machine: Machine, *words: str | Path) -> list[Counts]:
    """What each rank does in the third iteration."""
    ended = machine.run(*words, environment={"STANDIN_LARGEST": str(2**20)})  # gradients need not be true
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return [counts(log, 3) for log in machine.logs()]


def ours(folder: Path, words: str, gpus: int, micro_batches: int) -> list[Counts]:
    batch = MICRO * micro_batches * (gpus if "data=2" in words else 1)
    given = [
        *(*GPT, "cluster.gpus.cpu.name=GPU", "data.split='1,0,0'", *words.split()),
        *(f"parallel.micro_batch_size={MICRO}", f"parallel.global_batch_size={batch}", "train.checkpoint=false"),
        *("train.iterations=4", "train.lr_warmup_iterations=1", "train.precision=bf16", "train.log_interval=1"),
    ]
    run = make_run(folder / "run", folder.parent / "data", *given, base=())
    return third(Machine(gpus, folder / "machine"), WORKER, run.run.plan, "0")


def plain(folder: Path, micro_batches: int) -> list[Counts]:
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    return third(Machine(1, folder / "machine"), folder / "loop.py", str(micro_batches))


def row(name: str, few: list[Counts], many: list[Counts]) -> str:
    """Of all ranks, the last one's kernels first."""
    kernels = [[sum(one.kernels.values()) for one in of] for of in (few, many)]
    each = [(b - a) // 2 for a, b in zip(*kernels, strict=True)]
    own = [a - 2 * e for a, e in zip(kernels[0], each, strict=True)]
    waits = [sum(one.waits.values()) for one in many]
    mib = [sum(message.bytes for message in one.messages if message.call != "recv") / 2**20 for one in many]
    cells = (each, own, waits, [f"{one:,.1f}" for one in mib])
    return f"| {name} | " + " | ".join(", ".join(dict.fromkeys(map(str, cell))) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE", help=", ".join(CASES))
    wanted = parser.parse_args().cases or list(CASES)
    print(
        "| | kernels of a micro-batch | of the rest of an iteration | host waits | MiB to NCCL in four micro-batches |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 64 * MICRO * SEQUENCE, dtype=np.uint16)
        write_indexed(folder / "data", np.split(tokens, 64), np.dtype(np.uint16))
        print(row(PLAIN, plain(folder / "plain-2", 2), plain(folder / "plain-4", 4)), flush=True)
        for number, case in enumerate(wanted):
            gpus, words = CASES[case]
            found = [ours(folder / f"{number}-{count}", words, gpus, count) for count in (2, 4)]
            print(row(case, *found), flush=True)


if __name__ == "__main__":
    main()
