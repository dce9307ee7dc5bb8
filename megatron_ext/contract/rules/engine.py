"""What a plan must be for another engine than tdpp's own."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Tuple

from megatron_ext.contract.keys import shown
from megatron_ext.contract.layout import lcm
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import OPTIONS as MODEL_OPTIONS
from megatron_ext.contract.models.model import family_named
from megatron_ext.contract.plan_check import Values
from megatron_ext.contract.schedule.schedules import SCHEDULES
from megatron_ext.contract.train_config import ADAM, ADAMW, BACKOFF, OPTIONS

Faults = Iterator[Tuple[str, Any, str]]
"""Each is a key, its value and what this must be."""
TDPP, MEGATRON_CORE, MEGATRON_LM = ENGINES = ("tdpp", "megatron_core", "megatron_lm")
"""What trains."""
WITH = f"with engine={MEGATRON_CORE}"
LATENT = "multi_latent_attention"
"""Megatron-Core's option of attention with compressed queries, keys and values (DeepSeek-V2)."""
_ALIKE = {
    "tensors": f"one number {WITH}, whose stages have tensor groups of one size; engine=tdpp has one for each stage",
    "replicas": f"null {WITH}, whose stages have equal numbers of replicas; engine=tdpp has one for each stage",
    "shares": f"null {WITH}, whose replicas take equal numbers of micro-batches; engine=tdpp has shares",
    "streams": f"null {WITH}, which has one copy of the model on a GPU; engine=tdpp has several",
    "adapt": f"null {WITH}, whose batch stays as it is; engine=tdpp has batches that adapt",
    "elastic": f"null {WITH}, which needs all of its nodes; engine=tdpp goes on without one",
    "schedule_file": f"null {WITH}, which reads no schedules; engine=tdpp does",
    "hierarchical_stages": f"null {WITH}, which leaves the order of sums to NCCL; engine=tdpp sums by node",
    "zero": f"at most 1 {WITH}, where sharded_optimizer shares the optimizer's state out; engine=tdpp has more",
    "zeros": f"one number {WITH}, whose stages share out the same; engine=tdpp has one for each stage",
    "shards": f"equal {WITH}, whose replicas keep as much each; engine=tdpp has parts by memory",
    "offload": f"none {WITH}; engine=tdpp keeps the optimizer or activations in the host's memory",
    "reduce_dtype": f"fp32 {WITH}, which sums gradients in fp32; engine=tdpp sums in bf16, too",
    "islands": f"null {WITH}, whose replicas sum gradients in every iteration; engine=tdpp has islands",
    "compress": f"none {WITH}, which sends activations as they are; engine=tdpp sends them in 8 bits, too",
    "scattered_cuts": f"false {WITH}, which sends whole messages since 0.13; engine=tdpp scatters them",
    "rehearsal": f"null {WITH}; engine=tdpp has rehearsals",
}
"""What only tdpp's own engine has, and plan.json has null for it otherwise."""
_OF_TRAINING = {
    "optimizer": ((ADAMW, ADAM), f"{ADAMW} or {ADAM}"),
    "loss_scaler": ((BACKOFF,), BACKOFF),
    "compile": ((False,), "false"),
    "overlap_optimizer": ((False,), "false"),
    "ema": ((None,), "null"),
}


def _experts(plan: Values) -> Faults:
    model, core = plan["model"], plan["engine"] == MEGATRON_CORE
    experts, shared = model.get("experts"), plan.get("expert") or 1
    if experts is not None and not core:
        yield "model.experts", experts, f"null with engine={plan['engine']}; engine={MEGATRON_CORE} has experts"
    if shared > 1 and experts is None:
        yield "expert", shared, "1 without model.experts"
    for whole, name in ((plan["data"], "data"), (experts or shared, "model.experts")):
        if whole % shared:
            yield "expert", shared, f"a divisor of {name}={whole}"
    if experts is not None and model.get("experts_per_token", 2) > experts:
        yield "model.experts_per_token", model.get("experts_per_token", 2), f"at most model.experts={experts}"
    if experts is not None and plan["tensor"] > 1 and not plan["sequence_parallel"]:
        yield "sequence_parallel", False, f"true with model.experts and tensor={plan['tensor']}"


