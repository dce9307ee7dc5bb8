"""A plan in the words of megatron.core: its groups, and the settings of its model, replicas and optimizer."""

from __future__ import annotations

import math
import types
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from functools import partial
from inspect import signature
from typing import Any, Collection, Dict, Iterator, Literal, Mapping, Union, get_args, get_origin, get_type_hints

import torch
from torch.nn import functional as F

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.layout import megatron_layout
from megatron_ext.contract.models.counts import BALANCE, experts_of
from megatron_ext.contract.models.keys import RMS_NORM
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.rules.engine import LATENT
from megatron_ext.contract.train_config import ADAMW
from megatron_ext.core.library import Library
from megatron_ext.engine.optimizer.precision import LossScaler
from megatron_ext.families.gpt.options import GptOptions
from megatron_ext.parallel.comm import annotate_errors
from megatron_ext.tasks.task import DTYPES

_MAY_BE_NULL = ("q_lora_rank",)
"""What megatron.core reads as absent, although its type has no null."""
_VALUES = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
}
"""Values of options of which megatron.core reads every other name as none of these."""
_SIMPLE = (bool, int, float, str, type(None))
_UNIONS = (Union, getattr(types, "UnionType", Union))


def checked(
    options: Mapping[str, object], config: Any, fixed: Mapping[str, Any], latent: Collection[str]
) -> Dict[str, object]:
    """Returns the options as `config` takes them. `fixed` is what the plan says, and `latent` are the fields that
    there are with multi-latent attention.

    Raises:
        EngineError: there is no such field, or the plan says it, or it takes another type.
    """
    hints, found = get_type_hints(config), {}
    for name, value in options.items():
        shown = f"engine.options.{name}={'null' if value is None else value}"
        if name not in hints and name in latent:
            raise EngineError(f"{shown} needs engine.options.{LATENT}=true")
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}?" if near else "see the fields of its TransformerConfig"
            raise EngineError(f"{shown}: this megatron-core has no such option; {meant}")
        if name in fixed:
            raise EngineError(f"{shown}: the plan says {name}={fixed[name]}, from keys of tdpp; leave it out")
        known = _VALUES.get(name)
        if known is not None and any(one not in known for one in (value if isinstance(value, list) else [value])):
            raise EngineError(f"{shown} must be {' or '.join(known)}")
        found[name] = None if value is None and name in _MAY_BE_NULL else _typed(shown, value, hints[name])
    return found


def _typed(shown: str, value: object, hint: Any) -> object:
    """Returns a value as a field of this type takes it. A whole number is a number, too, and a name stands for what an
    Enum has. Nothing stands for other types, such as functions."""
    kinds = get_args(hint) if get_origin(hint) in _UNIONS else (hint,)
    for kind in kinds:
        of = get_origin(kind) or kind
        if of is Literal and isinstance(value, str) and value in get_args(kind):
            return value
        if _is_enum(kind) and value in kind.__members__:
            return kind[value]
        if of in (list, tuple) and isinstance(value, list):
            return of(value)
        if of in _SIMPLE and (type(value) is of or (of is float and type(value) is int)):
            return value
    raise EngineError(f"{shown} must be of the type {' or '.join(map(_words, kinds))}")


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if kind is type(None):
        return "null"
    if _is_enum(kind):
        return " or ".join(kind.__members__)
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


OLDEST_WITH_FP8 = (8, 9)
"""The compute capability from which GPUs multiply numbers of 8 bits (Transformer Engine's documentation)."""
_MAY_CHANGE = (
    *("moe_aux_loss_coeff", "moe_token_dispatcher_type", "moe_ffn_hidden_size", "bias_activation_fusion"),
    *("bias_dropout_fusion", "apply_rope_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion"),
    *("persist_layer_norm", "overlap_p2p_comm"),
)
"""What tdpp sets by itself, and no key of it says."""
_KEYS: Mapping[str, Any] = {
    **{"num_moe_experts": None, "mtp_num_layers": None, "moe_layer_freq": 1},
    **{"init_method_std": "that of tdpp's initial weights"},
}
"""What keys of tdpp say of every model, or no model of it has."""
_OF_TRANSFORMER_ENGINE = ("window_size", "window_attn_skip_freq", "softmax_type", "fp32_residual_connection")
"""Options that layers without Transformer Engine would leave unheard."""


