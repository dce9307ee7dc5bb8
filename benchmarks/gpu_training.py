"""python -m benchmarks.gpu_training MODEL [--results FILE]: tokens/s on one GPU, ours beside two plain loops.

All three train the same GPT-2 in bf16 on the same batches: our engine (one rank, started as a node agent starts it), a
textbook loop with torch.compile in the manner of nanoGPT, and Hugging Face's GPT2LMHeadModel with torch's fused AdamW.
Each has a process, and so the GPU's memory, of its own. `--device cpu` with the model tiny only shows that everything
works. MFU counts model operations (`contract.operations.flops_per_token`) against the GPU's dense bf16 peak: of a GPU
that is not in `PEAK_TFLOPS`, `--peak-tflops` tells it, or there is none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.textbook import Block
from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.schedule.operations import flops_per_token
from megatron_ext.data.indexed_dataset import write_indexed
from megatron_ext.timeline.memory import measure

ROOT = Path(__file__).resolve().parents[1]
MODELS = {
    "tiny": ModelConfig(2, 64, 2, 64, 257, 384),
    "gpt2-124m": ModelConfig(12, 768, 12, 1024, 50257, 50304),
    "small": ModelConfig(24, 1024, 16, 1024, 50257, 50304),
    "xl": ModelConfig(48, 1600, 16, 1024, 50257, 50304),
    "xl-25heads": ModelConfig(48, 1600, 25, 1024, 50257, 50304),
}
WARM_UP, ITERATIONS = 5, 15
PEAK_TFLOPS = {
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA GeForce RTX 3090": 71.0,
}
"""bf16 on tensor cores without sparsity, by the name that CUDA tells; NVIDIA's data sheets, which print twice as much
for the H100 and H200, "with sparsity"."""


def ours(model: ModelConfig, micro: int, micro_batches: int, device: str, options: list[str]) -> dict[str, float]:
    """Runs our engine in a process of its own; median of its own log lines after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for part in (run.nodes, run.events, run.errors, run.checkpoints):
            part.mkdir()
        run.keep_secret()
        random = np.random.default_rng(0)
        samples = (WARM_UP + ITERATIONS) * micro * micro_batches
        tokens = random.integers(0, model.vocab_size, (samples + 8) * model.sequence_length, dtype=np.uint16)
        write_indexed(run.path / "data", np.split(tokens, 8), np.dtype(np.uint16))
        sizes = {key: value for key, value in vars(model).items() if key != "padded_vocab_size"}
        given = [
            f"cluster.gpus.cpu.name={'CPU' if device == 'cpu' else 'GPU'}",
            "parallel=single",
            f"parallel.micro_batch_size={micro}",
            f"parallel.global_batch_size={micro * micro_batches}",
            "train=gpt2",
            f"train.iterations={WARM_UP + ITERATIONS}",
            "train.log_interval=1",
            "train.precision=bf16",
            f"train.compile={device != 'cpu'}",
            "train.checkpoint=false",
            "train.comm_timeout_s=600",
            f"data.prefix={run.path / 'data'}",
            "data.split='1,0,0'",
            *(f"model.{key}={value}" for key, value in sizes.items()),
            *options,
        ]
        run.write_json(run.plan, make_plan(compose(given), "benchmark").as_json())
        command = [sys.executable, "-m", "megatron_ext.worker", str(run.plan), "0"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(result.stdout[-2000:] + result.stderr[-4000:])
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        mib = json.loads((run.path / "memory" / "rank-00000.json").read_text())["mib"]
        return {
            "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines[WARM_UP:]),
            "gib": (mib["max_allocated"] if device == "cuda" else mib["max_resident"]) / 1024,
            "loss": lines[-1]["loss"],
        }


class PlainGpt(nn.Module):
    """GPT-2 with tied embeddings that returns the loss."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(model.padded_vocab_size, model.hidden)
        self.position = nn.Embedding(model.sequence_length, model.hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden)
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self.word(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def plain(model: ModelConfig, micro: int, micro_batches: int, device: str) -> dict[str, float]:
    """nanoGPT's recipe: fp32 weights, bf16 autocast, torch.compile of the whole model, fused AdamW, TF32 matmuls."""
    torch.set_float32_matmul_precision("high")
    module = _compiled(PlainGpt(model), device)
    return _loop(module, lambda tokens: module(tokens), model, micro, micro_batches, device)


def hugging_face(model: ModelConfig, micro: int, micro_batches: int, device: str) -> dict[str, float]:
    """Hugging Face's GPT-2, bf16 autocast, sdpa attention, fused AdamW, compiled as its documentation advises."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=model.padded_vocab_size,
        n_positions=model.sequence_length,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    torch.set_float32_matmul_precision("high")
    module = _compiled(GPT2LMHeadModel(config), device)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        logits = module(tokens[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    return _loop(module, loss, model, micro, micro_batches, device)


def _compiled(module: nn.Module, device: str) -> nn.Module:
    module = module.to(device)
    if device == "cuda":
        module.compile()
    return module


def _loop(
    module: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    model: ModelConfig,
    micro: int,
    micro_batches: int,
    device: str,
) -> dict[str, float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP + ITERATIONS):
        start = time.perf_counter()
        for _ in range(micro_batches):
            tokens = torch.randint(0, model.vocab_size, (micro, model.sequence_length + 1), device=device)
            with torch.autocast(device, torch.bfloat16):
                value = loss(tokens) / micro_batches
            torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = value.item() * micro_batches
        seconds.append(time.perf_counter() - start)
    tokens_per_s = micro * micro_batches * model.sequence_length / statistics.median(seconds[WARM_UP:])
    mib = measure(device)
    gib = (mib["max_allocated"] if device == "cuda" else mib["max_resident"]) / 1024
    return {"tokens_per_s": tokens_per_s, "gib": gib, "loss": last}


def _alone(loop: Callable[..., dict[str, float]], *sizes: object) -> dict[str, float]:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(loop, *sizes).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--micro", type=int, default=8, help="samples per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the GPU (default: by its name)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=["ours", "plain", "hugging_face"])
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=JSON", help="of our plan, such as compile=false"
    )
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    model = MODELS[arguments.model]
    device = arguments.device
    sizes = (model, arguments.micro, arguments.micro_batches, device)
    loops: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": lambda: ours(*sizes, arguments.set),
        "plain": lambda: _alone(plain, *sizes),
        "hugging_face": lambda: _alone(hugging_face, *sizes),
    }
    wanted = [name for name in loops if arguments.only in (None, name)]
    if "hugging_face" in wanted and importlib.util.find_spec("transformers") is None:
        parser.error("hugging_face needs Hugging Face's library: pip install transformers, or give --only")
    found: dict[str, Any] = {
        "model": arguments.model,
        "micro": arguments.micro,
        "micro_batches": arguments.micro_batches,
    }
    found |= {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU", "torch": torch.__version__}
    peak = arguments.peak_tflops or PEAK_TFLOPS.get(found["device"])
    if peak is None:
        print(f"{found['device']}: its peak is not known here, so there is no MFU; --peak-tflops tells it", flush=True)
    for name in wanted:
        result = loops[name]()
        if peak is not None:
            result["mfu"] = result["tokens_per_s"] * flops_per_token(model) / (peak * 1e12)
        found[name] = result
        print(name, json.dumps(result), flush=True)
    if arguments.results:
        with arguments.results.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
