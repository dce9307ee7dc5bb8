"""The oracle of every layout: one process that holds the whole model, with torch's own AdamW and clipping."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ext.checkpoints.meta import part_name
from megatron_ext.contract.plan import Plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Split
from megatron_ext.engine.optimizer import learning_rate
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.families import stage_of
from megatron_ext.tasks.stage import Stage
from tests.support.megatron_ext.engine_run import VOCAB

BATCH = 8


def textbook(plan: Plan, corpus: Path) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Losses and, as a checkpoint has it, final state of a GPT with global batches of 8."""
    train = plan.train
    samples = GptSamples(corpus, Split(4 * 8, train.seed, tuple(plan.data_split)), plan.model.sequence_length, VOCAB)

    def loss(model: Stage, number: Tensor) -> Tensor:
        tokens = torch.stack([torch.from_numpy(samples.tokens(sample)) for sample in number.tolist()])
        logits = model({"tokens": tokens[:, :-1], "number": number})["logits"]
        logits = logits[..., :VOCAB]  # without the vocabulary's padding
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return trained(plan, loss)


def trained(plan: Plan, loss_of: Callable[[Stage, Tensor], Tensor]) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The same of any model, whose loss of a global batch follows from the samples' numbers."""
    train = plan.train
    model = stage_of(plan, 0, TensorGroup())
    named = model.parameters_by_name()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
    )
    losses = []
    for step in range(train.iterations):
        optimizer.zero_grad()
        loss = loss_of(model, torch.arange(step * BATCH, (step + 1) * BATCH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, train)
        optimizer.step()
        losses.append(loss.item())
    places = {name: f"{part_name(block)}.{inner}" for name, (block, inner) in model.places.items()}
    state = {f"weights/{places[name]}": p.detach() for name, p in named}
    for kind, moment in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        state.update({f"{kind}/{places[name]}": optimizer.state[p][moment] for name, p in named})
    return np.array(losses), state