def make_groups(plan: Plan, timeout: timedelta) -> None:
    """Makes megatron.core's groups, whose ranks lie as the plan's do. All ranks call it."""
    from megatron.core import parallel_state

    if plan.device == "cpu":
        from megatron_ext.parallel.comm import require_room_for_threads

        require_room_for_threads()
    with annotate_errors("making the groups of ranks"):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=plan.tensor,
            pipeline_model_parallel_size=plan.pipeline,
            virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
            distributed_timeout_minutes=timeout.total_seconds() / 60,
            context_parallel_size=plan.context or 1,
            expert_model_parallel_size=plan.expert or 1,
            create_gloo_process_groups=False,
        )
    if plan.device == "cuda":  # layers that share a sequence ask for these states even where nothing is dropped
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(plan.train.seed)


def model_config(plan: Plan, library: Library) -> Any:
    """megatron.core's TransformerConfig, of latent attention its MLATransformerConfig."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    given = plan.engine_options or {}
    own = {**_model(plan), **_experts(plan), **_layout(plan), **_kernels(plan, library)}
    kind = TransformerConfig
    if given.get(LATENT) is True:  # whose layers rotate a part of each head themselves
        kind = MLATransformerConfig
        own.update(
            rotary_base=plan.model.rotary_base, rotary_percent=plan.model.rotary_percent, apply_rope_fusion=False
        )
    fixed = {name: value for name, value in {**_KEYS, **own}.items() if name not in _MAY_CHANGE}
    options = checked(given, kind, fixed, {one.name for one in fields(MLATransformerConfig)})
    if options.get("fp8"):
        _require_fp8(plan, library, f"engine.options.fp8={options['fp8']}")
    for name in _OF_TRANSFORMER_ENGINE:
        if name in options and not library.transformer_engine:
            raise EngineError(
                f"engine.options.{name}={options[name]} needs Transformer Engine, which is not here; leave it out"
            )
    with refusing(options):
        return kind(**{**own, **options})


def _require_fp8(plan: Plan, library: Library, shown: str) -> None:
    """Raises EngineError where layers cannot have this format, which Transformer Engine's have on GPUs of Ada and
    Hopper, and newer."""
    otherwise = "leave it out: train.precision=bf16 is the next"
    if not plan.model.traits.megatron_lm:
        raise EngineError(f"{shown}: layers of model.family={plan.model.family} have no FP8 here; {otherwise}")
    if not library.transformer_engine:
        raise EngineError(f"{shown} needs a GPU and Transformer Engine, which is not here; {otherwise}")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_WITH_FP8:
        raise EngineError(
            f"{shown}: {torch.cuda.get_device_name()} has compute capability {'.'.join(map(str, capability))}, and FP8 "
            f"needs {'.'.join(map(str, OLDEST_WITH_FP8))} (L4, L40, H100); {otherwise}"
        )


@contextmanager
def refusing(options: Mapping[str, object]) -> Iterator[None]:
    """Has what megatron.core says of values that do not go together be one message."""
    try:
        yield
    except (AssertionError, ImportError, ValueError, TypeError, KeyError) as error:
        given = ", ".join(f"engine.options.{name}={value}" for name, value in options.items()) or "this plan"
        raise EngineError(f"megatron-core refuses {given}: {error or type(error).__name__}") from error


def _model(plan: Plan) -> Dict[str, Any]:
    model = plan.model
    return {
        "num_layers": model.stacks()[-1].layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.inner,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "normalization": str(model.normalization),
        "layernorm_epsilon": model.norm_epsilon,
        "add_bias_linear": model.add_bias_linear,
        "gated_linear_unit": model.swiglu,
        "activation_func": F.silu if model.swiglu else partial(F.gelu, approximate="tanh"),
    }


def _experts(plan: Plan) -> Dict[str, Any]:
    if experts_of(plan.model) is None:
        return {}
    own = plan.model.own(GptOptions)
    return {
        "num_moe_experts": own.experts,
        "moe_router_topk": own.experts_per_token,
        "moe_ffn_hidden_size": plan.model.inner,
        "expert_model_parallel_size": plan.expert or 1,
        "moe_token_dispatcher_type": "alltoall",
        "moe_aux_loss_coeff": BALANCE,
    }


def _layout(plan: Plan) -> Dict[str, Any]:
    recompute: Dict[str, Any] = {}
    one = plan.model.traits.decoder  # of two stacks, which stages do not divide
    if plan.recompute.way == "full":
        method = "uniform" if plan.recompute.layers is None else "block"
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": plan.recompute.layers or 1,
        }
    elif plan.recompute == "selective":
        recompute = {"recompute_granularity": "selective"}
    return {
        "tensor_model_parallel_size": plan.tensor,
        "context_parallel_size": plan.context or 1,
        "sequence_parallel": plan.sequence_parallel,
        "pipeline_model_parallel_size": plan.pipeline,
        "virtual_pipeline_model_parallel_size": plan.chunks if plan.chunks > 1 else None,
        "pipeline_model_parallel_layout": None if one else megatron_layout(plan.partition, plan.pipeline),
        **recompute,
    }


def _kernels(plan: Plan, library: Library) -> Dict[str, Any]:
    """Number formats, and what is fused where."""
    cuda, dtype, model = plan.device == "cuda", DTYPES[plan.train.precision], plan.model
    fused = cuda and (model.swiglu or model.add_bias_linear)
    return {
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "perform_initialization": False,  # tdpp's initial weights, or a checkpoint's, take their place
        "use_cpu_initialization": not cuda,
        "bias_activation_fusion": fused,
        **({"activation_func": F.gelu} if fused and not model.swiglu else {}),  # which is then the tanh one
        "bias_dropout_fusion": cuda,
        "apply_rope_fusion": cuda and library.transformer_engine,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": library.transformer_engine and model.normalization != RMS_NORM,
        "batch_p2p_comm": False,  # so that a receive and a send that go together end each at its own time
        "overlap_p2p_comm": plan.chunks > 1,
    }


def replicas_config(plan: Plan) -> Any:
    """megatron.core's DistributedDataParallelConfig."""
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=plan.reduce_dtype is None,
        overlap_grad_reduce=plan.data > 1,
        use_distributed_optimizer=plan.sharded_optimizer,
    )


