"""megatron.core's models of the families that it trains, and how a micro-batch passes through a chunk of one."""

from __future__ import annotations

from contextlib import nullcontext
from copy import copy, deepcopy
from functools import lru_cache
from typing import Any, Dict, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.contract.models.keys import RMS_NORM, ROTARY
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_parts import Place
from megatron_ext.core.library import Library
from megatron_ext.parallel.comm import all_gather, all_reduce
from megatron_ext.tasks.language.attention import attend
from megatron_ext.tasks.language.norms import RMSNorm
from megatron_ext.tasks.task import Micro, Tensors

# The layers of megatron.core's models: GPT's of Transformer Engine where it is there, else megatron.core's own.
#
# Of the latter, norms take no sequence parallelism, and the attention holds all scores; tdpp's stand in their place.

# Ranks that share sequences: which tokens each has, and attention over those of all.
#
# A rank has two of 2 x `context` pieces of a sequence, one from either end, so that causal attention is as much work
# for each (Megatron-Core's `get_batch_on_this_cp_rank`).


def places(length: int, context: int, rank: int) -> Tensor:
    """[length / context]: which places of a sequence a rank of a context group has, rising."""
    piece = length // (2 * context)
    first, last = rank * piece, (2 * context - 1 - rank) * piece
    return torch.cat([torch.arange(first, first + piece), torch.arange(last, last + piece)])


class OwnTokens:
    """What a rank has of micro-batches."""

    def __init__(self, plan: Plan, place: Place, device: torch.device) -> None:
        length = plan.model.sequence_length
        self._length, self._context = length, plan.context or 1
        self.positions = places(length, self._context, place.dp % self._context).to(device)
        """[own tokens]: their places in the sequence."""

    def of(self, micro: Micro) -> Micro:
        """The own part of each tensor [samples, sequence]; a weight counts the own labels alone."""
        if self._context == 1:
            return micro
        inputs, targets = (
            {name: self._own(tensor) for name, tensor in held.items()} for held in (micro.inputs, micro.targets)
        )
        weight = None if micro.weight is None else targets["loss_mask"].sum()
        return micro._replace(inputs=inputs, targets=targets, weight=weight)

    def _own(self, tensor: Tensor) -> Tensor:
        whole = tensor.dim() > 1 and tensor.shape[1] == self._length
        return tensor.index_select(1, self.positions) if whole else tensor


class _Gather(torch.autograd.Function):
    """[own tokens, …] of each rank of a group -> [all tokens, …], in the order of the ranks. Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        whole = own.new_empty(group.size(), *own.shape)
        all_gather(own.contiguous(), whole, group, "gathering a sequence's keys and values")
        return whole.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)  # gloo has no reduce-scatter
        all_reduce(summed, ctx.group, "summing gradients of a sequence's keys and values")
        return summed.chunk(ctx.group.size())[ctx.group.rank()], None


def gathered(own: Tensor, group: Any) -> Tensor:
    """Keys and values [own tokens, batch, heads, widths] of each rank -> [all tokens, batch, heads, widths]."""
    return _Gather.apply(own, group)  # type: ignore[no-untyped-call]


@lru_cache(maxsize=8)
def seen(own: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """[own tokens, all tokens]: which of the `gathered` places each of the own ones attends to: itself and those
    before it."""
    of_each = [places(own * ranks, ranks, one) for one in range(ranks)]
    mask: Tensor = torch.cat(of_each) <= of_each[rank][:, None]
    return mask.to(device)


class _LayerNorm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        _share(self, config)


class _RmsNorm(RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps)
        _share(self, config)


def _share(module: nn.Module, config: Any) -> None:
    """Has gradients summed over the tensor group where each of its ranks has a share of the sequence."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _Attention(nn.Module):
    """The core of attention, by torch's kernel for it; of a sequence that ranks share, with the keys and values of all
    of them."""

    def __init__(
        self, config: Any, *_: object, attn_mask_type: Any, softmax_scale: Optional[float] = None, **__: object
    ) -> None:
        super().__init__()
        self._dropout = config.attention_dropout
        self._scale = softmax_scale
        self._causal = attn_mask_type.name == "causal"
        self._shared = config.context_parallel_size > 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], *_: object, **__: object
    ) -> Tensor:
        """query [tokens, batch, heads, width], key and value with as many heads or fewer -> [tokens, batch, heads x
        width]. Unless it is causal, `mask` [batch, 1, tokens or 1, tokens] is true where one is not seen; its first row
        tells which tokens are there, for a sequence begins with one that is."""
        from megatron.core.parallel_state import get_context_parallel_group
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        there = None if mask is None or self._causal else ~mask[:, 0, 0]
        visible = None if there is None else there[:, None, None]
        if self._shared:
            group = get_context_parallel_group()
            visible = seen(len(query), group.size(), group.rank(), query.device)
            widths = key.shape[-1], value.shape[-1]
            key, value = gathered(torch.cat([key, value], -1), group).split(widths, -1)  # type: ignore[no-untyped-call]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if (self._dropout and self.training) or self._scale is not None or self._shared:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            rate, causal = self._dropout if self.training else 0.0, self._causal and not self._shared
            with get_cuda_rng_tracker().fork() if rate else nullcontext():  # each tensor rank drops other weights
                y = F.scaled_dot_product_attention(query, key, value, visible, rate, causal, scale=self._scale)
            return y.permute(2, 0, 1, 3).flatten(2)
        return attend(query, key, value, self._causal, there, None).transpose(0, 1).flatten(2)


