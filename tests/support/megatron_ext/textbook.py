"""The oracle of every layout: one process that holds the whole model, with torch's own AdamW and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.checkpoints.meta import part_name
from megatron_ext.contract.plan import Plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Split
from megatron_ext.engine.optimizer import learning_rate
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.families import stage_of
from tests.support.megatron_ext.engine_run import VOCAB


def textbook(plan: Plan, corpus: Path) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Losses and, as a checkpoint has it, final state of a GPT."""
    train = plan.train
    samples = GptSamples(
        corpus, Split(4 * plan.global_batch_size, train.seed, tuple(plan.data_split)), plan.model.sequence_length, VOCAB
    )

    def loss(model: nn.Module, number: Tensor) -> Tensor:
        tokens = torch.stack([torch.from_numpy(samples.tokens(sample)) for sample in number.tolist()])
        logits = model({"tokens": tokens[:, :-1], "number": number})["logits"]
        logits = logits[..., :VOCAB]  # without the vocabulary's padding
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return trained(plan, loss)


class Model(Protocol):
    """What can be trained: ours in one piece, or another project's with the same weights."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def state(self, values: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        """A value of each parameter, under the name that a checkpoint has for it."""
        ...


class Ours(nn.Module):
    """A plan's model in one piece."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.stage = stage_of(plan, 0, TensorGroup())

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        left: dict[str, Tensor] = self.stage(inputs)
        return left

    def state(self, values: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        places = {name: f"{part_name(block)}.{inner}" for name, (block, inner) in self.stage.places.items()}
        return {places[name]: values(parameter) for name, parameter in self.stage.parameters_by_name()}


def trained(
    plan: Plan, loss_of: Callable[[Any, Tensor], Tensor], model: Model | None = None
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The same of any model, whose loss of a global batch follows from the samples' numbers."""
    train = plan.train
    model = Ours(plan) if model is None else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
    )
    losses = []
    for step in range(train.iterations):
        optimizer.zero_grad()
        loss = loss_of(model, torch.arange(step * plan.global_batch_size, (step + 1) * plan.global_batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        losses.append(loss.item())
    state = {f"weights/{name}": value for name, value in model.state(lambda p: p.detach()).items()}
    for kind, moment in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        found = model.state(lambda p, moment=moment: optimizer.state[p][moment])
        state.update({f"{kind}/{name}": value for name, value in found.items()})
    return np.array(losses), state
