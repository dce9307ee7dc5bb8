"""One rank of the same training run, by our engine and by others: what `benchmarks.engine` compares.

Weights, data, loss, all-reduces of gradients, clipping and Adam are ours in all of them, the same code on the same
flat buffers. What differs is who runs the pipeline, and in Megatron-Core the layers.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.comm import all_reduce
from megatron_ext.engine import Engine
from megatron_ext.flat import FlatWeights
from megatron_ext.gpt_data import GptSamples
from megatron_ext.grid import Groups
from megatron_ext.model import Stage
from megatron_ext.optimizer import DataGroup, Optimizer
from megatron_ext.plan import Place, Plan
from megatron_ext.tensor_parallel import TensorGroup, vocab_cross_entropy
from megatron_ext.timeline import NOTHING, Recorder


class Contender(Protocol):
    """One rank of a run."""

    recorder: Switch

    def step(self, iteration: int) -> float:
        """Trains one iteration (from 1). The mean loss on the last stage, nan elsewhere."""


class Switch(Recorder):
    """A recorder that can be turned off, so that not even the clock is read."""

    def __init__(self, file: BinaryIO | None) -> None:
        super().__init__(file)
        self.on = False

    def span(self, name: str, micro_batch: int = -1, peer: int = -1) -> AbstractContextManager[None]:
        return super().span(name, micro_batch, peer) if self.on else NOTHING


class Tdpp:
    """Our engine."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: GptSamples, recorder: Switch) -> None:
        self.recorder = recorder
        self._engine = Engine(plan, place, groups, samples, recorder)

    def step(self, iteration: int) -> float:
        loss = self._engine.step(iteration).loss
        assert loss is not None
        return loss


class Yardstick(ABC):
    """A run whose pipeline somebody else runs."""

    def __init__(self, plan: Plan, place: Place, groups: Groups, samples: GptSamples, recorder: Switch) -> None:
        self.recorder = recorder
        self.plan = plan
        self.place = place
        self._groups = groups
        self._samples = samples
        self.first, self.last = place.stage == 0, place.stage == plan.pipeline - 1
        named, word = self.build(groups)
        self._flat = FlatWeights(named, torch.float32, torch.device("cpu"))
        self._tied = [] if word is None else [self._flat.gradient(word)]
        data = DataGroup(plan.data, place.dp, groups.data)
        counted_elsewhere = self._tied if self.last else []
        self._optimizer = Optimizer(self._flat, plan.train, groups.model, data, False, counted_elsewhere)

    @abstractmethod
    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        """Makes the stage. Its parameters, and the word embedding where it is shared with another stage."""

    @abstractmethod
    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        """One pass of the pipeline: the last stage's losses, each divided by `losses`.

        tokens [micro-batches, micro-batch, sequence + 1] on the first and the last stage.
        """

    @property
    def losses(self) -> int:
        """Losses in an iteration, of which the mean is minimised."""
        return self.plan.micro_batches * self.plan.data

    def step(self, iteration: int) -> float:
        losses = self.forward_backward(self._batch(iteration) if self.first or self.last else None)
        all_reduce(self._flat.grad, self._groups.data, "gradients")
        for gradient in self._tied:
            all_reduce(gradient, self._groups.embedding, "embedding's gradient")
        self._optimizer.step(self.recorder)
        if not self.last:
            return float("nan")
        loss = torch.stack(losses).sum()
        all_reduce(loss, self._groups.data, "loss")
        return loss.item()

    def _batch(self, iteration: int) -> Tensor:
        plan = self.plan
        samples = self._samples.batch(
            iteration, self.place.dp, plan.data, plan.micro_batch_size, plan.global_batch_size
        )
        return torch.from_numpy(samples)


class Pipelining(Yardstick):
    """torch.distributed.pipelining: our stages under its 1F1B."""

    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        plan, tensor = self.plan, TensorGroup()
        stage = Stage(plan, self.place.stage, tensor)
        self._schedule = Schedule1F1B(
            PipelineStage(stage, self.place.stage, plan.pipeline, torch.device("cpu"), group=groups.forward),
            plan.micro_batches,
            lambda logits, labels: vocab_cross_entropy(logits, labels, plan.model.vocab_size, tensor) / self.losses,
            scale_grads=False,
        )
        return stage.parameters_by_name(), stage.tied_word

    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        losses: list[Tensor] = []
        whole = None if tokens is None else tokens.flatten(0, 1)
        inputs = [whole[:, :-1]] if self.first and whole is not None else []
        labels = whole[:, 1:] if self.last and whole is not None else None
        self._schedule.step(*inputs, target=labels, losses=losses if self.last else None, return_outputs=False)
        return [loss.detach() for loss in losses]


