"""megatron.core's model of a rank, and which of its parameters is which of ours."""

from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.models.keys import ROTARY
from megatron_ext.contract.plan import Plan
from megatron_ext.core.layers import layers
from megatron_ext.core.library import Library
from megatron_ext.families.gpt.options import GptOptions
from megatron_ext.tasks.task import Task


def make_chunk(plan: Plan, config: Any, library: Library, virtual_stage: int) -> nn.Module:
    """One virtual stage, on the rank's device and without weights that mean anything."""
    from megatron.core.models.gpt import GPTModel

    model = plan.model
    rope: Dict[str, Any] = {}
    if model.position_embedding_type == ROTARY:
        rope.update(rotary_base=model.rotary_base, rotary_percent=model.rotary_percent)
        if model.rope_scaling_factor is not None:
            rope.update(rope_scaling=True, rope_scaling_factor=model.rope_scaling_factor)
    chunk: nn.Module = GPTModel(
        config,
        layers(library, config, plan.partition[virtual_stage]),
        model.padded_vocab_size,
        model.sequence_length,
        pre_process=virtual_stage == 0,
        post_process=virtual_stage == len(plan.partition) - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=str(model.position_embedding_type),
        **rope,
        **({"vp_stage": virtual_stage // plan.pipeline} if plan.chunks > 1 else {}),
    )
    device = torch.device(plan.device)
    return chunk if device.type == "cpu" else chunk.cuda(torch.cuda.current_device())


def shapes(plan: Plan, held: Mapping[str, Parameter]) -> Dict[str, torch.Size]:
    """Those of this rank's parameters, and of the experts of its stage that other ranks have, in its own cut."""
    found = {name: one.tensor.shape for name, one in held.items()}
    experts = plan.model.own(GptOptions).experts
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
    groups: int
    """For queries, keys and values, this rank's groups of heads, by which megatron.core orders them; for others 0."""
    heads: int
    """Query heads of each of these groups."""

    def ours(self, theirs: Tensor) -> Tensor:
        """What there is of it in its form there, in ours."""
        return by_kind(theirs, self.groups, self.heads) if self.groups else theirs

    def theirs(self, ours: Tensor) -> Tensor:
        """The inverse."""
        return by_group(ours, self.groups, self.heads) if self.groups else ours


def by_kind(qkv: Tensor, groups: int, heads: int) -> Tensor:
    """All queries, then keys, then values, of rows that are ordered by groups of so many heads."""
    parts = qkv.view(groups, heads + 2, -1, *qkv.shape[1:]).split([heads, 1, 1], 1)  # type: ignore[no-untyped-call]
    return torch.cat([part.reshape(-1, *qkv.shape[1:]) for part in parts])


def by_group(qkv: Tensor, groups: int, heads: int) -> Tensor:
    """The inverse of `by_kind`."""
    width = len(qkv) // (groups * (heads + 2))
    parts = qkv.split([groups * count * width for count in (heads, 1, 1)])  # type: ignore[no-untyped-call]
    whole = [part.view(groups, -1, width, *qkv.shape[1:]) for part in parts]
    return torch.cat(whole, 1).reshape(qkv.shape)


def parameters(
    plan: Plan, task: Task, chunks: Sequence[nn.Module], virtual_stages: Sequence[int], first_expert: int
) -> Dict[str, Parameter]:
    """This rank's parameters, by the names that tdpp has for them in the whole model. `first_expert` is the number of
    the first expert that the rank has.

    Raises:
        EngineError: megatron.core has a parameter that tdpp has no name for.
    """
    found: Dict[str, Parameter] = {}
    model = plan.model
    for chunk, virtual_stage in zip(chunks, virtual_stages):
        first = plan.layers_of(virtual_stage).start
        for theirs, parameter in chunk.named_parameters():
            name = our_name(theirs, first, first_expert)
            shard = task.shard(name)
            if shard is not None:  # megatron.core says so where it draws weights itself, and counts others once
                parameter.tensor_model_parallel, parameter.partition_dim = True, shard.dim  # type: ignore[attr-defined]
            groups = model.query_groups // plan.tensor if ".qkv." in name else 0
            found[name] = Parameter(parameter, groups, model.heads // model.query_groups)
    return found


_NAMES: List[Tuple[str, str]] = [
    (r"embedding\.word_embeddings\.weight", "embedding.word"),
    (r"embedding\.position_embeddings\.weight", "embedding.position"),
    (r"output_layer\.weight", "head.word"),
    (r"decoder\.final_layernorm\.(weight|bias)", r"head.norm.\1"),
    (r"input_layernorm\.(weight|bias)", r"attention_norm.\1"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"attention_norm.\1"),
    (r"self_attention\.linear_qkv\.(weight|bias)", r"qkv.\1"),
    (r"self_attention\.linear_proj\.(weight|bias)", r"attention_out.\1"),
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


def our_name(theirs: str, first_layer: int, first_expert: int = 0) -> str:
    """Megatron.core counts layers from 0 in each stage, whose first one is `first_layer`, and experts on each rank."""
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", theirs)
    begin, rest = ("", theirs) if layer is None else (f"layers.{int(layer[1]) + first_layer}.", layer[2])
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