def forward_options(config: Any) -> Dict[str, Any]:
    """Options of forward passes: tdpp's loss takes logits as they are, of 16 bits too. Before 0.15 there are none."""
    from megatron.core.transformer.module import Float16Module

    takes = "fp32_output" in signature(Float16Module.forward).parameters
    return {"fp32_output": False} if takes and (config.fp16 or config.bf16) else {}


def optimizer_config(plan: Plan) -> Any:
    """megatron.core's OptimizerConfig. The learning rate is given at each step."""
    from megatron.core.optimizer import OptimizerConfig

    train, dtype = plan.train, DTYPES[plan.train.precision]
    scaler = LossScaler.of(train.precision)
    decoupled = {"decoupled_weight_decay": train.optimizer == ADAMW}
    if not any(one.name in decoupled for one in fields(OptimizerConfig)):  # before 0.15 it always was
        if train.optimizer != ADAMW:
            raise EngineError(
                f"train.optimizer={train.optimizer}: this megatron-core has {ADAMW} alone; use it, megatron-core 0.15 "
                "or newer, or engine=tdpp"
            )
        decoupled = {}
    return OptimizerConfig(
        optimizer="adam",
        **decoupled,
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad or math.inf,  # which clips nothing, and has the norm worked out
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        initial_loss_scale=scaler.scale,
        min_loss_scale=scaler.least,
        loss_scale_window=scaler.window,
        hysteresis=scaler.hysteresis,
        use_distributed_optimizer=plan.sharded_optimizer,
    )