class MegatronCore(Yardstick):
    """Megatron-Core's GPTModel under its 1F1B; its attention is its own, in separate operations."""

    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        warnings.filterwarnings("ignore", module="megatron")  # of Apex and Transformer Engine, which need a GPU
        _pretend_cuda()
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
        from megatron.core.transformer import TransformerConfig

        plan = self.plan
        self._run = forward_backward_pipelining_without_interleaving
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=plan.pipeline, create_gloo_process_groups=False
        )
        stages = ["t" * layers for layers in plan.partition]
        config = TransformerConfig(
            num_layers=plan.model.layers,
            hidden_size=plan.model.hidden,
            num_attention_heads=plan.model.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_func=functools.partial(F.gelu, approximate="tanh"),
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=plan.pipeline,
            pipeline_model_parallel_layout="E" + "|".join(stages) + "L",
        )
        self._model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            plan.model.vocab_size,
            plan.model.sequence_length,
            pre_process=self.first,
            post_process=self.last,
            share_embeddings_and_output_weights=True,
        )
        self._positions = torch.arange(plan.model.sequence_length).unsqueeze(0)
        self._take_weights(Stage(plan, self.place.stage, TensorGroup()))
        named = list(self._model.named_parameters())
        word = self._model.shared_embedding_or_output_weight() if self.first != self.last else None
        return named, word if self.first or self.last else None

    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        model = self.plan.model
        losses: list[Tensor] = self._run(
            forward_step_func=self._forward,
            data_iterator=iter([None] * self.plan.micro_batches if tokens is None else tokens),
            model=self._model,
            num_microbatches=self.plan.micro_batches,
            seq_length=model.sequence_length,
            micro_batch_size=self.plan.micro_batch_size,
        )
        return losses

    def _forward(self, micro_batches: Iterator[Tensor | None], model: nn.Module) -> tuple[Tensor, object]:
        tokens = next(micro_batches)
        inputs, labels = (None, None) if tokens is None else (tokens[:, :-1], tokens[:, 1:])
        output = model(inputs, self._positions, None, labels=labels if self.last else None)
        return output, self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The schedule itself divides the first by the number of micro-batches, and hands back the second."""
        mean = losses.mean() / self.plan.data
        return mean, mean.detach() / self.plan.micro_batches

    @torch.no_grad()
    def _take_weights(self, stage: Stage) -> None:
        ours = dict(stage.parameters_by_name())
        theirs = dict(self._model.named_parameters())
        first_layer = self.plan.layers_of(self.place.stage).start
        taken = set()
        for name, parameter in ours.items():
            there = _their_name(name, first_layer)
            theirs[there].copy_(_by_head(parameter, self.plan.model.heads) if "qkv" in name else parameter)
            taken.add(there)
        assert taken == set(theirs), f"weights that only one side has: {taken ^ set(theirs)}"


_THEIR_NAMES = {
    "embedding.word": "embedding.word_embeddings.weight",
    "embedding.position": "embedding.position_embeddings.weight",
    "head.word": "output_layer.weight",
    "head.norm": "decoder.final_layernorm",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "attention_out": "self_attention.linear_proj",
    "mlp_norm": "pre_mlp_layernorm",
    "mlp_in": "mlp.linear_fc1",
    "mlp_out": "mlp.linear_fc2",
}


def _their_name(name: str, first_layer: int) -> str:
    """Megatron-Core counts layers from 0 in each stage."""
    if name in _THEIR_NAMES:
        return _THEIR_NAMES[name]
    whole, _, kind = name.rpartition(".")
    if whole in _THEIR_NAMES:
        return f"{_THEIR_NAMES[whole]}.{kind}"
    _, layer, part = whole.split(".")
    return f"decoder.layers.{int(layer) - first_layer}.{_THEIR_NAMES[part]}.{kind}"


def _by_head(qkv: Tensor, heads: int) -> Tensor:
    """From [3, heads, width, …] to Megatron's [heads, 3, width, …], the first three as one dimension."""
    return qkv.view(3, heads, -1, *qkv.shape[1:]).transpose(0, 1).reshape(qkv.shape)


def _pretend_cuda() -> None:
    """Sends what Megatron-Core asks of CUDA to the CPU, for the rest of this process."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    for owner, name, stand_in in (
        (torch, "zeros", _on_cpu(torch.zeros)),
        (torch, "ones", _on_cpu(torch.ones)),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda: None),
        (Tensor, "cuda", lambda tensor: tensor),
        (CudaRNGStatesTracker, "fork", lambda tracker: NOTHING),  # only dropout, which is 0, draws under it
    ):
        setattr(owner, name, stand_in)


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*size: int, device: object = None, **options: object) -> Tensor:
        return make(*size, device="cpu" if device == "cuda" else device, **options)

    return made
