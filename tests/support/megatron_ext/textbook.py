"""The oracle of every layout: one process that holds the whole model, with torch's own optimizer and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.adaptive.config import lr_factor
from megatron_ext.contract.parallel_config import Schedule
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.train_config import TrainConfig
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Split
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.engine.optimizer.update_rules import KINDS
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup


def textbook(
    plan: Plan,
    corpus: Path,
    batches: Sequence[int] | None = None,
    look: Callable[[int, Callable[[Tensor], Tensor]], None] = lambda *_: None,
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Losses and, as a checkpoint has it, final state of a GPT; `batches` and `look` as in `trained`."""
    return trained(plan, loss_of_gpt(plan, corpus), batches=batches, look=look)


def loss_of_gpt(plan: Plan, corpus: Path) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss of a GPT from the numbers of its samples."""
    train, vocab = plan.train, plan.model.vocab_size
    count = train.samples or 4 * plan.global_batch_size
    samples = GptSamples(corpus, Split(count, train.seed, tuple(plan.data_split)), plan.model.sequence_length, vocab)

    def loss(model: nn.Module, number: Tensor) -> Tensor:
        tokens = torch.stack([torch.from_numpy(samples.tokens(sample)) for sample in number.tolist()])
        logits = model({"tokens": tokens[:, :-1], "number": number})["logits"]
        logits = logits[..., :vocab]  # without the vocabulary's padding
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def islands(plan: Plan, corpus: Path, sizes: Sequence[int]) -> tuple[np.ndarray, dict[str, Tensor]]:
    """Losses and final state of a GPT that islands of so many replicas train, one after another in this process."""
    train, loss_of = plan.train, loss_of_gpt(plan, corpus)
    model = replace(plan.model, padded_vocab_size=plan.model.vocab_size)
    whole = replace(
        plan, model=model, tensor=1, tensors=None, pipeline=1, chunks=1, partition=[plan.model.layers],
        island_plans=None, schedule=Schedule.one_f_one_b, sequence_parallel=False,
    )  # fmt: skip
    models = [Ours(whole) for _ in sizes]
    optimizers = [_optimizer(list(model.parameters()), train) for model in models]
    common = Ours(whole)
    momentum = {"momentum": train.outer_momentum, "nesterov": True} if train.outer_momentum else {}
    outer = torch.optim.SGD(common.parameters(), lr=train.outer_lr, **momentum)
    replicas = iter(range(sum(sizes)))
    taken = [np.concatenate([plan.taken_by(0, next(replicas)) for _ in range(size)]) for size in sizes]
    parts = [len(micro_batches) / sum(map(len, taken)) for micro_batches in taken]
    losses = []
    for iteration in range(1, train.iterations + 1):
        first, total = (iteration - 1) * plan.global_batch_size, 0.0
        for model, optimizer, micro_batches, part in zip(models, optimizers, taken, parts, strict=True):
            size = plan.micro_batch_size
            numbers = first + (np.sort(micro_batches)[:, None] * size + np.arange(size)).flatten()
            optimizer.zero_grad()
            loss = loss_of(model, torch.from_numpy(numbers))
            loss.backward()
            if train.clip_grad:
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), train.clip_grad)  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(iteration - 1, train)
            optimizer.step()
            total += part * loss.item()
        losses.append(total)
        if iteration % train.sync_every == 0 or iteration == train.iterations:
            with torch.no_grad():
                for weight, *own in zip(common.parameters(), *(model.parameters() for model in models), strict=True):
                    weight.grad = weight - sum(part * one for part, one in zip(parts, own, strict=True))
                outer.step()
                for model in models:
                    for weight, one in zip(common.parameters(), model.parameters(), strict=True):  # type: ignore[attr-defined]
                        one.copy_(weight)
    state = {f"weights/{name}": value for name, value in common.state(lambda p: p.detach()).items()}
    if train.outer_momentum:
        kept = common.state(lambda p: outer.state[p]["momentum_buffer"])
        state.update({f"outer_momentum/{name}": value for name, value in kept.items()})
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        own = {"island": model.state(lambda p: p.detach())}  # type: ignore[attr-defined]
        for kind, moment in zip(KINDS[train.optimizer], _KEPT[train.optimizer], strict=True):
            own[kind] = model.state(lambda p, moment=moment, kept=optimizer.state: kept[p][moment])  # type: ignore[attr-defined]
        for kind, values in own.items():  # type: ignore[attr-defined]
            for name, value in values.items():
                block, _, inner = name.partition(".")
                part = f"{block}.island-{number:05d}" if number else block
                state[f"{kind}/{part}.{inner}"] = value
    return np.array(losses), state


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
    plan: Plan,
    loss_of: Callable[[Any, Tensor], Tensor],
    model: Model | None = None,
    batches: Sequence[int] | None = None,
    look: Callable[[int, Callable[[Tensor], Tensor]], None] = lambda *_: None,
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The same of any model, whose loss of a global batch follows from the samples' numbers.

    `batches` are the global batches of the iterations, where they are not all alike. Before every update `look` is
    called with the first sample of its batch and a function that gives the gradient of the loss of some samples.
    """
    train = plan.train
    model = Ours(plan) if model is None else model
    parameters = list(model.parameters())
    optimizer = _optimizer(parameters, train)
    losses = []

    def gradient(numbers: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss_of(model, numbers).backward()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    reference, first = plan.global_batch_size, 0
    for size in [reference] * train.iterations if batches is None else batches:
        look(first, gradient)
        optimizer.zero_grad()
        loss = loss_of(model, torch.arange(first, first + size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, train.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = lr_factor(plan.adapt, size, reference) * learning_rate(first / reference, train)
        optimizer.step()
        first += size
        losses.append(loss.item())
    state = {f"weights/{name}": value for name, value in model.state(lambda p: p.detach()).items()}
    for kind, moment in zip(KINDS[train.optimizer], _KEPT[train.optimizer], strict=True):
        found = model.state(lambda p, moment=moment: optimizer.state[p][moment])
        state.update({f"{kind}/{name}": value for name, value in found.items()})
    return np.array(losses), state


_KEPT = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lamb": ("exp_avg", "exp_avg_sq"),
}
"""By optimizer, torch's names of what it keeps of a weight."""


def _optimizer(parameters: list[nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=train.momentum, nesterov=train.nesterov)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lamb": _Lamb}[train.optimizer]
    return kind(groups, betas=(train.adam_beta1, train.adam_beta2), eps=train.adam_eps)


class _Lamb(torch.optim.Adam):
    """Algorithm 2 of You et al. 2020, a parameter at a time; what does not decay takes Adam's step."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                kept = self.state[weight]
                kept.setdefault("exp_avg", torch.zeros_like(weight))
                kept.setdefault("exp_avg_sq", torch.zeros_like(weight))
                kept["step"] = t = kept.get("step", 0) + 1
                kept["exp_avg"] = first * kept["exp_avg"] + (1 - first) * weight.grad
                kept["exp_avg_sq"] = second * kept["exp_avg_sq"] + (1 - second) * weight.grad**2
                m, v = kept["exp_avg"] / (1 - first**t), kept["exp_avg_sq"] / (1 - second**t)
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * weight
                ratio = weight.norm() / update.norm() if weight.dim() > 1 else 1.0
                weight -= group["lr"] * ratio * update
