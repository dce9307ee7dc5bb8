"""megatron.core's models of the families that it trains, and how a micro-batch passes through a chunk of one."""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any, Dict, Mapping, Type

import torch
from torch import Tensor, nn

from megatron_ext.contract.models.keys import ROTARY
from megatron_ext.contract.plan import Plan
from megatron_ext.core.layers import layers, norm_of, stack
from megatron_ext.core.library import Library
from megatron_ext.tasks.task import Tensors


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
        chunk: nn.Module = GPTModel(config, layers(library, config, count), **options)
        return chunk

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
        chunk: nn.Module = Model(config, 2 if binary else 0, spec, add_binary_head=binary, **options)
        return chunk

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
        chunk: nn.Module = T5Model(
            config,
            own,
            stack(own, t5_spec.encoder_model_with_local_spec(), encoder.layers),
            stack(config, t5_spec.decoder_model_with_local_spec(), decoder.layers),
            **options,
        )
        return chunk

    def forward(self, chunk: nn.Module, inputs: Mapping[str, Tensor], positions: Tensor, **options: Any) -> Any:
        padding = (inputs["enc_mask"] == 0)[:, None, None]
        return chunk(inputs["text_enc"], inputs["text_dec"], padding, None, padding, **options)


_FAMILIES: Dict[str, Type[CoreFamily]] = {"gpt": CoreFamily, "bert": _Bert, "t5": _T5}


def family_of(plan: Plan) -> CoreFamily:
    """What megatron.core has of a plan's model (`Family.megatron_core`)."""
    return _FAMILIES[plan.model.family](plan)
