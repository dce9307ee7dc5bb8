"""python -m benchmarks.gpu.contenders CONTENDER PLAN DEVICE: others that train a prepared plan's model on one GPU.

They are the plain loop, and Megatron-Core with its own optimizer. The last line that it prints is a `Result` in JSON.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn import functional as F

from benchmarks.gpu.profiled import Result, counted
from benchmarks.gpu.run import TIMED, WARM_UP
from benchmarks.textbook import Block, LlamaBlock, dropped
from megatron_ext.contract.models.model import IMAGES, ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.timeline.usage import measure


class Step(Protocol):
    """Trains on the micro-batches of an iteration; returns the last one's loss."""

    def __call__(self, batch: list[Tensor], between: Callable[[int], None] = ...) -> float:
        """Calls `between` with a micro-batch's number before it, and with their count after the last one."""


def ignore(number: int) -> None:
    """Counts nothing."""


class PlainGpt(nn.Module):
    """A GPT or a Llama of ordinary modules; it returns the loss."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        llama = model.swiglu
        self.word = nn.Embedding(model.padded_vocab_size, model.hidden)
        self.position = None if llama else nn.Embedding(model.sequence_length, model.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(model) if llama else Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden, model.norm_epsilon) if llama else nn.LayerNorm(model.hidden)
        self.rate = model.hidden_dropout
        self.head = nn.Linear(model.hidden, model.padded_vocab_size, bias=False)
        if not model.untie_embeddings_and_output_weights:
            self.head.weight = self.word.weight
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self.word(inputs)
        if self.position is not None:
            x = x + self.position.weight[: inputs.shape[1]]
        x = dropped(x, self.rate)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), labels.flatten())


class PlainVit(nn.Module):
    """A ViT of ordinary modules; it returns the loss, as if all images were of the first class."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.image_size is not None
        assert model.patch_size is not None
        assert model.classes is not None
        patches = (model.image_size // model.patch_size) ** 2
        self.patch = nn.Conv2d(model.channels, model.hidden, model.patch_size, model.patch_size)
        self.first = nn.Parameter(torch.zeros(1, 1, model.hidden))
        self.position = nn.Parameter(torch.zeros(patches + 1, model.hidden))
        self.blocks = nn.Sequential(*(Block(model, causal=False) for _ in range(model.layers)))
        self.norm, self.head = nn.LayerNorm(model.hidden), nn.Linear(model.hidden, model.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images.to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        scores = self.head(self.norm(self.blocks(x)[:, 0]))
        return F.cross_entropy(scores.float(), torch.zeros(len(x), dtype=torch.int64, device=x.device))


def plain(model: ModelConfig) -> nn.Module:
    return PlainVit(model) if model.traits.learns == IMAGES else PlainGpt(model)


def autocast_step(plan: Plan, device: str, compiled: bool = False) -> Step:
    """nanoGPT's recipe: fp32 weights, bf16 autocast, fused AdamW, TF32 products; compiled as a whole, or not."""
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        module = plain(plan.model)
    if compiled:
        module.compile()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step(batch: list[Tensor], between: Callable[[int], None] = ignore) -> float:
        for number, tokens in enumerate(batch):
            between(number)
            with torch.autocast(device, torch.bfloat16):
                value = module(tokens) / len(batch)
            value.backward()
        between(len(batch))
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.item() * len(batch))

    return step


def bf16_step(plan: Plan, device: str) -> Step:
    """The plain loop with the fewest kernels: weights and sums of gradients in bf16, and for the fused AdamW a copy of
    both in fp32."""
    with torch.device(device):
        module = plain(plan.model).to(torch.bfloat16)
    weights = list(module.parameters())
    masters = [weight.detach().float() for weight in weights]
    sums = [torch.zeros_like(master) for master in masters]
    for master, total in zip(masters, sums, strict=True):
        master.grad = total
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.01, fused=True)

    def step(batch: list[Tensor], between: Callable[[int], None] = ignore) -> float:
        for number, tokens in enumerate(batch):
            between(number)
            value = module(tokens) / len(batch)
            value.backward()
        between(len(batch))
        torch._foreach_copy_(sums, [weight.grad for weight in weights if weight.grad is not None])
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_([weight.detach() for weight in weights], masters)
        module.zero_grad(set_to_none=True)
        return float(value.item() * len(batch))

    return step