def _context(plan: Values) -> Faults:
    shared, length = plan.get("context") or 1, plan["model"].get("sequence_length")
    if shared == 1:
        return
    if plan["engine"] == "tdpp":
        yield "context", shared, f"1 with engine=tdpp; engine={MEGATRON_CORE} has ranks that share sequences"
    if plan["data"] % shared:
        yield "data", plan["data"], f"a multiple of context={shared}"
    pieces = lcm([2 * shared, shared * plan["tensor"] if plan["sequence_parallel"] else 1])
    if length is not None and length % pieces:
        near = " or ".join(str(n) for n in (length // pieces * pieces, (length // pieces + 1) * pieces) if n)
        yield (
            "model.sequence_length",
            length,
            f"a multiple of {pieces} with context={shared}, whose ranks take two pieces each; use {near}",
        )


_OWN_LAYERS = {
    **{"add_qkv_bias": False, "qk_layernorm": False, "sliding_window": None, "query_scalar": None},
    **{"attention_softcap": None, "logits_softcap": None, "post_norms": False, "scale_embedding": False},
    **{"geglu": False},
}
"""Options of layers that only tdpp's own engine computes, and their values without it."""


def only_own_layers(get: Callable[[str, Any], Any]) -> Iterator[Tuple[str, str, str]]:
    """Each option of a model that only tdpp's own engine has: its key, its value and the one without it. `get` returns
    an option's value, or its second argument."""
    for key, without in _OWN_LAYERS.items():
        if get(key, without) != without:
            yield key, shown(get(key, without)), shown(without)


def _own_layers(plan: Values) -> Faults:
    if plan["engine"] == "tdpp":
        return
    for key, value, without in only_own_layers(plan["model"].get):
        yield f"model.{key}", value, f"{without} with engine={plan['engine']}; use engine=tdpp"


def _megatron_core(plan: Values) -> Faults:
    if plan["engine"] != MEGATRON_CORE:
        return
    for key, must in _ALIKE.items():
        if plan.get(key) is not None:
            yield key, plan[key], must
    if "-" in plan.get("recompute", ""):
        yield "recompute", plan["recompute"], f"one for all stages {WITH}; engine=tdpp has one for each stage"
    family = plan.get("model", {}).get("family", DEFAULT)
    if not family_named(family).megatron_core:
        yield "model.family", family, f"gpt, bert or t5 {WITH}; engine=tdpp trains all families"
    schedule = SCHEDULES.get(plan.get("schedule", ""))
    if schedule is not None and not schedule.megatron_lm:
        known = " or ".join(name for name, one in SCHEDULES.items() if one.megatron_lm)
        yield "schedule", plan["schedule"], f"{known} {WITH}; engine=tdpp has more schedules"
    for key, (values, must) in _OF_TRAINING.items():
        given = plan.get("train", {}).get(key, OPTIONS.get(key, values[0]))
        if given not in values:
            yield f"train.{key}", given, f"{must} {WITH}; engine=tdpp has more"


def _other_families(plan: Values) -> Faults:
    """What megatron.core's BERT and T5 lack."""
    model, family = plan["model"], plan["model"].get("family", DEFAULT)
    if plan["engine"] != MEGATRON_CORE or family == DEFAULT or not family_named(family).megatron_core:
        return
    for key in ("rotary_base", "rope_scaling_factor"):
        if model.get(key, MODEL_OPTIONS[key]) != MODEL_OPTIONS[key]:
            must = f"{shown(MODEL_OPTIONS[key])} {WITH} and model.family={family}; engine=tdpp takes others"
            yield f"model.{key}", model[key], must
    if (shared := plan.get("context") or 1) > 1:
        yield "context", shared, f"1 with model.family={family}, whose tokens see those behind them, too"
    if not family_named(family).decoder:
        return
    if plan["pipeline"] != 1:
        yield "pipeline", plan["pipeline"], f"1 {WITH} and model.family={family}; engine=tdpp cuts it into stages"
    groups = model.get("num_query_groups")
    if groups not in (None, model["heads"]):
        yield "model.num_query_groups", groups, f"null {WITH} and model.family={family}; engine=tdpp takes others"


def _latent(plan: Values) -> Faults:
    """Ranks of a tensor group would each learn the rotated part of the keys from their own heads alone (0.16.1)."""
    if (plan.get("engine_options") or {}).get(LATENT) is not True:
        return
    if (family := plan["model"].get("family", DEFAULT)) != DEFAULT:
        yield "model.family", family, f"{DEFAULT} with engine.options.{LATENT}=true"
    if plan["tensor"] > 1:
        yield (
            "tensor",
            plan["tensor"],
            f"1 with engine.options.{LATENT}=true, whose tensor groups do not sum the gradients of all heads; share "
            "sequences or layers instead, with parallel.context or parallel.pipeline",
        )


def _groups(plan: Values) -> Faults:
    """Interleaved stages take micro-batches in groups of as many as there are stages."""
    if plan["engine"] != MEGATRON_CORE or plan["chunks"] == 1 or plan.get("shares"):
        return
    step = plan["data"] // (plan.get("context") or 1) * plan["micro_batch_size"] * plan["pipeline"]
    if plan["global_batch_size"] % step:
        yield (
            "global_batch_size",
            plan["global_batch_size"],
            f"a multiple of data x micro_batch_size x pipeline = {step} with chunks {WITH}; engine=tdpp takes others",
        )


RULES: List[Tuple[Tuple[str, ...], Callable[[Values], Faults]]] = [
    (("engine",), _megatron_core),
    (("engine", "model", "data", "tensor", "sequence_parallel"), _experts),
    (("engine", "model", "data", "tensor", "sequence_parallel"), _context),
    (("engine", "model"), _own_layers),
    (("engine", "model", "tensor"), _latent),
    (("engine", "model", "pipeline"), _other_families),
    (("engine", "chunks", "data", "micro_batch_size", "pipeline", "global_batch_size"), _groups),
]
