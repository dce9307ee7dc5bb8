"""Megatron-Core as a contender of `benchmarks.engine`: its model and its schedule, sent from CUDA to the CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders import Yardstick
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.groups import Groups
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.stage import Stage
from megatron_ext.timeline.recorder import NOTHING


class MegatronCore(Yardstick):
    """Megatron-Core's GPTModel under its 1F1B; its attention is its own, in separate operations."""

    def build(self, groups: Groups) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None]:
        warnings.filterwarnings("ignore", module="megatron")  # of Apex and Transformer Engine, which need a GPU
        pretend_cuda()
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
        self._take_weights(stage_of(plan, self.place.stage, TensorGroup()))
        named = list(self._model.named_parameters())
        word = self._model.shared_embedding_or_output_weight() if self.first != self.last else None
        return named, word if self.first or self.last else None

    def forward_backward(self, tokens: Tensor | None) -> list[Tensor]:
        model = self.plan.model
        return self._run(
            forward_step_func=self._forward,
            data_iterator=iter([None] * self.plan.micro_batches[0] if tokens is None else tokens),
            model=self._model,
            num_microbatches=self.plan.micro_batches[0],
            seq_length=model.sequence_length,
            micro_batch_size=self.plan.micro_batch_size,
        )

    def _forward(self, micro_batches: Iterator[Tensor | None], model: nn.Module) -> tuple[Tensor, object]:
        tokens = next(micro_batches)
        inputs, labels = (None, None) if tokens is None else (tokens[:, :-1], tokens[:, 1:])
        output = model(inputs, self._positions, None, labels=labels if self.last else None)
        return output, self._loss

    def _loss(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """The schedule itself divides the first by the number of micro-batches, and hands back the second."""
        mean = losses.mean() / self.plan.data
        return mean, mean.detach() / self.plan.micro_batches[0]

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


def pretend_cuda() -> None:
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