@contextmanager
def megatron_core_step(plan: Plan, device: str) -> Iterator[Step]:
    """Megatron-Core's GPTModel of its local layers in bf16, its DistributedDataParallel and its own Adam."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    model = plan.model
    with TemporaryDirectory() as folder:
        store = FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(plan.train.seed)
        llama: dict[str, Any] = {"gated_linear_unit": True, "activation_func": F.silu, "normalization": "RMSNorm"}
        gpt2: dict[str, Any] = {"activation_func": functools.partial(F.gelu, approximate="tanh")}
        config = TransformerConfig(
            num_layers=model.layers,
            hidden_size=model.hidden,
            ffn_hidden_size=model.inner,
            num_attention_heads=model.heads,
            num_query_groups=model.query_groups,
            add_bias_linear=model.add_bias_linear,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            bias_activation_fusion=model.swiglu,
            bias_dropout_fusion=True,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            **(llama if model.swiglu else gpt2),
        )
        inner = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=config.normalization),
            model.padded_vocab_size,
            model.sequence_length,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type=model.position_embedding_type,
            rotary_base=int(model.rotary_base),
        )
        module = Float16Module(config, inner.cuda())
        parallel = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
        config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=1.0, bf16=True)
        optimizer = get_megatron_optimizer(settings, [parallel])
        run, positions = get_forward_backward_func(), torch.arange(model.sequence_length, device=device)

        def forward(batch: Iterator[tuple[int, Tensor]], stage: nn.Module) -> tuple[Tensor, object]:
            number, tokens = next(batch)
            told[0](number)
            output = stage(tokens[:, :-1], positions.expand(len(tokens), -1), None, labels=tokens[:, 1:])
            return output, lambda found: (found.mean(), {"loss": found.detach().mean()})

        told: list[Callable[[int], None]] = [ignore]

        def step(batch: list[Tensor], between: Callable[[int], None] = ignore) -> float:
            told[0] = between
            parallel.zero_grad_buffer()
            optimizer.zero_grad()
            found = run(
                forward_step_func=forward,
                data_iterator=enumerate(batch),
                model=[parallel],
                num_microbatches=len(batch),
                seq_length=model.sequence_length,
                micro_batch_size=plan.micro_batch_size,
                forward_only=False,
            )
            between(len(batch))
            optimizer.step()
            return float(found[-1]["loss"].item())

        try:
            yield step
        finally:
            torch.distributed.destroy_process_group()


def _timed(step: Step, plan: Plan, device: str) -> Result:
    model, micro = plan.model, plan.micro_batch_size
    micro_batches = plan.global_batch_size // micro
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    losses: list[float] = []

    def iteration() -> None:
        size = (micro, model.sequence_length + 1)
        batch = [torch.randint(0, model.vocab_size, size, device=device) for _ in range(micro_batches)]
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)

    for _ in range(WARM_UP + TIMED):
        iteration()
    rate = plan.global_batch_size / statistics.median(seconds[WARM_UP:])
    mib = measure(device)
    return Result(rate, mib, losses, counted(iteration, device))


def main(contender: str, path: str, device: str) -> None:
    plan = Plan.read(Path(path))
    with CONTENDERS[contender](plan, device) as step:
        print(json.dumps(asdict(_timed(step, plan, device))))


CONTENDERS: dict[str, Callable[[Plan, str], AbstractContextManager[Step]]] = {
    "plain": lambda plan, device: nullcontext(autocast_step(plan, device)),
    "plain-compiled": lambda plan, device: nullcontext(autocast_step(plan, device, compiled=True)),
    "plain-bf16": lambda plan, device: nullcontext(bf16_step(plan, device)),
    "megatron-core": megatron_core_step,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
