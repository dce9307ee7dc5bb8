"""Tiny configurations of every family of transformers that declares how it is cut into stages."""

from __future__ import annotations

import copy
import os
from functools import cache
from typing import Any

import torch

from megatron_ext.contract.errors import EngineError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 128
SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "head_dim": 8},
    **{"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"num_experts_per_token": 2, "vocab_size_per_layer_input": VOCAB},
    **{"index_head_dim": 16, "index_n_heads": 4, "index_topk": 8},
}
"""By the names that families share."""
LARGE = 64
"""No size of a tiny model is larger, unless it is a number of something else."""
SIZED = ("size", "dim", "width", "rank", "hidden")
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
OTHERS: tuple[dict[str, Any], ...] = (
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"num_key_value_heads": 2, **_SECTIONS},
    {"num_key_value_heads": 2, "sliding_window": 8},
    {"num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"num_key_value_heads": 2, "n_shared_experts": 1},
)
"""What families do not agree on; the first with which a model can be made and run is taken."""


_OF_TYPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _OF_TYPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3]},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_OF_TYPE, "mrope_section": [1, 1, 2]}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": {"rope_parameters": {**_OF_TYPE, "mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "longcat_flash": {"qk_head_dim": 16, "num_layers": 2},
}
"""What a family has and no other one."""


PARTS = 8
"""Of all families, which one test each takes: some take a minute together."""


def families() -> list[str]:
    """The `model_type`s of all configurations with a pipeline plan."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return [kind for kind in CONFIG_MAPPING if getattr(CONFIG_MAPPING[kind], "base_model_pp_plan", None)]


def tiny(kind: str, others: dict[str, Any]) -> Any:
    """A configuration of a family with small sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make = CONFIG_MAPPING[kind]
    sizes = copy.deepcopy({**SIZES, **others, **PARTICULAR.get(kind, {})})  # families change what they are given
    usual = {**dict.fromkeys(PARTICULAR.get(kind, {})), **make().to_dict()}
    return make(**{**_small(usual, sizes), **({"sliding_window": 8} if "sliding_window" in others else {})})


def _small(usual: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in usual.items():
        if isinstance(value, bool) or key in ("model_type", "transformers_version"):
            continue
        if key in sizes and (not isinstance(value, list | dict) or isinstance(sizes[key], list | dict)):
            found[key] = sizes[key]
        elif isinstance(value, int) and value > LARGE and any(word in key for word in SIZED):
            found[key] = 8 if "rank" in key or "dim" in key else 32
        elif key == "layer_types" and isinstance(value, list):
            found[key] = [*value[:2], *value[-2:]]
        elif isinstance(value, dict) and "mrope_section" in value:
            found[key] = {**value, "mrope_section": [2, 1, 1]}
        elif isinstance(value, dict) and "hidden_size" in value:
            found[key] = {**value, **_small(value, sizes)}
        elif isinstance(value, float) and ("drop" in key or "jitter" in key):
            found[key] = 0.0
    return found


def working(kind: str) -> Any:
    """The first tiny configuration of a family with which transformers itself can make and run its model.

    Raises what transformers raises, if there is none.
    """
    return copy.deepcopy(_working(kind))


@cache
def _working(kind: str) -> Any:
    raised: Exception | None = None
    for others in OTHERS:
        try:
            config = tiny(kind, others)
            config.use_cache = False
            whole(config)(input_ids=torch.arange(32).reshape(2, 16) + 3, use_cache=False)
        except EngineError:
            raise
        except Exception as error:  # noqa: BLE001  (any, as families check their sizes in many ways)
            raised = raised or error
        else:
            return config
    assert raised is not None
    raise raised


def whole(config: Any) -> torch.nn.Module:
    """The whole model as transformers makes it, with the weights that a run with seed 1 begins with."""
    from megatron_ext.families.huggingface import library
    from megatron_ext.families.huggingface.weights import fill

    with torch.device("meta"):
        model = library._made(library.transformers(), config)
    memo = {id(one): torch.nn.Parameter(torch.empty_like(one, device="cpu")) for one in model.parameters()}
    model = copy.deepcopy(model, memo)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    fill(model, "", None, 1)
    return model
