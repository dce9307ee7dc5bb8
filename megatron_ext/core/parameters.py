"""Which of the parameters of megatron.core's model is which of ours."""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.counts import experts_of
from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.contract.plan import Plan
from megatron_ext.tasks.task import Task


def shapes(plan: Plan, held: Mapping[str, Parameter]) -> Dict[str, torch.Size]:
    """Those of this rank's parameters, and of the experts of its stage that other ranks have, in its own cut."""
    found = {name: one.tensor.shape for name, one in held.items()}
    experts = experts_of(plan.model)
    if experts is None:
        return found
    for name, one in list(held.items()):
        expert = re.fullmatch(r"(layers\.\d+\.experts\.)\d+(\..+)", name)
        if expert is not None:
            found.update({f"{expert[1]}{number}{expert[2]}": one.tensor.shape for number in range(experts)})
    return found


class Parameter(NamedTuple):
    """A parameter of ours, as megatron.core has it."""

    tensor: nn.Parameter
    groups: int = 0
    """For queries, keys and values, this rank's groups of heads, by which megatron.core orders them; for others 0."""
    heads: Tuple[int, ...] = ()
    """Heads of each of these groups: of queries, of keys and of values, those of them that the parameter has."""

    def ours(self, theirs: Tensor) -> Tensor:
        """What there is of it in its form there, in ours."""
        return by_kind(theirs, self.groups, self.heads) if self.groups else theirs

    def theirs(self, ours: Tensor) -> Tensor:
        """The inverse."""
        return by_group(ours, self.groups, self.heads) if self.groups else ours


