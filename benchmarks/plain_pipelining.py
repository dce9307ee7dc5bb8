"""The same training run as somebody writes it with what torch has: the baseline that `benchmarks.engine` names.

Ordinary modules under `torch.distributed.pipelining`, DistributedDataParallel for the replicas, the fused AdamW.
Nothing of `megatron_ext` runs in an iteration but the reading of samples and the formula of the learning rate.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders import Switch
from benchmarks.textbook import Block, LlamaBlock
from megatron_ext.contract.models.keys import RMS_NORM
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.data.samples import BEGINNING, Samples
from megatron_ext.engine.optimizer.learning_rate import learning_rate
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup

NAMES = {"embedding.word": "word.weight", "embedding.position": "position.weight", "head.word": "head.weight"}
"""Where a stage of ours keeps the weights that are called otherwise here."""


class PlainStage(nn.Module):
    """[embedding] + layers + [norm and head]."""

    def __init__(self, plan: Plan, stage: int) -> None:
        super().__init__()
        model = plan.model
        self.first, self.last = stage == 0, stage == plan.pipeline - 1
        llama = model.normalization == RMS_NORM
        self.position: nn.Embedding | None = None
        if self.first:
            self.word = nn.Embedding(model.vocab_size, model.hidden)
            if not llama:
                self.position = nn.Embedding(model.sequence_length, model.hidden)
        self.layers = nn.ModuleDict(
            {str(layer): LlamaBlock(model) if llama else Block(model) for layer in plan.layers_of(stage)}
        )
        if self.last:
            self.norm = nn.RMSNorm(model.hidden, model.norm_epsilon) if llama else nn.LayerNorm(model.hidden)
            self.head = nn.Linear(model.hidden, model.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.word(x)
            if self.position is not None:
                x = x + self.position.weight
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


class PlainPipelining:
    """One rank of it."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: Samples, recorder: Switch) -> None:
        self.recorder = recorder
        self._plan, self._place, self._groups, self._samples = plan, place, groups, samples
        module = PlainStage(plan, place.stage)
        ours = dict(stage_of(plan, place.stage, TensorGroup()).parameters_by_name())
        module.load_state_dict({NAMES.get(name, name).replace("head.norm", "norm"): w for name, w in ours.items()})
        self._first, self._last = module.first, module.last
        word = module.word.weight if module.first else module.head.weight if module.last else None
        self._word = None if plan.model.untie_embeddings_and_output_weights else word
        self._parameters = list(module.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.dim() > 1], "weight_decay": plan.train.weight_decay},
                {"params": [p for p in self._parameters if p.dim() == 1], "weight_decay": 0.0},
            ],
            betas=(plan.train.adam_beta1, plan.train.adam_beta2),
            eps=plan.train.adam_eps,
            fused=True,
        )
        replicated = module if groups.data is None else DistributedDataParallel(module, process_group=groups.data)
        self._schedule = Schedule1F1B(
            PipelineStage(replicated, place.stage, plan.pipeline, torch.device("cpu"), group=groups.forward),
            plan.micro_batches[0],
            lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        )

    def step(self, iteration: int) -> float:
        losses: list[Tensor] = []
        if self._first:
            self._schedule.step(self._batch(iteration)[:, :-1])
        elif self._last:
            self._schedule.step(target=self._batch(iteration)[:, 1:], losses=losses, return_outputs=False)
        else:
            self._schedule.step()
        if self._word is not None:
            dist.all_reduce(self._word.grad, group=self._groups.tied[0][0].group)
        self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(iteration - 1, self._plan.train)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if not self._last:
            return float("nan")
        loss = torch.stack(losses).detach().mean()
        if self._groups.data is not None:
            dist.all_reduce(loss, group=self._groups.data)
            loss /= self._plan.data
        return loss.item()

    def _clip(self) -> None:
        """Clips as torch.nn.utils.clip_grad_norm_ does, over the whole pipeline; the shared embedding counts once."""
        counted = [p.grad for p in self._parameters if p.grad is not None and not (self._last and p is self._word)]
        square = torch.nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square, group=self._groups.model)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._plan.train.clip_grad, square.sqrt())

    def _batch(self, iteration: int) -> Tensor:
        """[samples of this replica, sequence + 1]."""
        plan = self._plan
        taken = np.array(plan.taken_by(self._place.stage, self._place.dp))
        own = BEGINNING.share(iteration, taken, plan.global_batch_size, plan.micro_batch_size)
        samples = self._samples.batch(own)
        return torch.from_numpy(samples["tokens"]).flatten(0, 1)