def layers(library: Library, config: Any, count: int) -> Any:
    """What a stage of `count` layers is made of, as GPTModel takes it."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    options = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if library.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        one = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
        return TransformerBlockSubmodules(layer_specs=[one] * count, layer_norm=TENorm)
    one = gpt_layer_specs.get_gpt_layer_local_spec(**options)
    return stack(config, one, count)


def norm_of(config: Any) -> type:
    """The norm of a model, which takes sequence parallelism."""
    return _RmsNorm if config.normalization == RMS_NORM else _LayerNorm


def stack(config: Any, layer: Any, count: int) -> Any:
    """So many of megatron.core's own layers, with tdpp's norms and torch's attention."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    norm, parts = norm_of(config), layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attentions = [parts.self_attention]
    if isinstance(parts.cross_attention, type(parts.self_attention)):
        parts.pre_cross_attn_layernorm = norm
        attentions.append(parts.cross_attention)
    for attention in attentions:
        attention.submodules.core_attention = _Attention
    if config.multi_latent_attention and config.qk_layernorm:
        attentions[0].submodules.q_layernorm = attentions[0].submodules.kv_layernorm = norm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


class CoreFamily:
    """GPT's: other families are subclasses."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def make(self, config: Any, library: Library, virtual_stage: int) -> nn.Module:
        """One virtual stage, on the rank's device and without weights that mean anything."""
        plan = self._plan
        options = {
            "vocab_size": plan.model.padded_vocab_size,
            "max_sequence_length": plan.model.positions,
            "pre_process": virtual_stage == 0,
            "post_process": virtual_stage == len(plan.partition) - 1,
            "share_embeddings_and_output_weights": not plan.model.untie_embeddings_and_output_weights,
            "position_embedding_type": str(plan.model.position_embedding_type),
        }
        if plan.model.position_embedding_type == ROTARY:
            options["rotary_percent"] = plan.model.rotary_percent
        if plan.chunks > 1:
            options["vp_stage"] = virtual_stage // plan.pipeline
        chunk = self._made(config, library, plan.partition[virtual_stage], options)
        return chunk if self._plan.device == "cpu" else chunk.cuda(torch.cuda.current_device())

    def _made(self, config: Any, library: Library, count: int, options: Dict[str, Any]) -> nn.Module:
        """A chunk of `count` layers. `options` are what the models of all families take."""
        from megatron.core.models.gpt import GPTModel

        model = self._plan.model
        if model.position_embedding_type == ROTARY:
            options["rotary_base"] = model.rotary_base
            if model.rope_scaling_factor is not None:
                options.update(rope_scaling=True, rope_scaling_factor=model.rope_scaling_factor)
        return GPTModel(config, layers(library, config, count), **options)

    def forward(self, chunk: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor, **options: Any) -> Any:
        """What leaves a chunk: of the last one, what `named` takes. `inputs` are those of a micro-batch that this rank
        has, and `positions` [1, tokens] the places of its tokens."""
        return chunk(inputs.get("tokens"), positions, None, **options)

    def named(self, left: Any) -> Tensors:
        """What the loss takes."""
        return {"logits": left}


class _Bert(CoreFamily):
    def _made(self, config: Any, library: Library, count: int, options: Dict[str, Any]) -> nn.Module:
        from megatron.core.models.bert import bert_lm_head
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel

        class Model(BertModel):  # type: ignore[misc]
            def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
                return "b11s"  # what torch's attention takes

        bert_lm_head.LNImpl = norm_of(config)  # which takes sequence parallelism
        binary = self._plan.model.bert_binary_head
        spec = stack(config, deepcopy(bert_layer_local_spec), count)
        return Model(config, 2 if binary else 0, spec, add_binary_head=binary, **options)

    def forward(self, chunk: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor, **options: Any) -> Any:
        return chunk(inputs.get("text"), inputs["padding_mask"], inputs.get("types"), **options)

    def named(self, left: Any) -> Tensors:
        logits, binary = left
        return {"logits": logits} if binary is None else {"logits": logits, "binary_logits": binary}


class _T5(CoreFamily):
    def _made(self, config: Any, library: Library, count: int, options: Dict[str, Any]) -> nn.Module:
        from megatron.core.models.T5 import t5_spec
        from megatron.core.models.T5.t5_model import T5Model

        encoder, decoder = self._plan.model.stacks()
        own = copy(config)
        own.num_layers = encoder.layers
        return T5Model(
            config,
            own,
            stack(own, t5_spec.encoder_model_with_local_spec(), encoder.layers),
            stack(config, t5_spec.decoder_model_with_local_spec(), decoder.layers),
            **options,
        )

    def forward(self, chunk: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor, **options: Any) -> Any:
        padding = (inputs["enc_mask"] == 0)[:, None, None]
        return chunk(inputs["text_enc"], inputs["text_dec"], padding, None, padding, **options)


_FAMILIES: Dict[str, Type[CoreFamily]] = {"gpt": CoreFamily, "bert": _Bert, "t5": _T5}


def family_of(plan: Plan) -> CoreFamily:
    """What megatron.core has of a plan's model (`Family.megatron_core`)."""
    return _FAMILIES[plan.model.family](plan)