def qkv_heads(model: ModelConfig) -> Tuple[int, ...]:
    """Heads of queries, keys and values in each of a layer's groups."""
    return (model.heads // model.query_groups, 1, 1)


def by_kind(rows: Tensor, groups: int, heads: Sequence[int]) -> Tensor:
    """All queries, then keys, then values, of rows that are ordered by groups of so many heads of each."""
    parts = rows.view(groups, sum(heads), -1, *rows.shape[1:]).split(list(heads), 1)  # type: ignore[no-untyped-call]
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


def by_group(rows: Tensor, groups: int, heads: Sequence[int]) -> Tensor:
    """The inverse of `by_kind`."""
    width = len(rows) // (groups * sum(heads))
    parts = rows.split([groups * count * width for count in heads])  # type: ignore[no-untyped-call]
    whole = [part.view(groups, -1, width, *rows.shape[1:]) for part in parts]
    return torch.cat(whole, 1).reshape(rows.shape)


def parameters(
    plan: Plan, task: Task, chunks: Sequence[nn.Module], virtual_stages: Sequence[int], first_expert: int
) -> Dict[str, Parameter]:
    """This rank's parameters, by the names that tdpp has for them in the whole model. `first_expert` is the number of
    the first expert that the rank has. Raises EngineError: megatron.core has a parameter that tdpp has no name for."""
    found: Dict[str, Parameter] = {}
    model = plan.model
    for chunk, virtual_stage in zip(chunks, virtual_stages):
        first = plan.layers_of(virtual_stage).start
        for theirs, parameter in chunk.named_parameters():
            name = our_name(theirs, first, first_expert, model.traits.decoder)
            if ".latent." in name:
                task.adopt(name, parameter.shape)
            shard = task.shard(name)
            if shard is not None:  # megatron.core says so where it draws weights itself, and counts others once
                parameter.tensor_model_parallel, parameter.partition_dim = True, shard.dim  # type: ignore[attr-defined]
            found[name] = Parameter(parameter)
            groups = model.query_groups // plan.tensor
            if ".qkv." in name:
                found[name] = Parameter(parameter, groups, qkv_heads(model))
            elif ".cross_kv." in name:
                found[name] = Parameter(parameter, groups, (1, 1))
    return found


_NAMES: List[Tuple[str, str]] = [
    (r"embedding\.word_embeddings\.weight", "embedding.word"),
    (r"embedding\.position_embeddings\.weight", "embedding.position"),
    (r"embedding\.tokentype_embeddings\.weight", "embedding.types"),
    (r"(?:lm_head\.)?output_layer\.weight", "head.word"),
    (r"(?:lm_head\.)?output_layer\.bias", "head.bias"),
    (r"lm_head\.dense\.(weight|bias)", r"head.dense.\1"),
    (r"lm_head\.layer_norm\.(weight|bias)", r"head.dense_norm.\1"),
    (r"pooler\.dense\.(weight|bias)", r"head.pooler.\1"),
    (r"binary_head\.(weight|bias)", r"head.binary.\1"),
    (r"input_layernorm\.(weight|bias)", r"attention_norm.\1"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"attention_norm.\1"),
    (r"self_attention\.linear_qkv\.(weight|bias)", r"qkv.\1"),
    (r"self_attention\.linear_proj\.(weight|bias)", r"attention_out.\1"),
    (r"self_attention\.linear_q_proj\.weight", "latent.query.weight"),
    (r"self_attention\.linear_q_down_proj\.weight", "latent.query_down.weight"),
    (r"self_attention\.(?:linear_q_up_proj\.layer_norm_|q_layernorm\.)(weight|bias)", r"latent.query_norm.\1"),
    (r"self_attention\.linear_q_up_proj\.weight", "latent.query_up.weight"),
    (r"self_attention\.linear_kv_down_proj\.weight", "latent.kv_down.weight"),
    (r"self_attention\.(?:linear_kv_up_proj\.layer_norm_|kv_layernorm\.)(weight|bias)", r"latent.kv_norm.\1"),
    (r"self_attention\.linear_kv_up_proj\.weight", "latent.kv_up.weight"),
    (r"pre_cross_attn_layernorm\.(weight|bias)", r"cross_norm.\1"),
    (r"cross_attention\.linear_q\.(weight|bias)", r"cross_query.\1"),
    (r"cross_attention\.linear_kv\.(weight|bias)", r"cross_kv.\1"),
    (r"cross_attention\.linear_proj\.(weight|bias)", r"cross_out.\1"),
    (r"pre_mlp_layernorm\.(weight|bias)", r"mlp_norm.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", r"mlp_norm.\1"),
    (r"mlp\.linear_fc1\.(weight|bias)", r"mlp_in.\1"),
    (r"mlp\.linear_fc2\.(weight|bias)", r"mlp_out.\1"),
    (r"mlp\.router\.weight", "router.weight"),
]
"""megatron.core's names, of its layers within them, and ours. Transformer Engine has a norm inside of the layer that
follows it."""


_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.(weight|bias)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)")
"""Those of Transformer Engine that are multiplied together."""


def our_name(theirs: str, first_layer: int, first_expert: int = 0, two_stacks: bool = False) -> str:
    """Megatron.core counts layers from 0 in each stage, whose first one is `first_layer`, and experts on each rank.
    `two_stacks`: of an encoder and a decoder."""
    final = re.fullmatch(r"(encoder|decoder)\.final_layernorm\.(weight|bias)", theirs)
    if final is not None:
        return f"{'encoder_norm' if two_stacks and final[1] == 'encoder' else 'head'}.norm.{final[2]}"
    begin, rest = "", theirs
    layer = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)", theirs)
    if layer is not None:
        begin, rest = f"{layer[1] if two_stacks else 'layers'}.{int(layer[2]) + first_layer}.", layer[3]
    expert: Optional[Tuple[str, str, str]] = None
    if (one := _EXPERT.fullmatch(rest)) is not None:
        expert = one[1], one[2], one[3]
    elif (one := _GROUPED_EXPERT.fullmatch(rest)) is not None:
        expert = one[3], one[1], one[2]
    if expert is not None:
        number, matrix, kind = expert
        return f"{begin}experts.{int(number) + first_expert}.{'mlp_in' if matrix == '1' else 'mlp_out'}.{kind}"
    for pattern, ours in _NAMES:
        found = re.fullmatch(pattern, rest)
        if found is not None:
            return begin + found.expand(ours)
    raise EngineError(
        f"megatron-core has a parameter {theirs}, for which tdpp's checkpoints have no name; leave out what adds it to "
        "the model, or use engine=tdpp"
    )
