"""What a plan trains, how, and on which data."""

from __future__ import annotations

import json
import math

from megatron_ext.contract.layout import lcm
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import IMAGES, OPTIONS, Family, families_with, family_named
from megatron_ext.contract.plan_check import Faults, Rules, Values
from megatron_ext.contract.train_config import COSINE, DECAYING, EVALUATING, EXPONENTIAL, NOAM, ONLY_WITH, STEP
from megatron_ext.contract.train_config import OPTIONS as OPTIONS_OF_TRAINING


def _model(plan: Values) -> Faults:
    model, tensor = plan["model"], lcm(plan.get("tensors") or [plan["tensor"]])
    family = _family_of(plan)
    with_family = f"with model.family={family.name}"
    for key, default in OPTIONS.items():
        if key not in family.options and model.get(key, default) != default and families_with(key):
            yield f"model.{key}", model[key], f"{json.dumps(default)} {with_family}"
    if family.one_head:
        yield from _one_head(family, model)
    positions = model.get("position_embedding_type", OPTIONS["position_embedding_type"])
    if positions not in family.positions:
        yield "model.position_embedding_type", positions, f"{' or '.join(family.positions)} {with_family}"
    if family.user_code and not model.get("code"):
        yield "model.code", model.get("code"), f"FILE.py:NAME {with_family}"
    for key in family.needs:
        if model.get(key) is None:
            yield f"model.{key}", None, f"given {with_family}"
    if family.measured and tensor > 1:
        yield "tensor", tensor, f"1 {with_family}"
    fixed = not model.get("config")  # whose model says how wide its heads are
    if fixed and "heads" in model and model.get("kv_channels") is None and model.get("hidden", 0) % model["heads"]:
        yield "model.heads", model["heads"], f"a divisor of model.hidden={model['hidden']}"
    if model.get("heads", 0) % tensor:
        yield "tensor", tensor, f"a divisor of model.heads={model['heads']}"
    for key in ("sequence_length", "decoder_sequence_length"):
        if plan.get("sequence_parallel") and (model.get(key) or 0) % tensor:
            yield "tensor", tensor, f"a divisor of model.{key}={model[key]} with sequence_parallel"
    groups = model.get("num_query_groups")
    if groups and model.get("heads", 0) % groups:
        yield "model.num_query_groups", groups, f"a divisor of model.heads={model['heads']}"
    for key in ("num_query_groups", "ffn_hidden"):
        if (model.get(key) or 0) % tensor:
            yield "tensor", tensor, f"a divisor of model.{key}={model[key]}"
    padded = model.get("padded_vocab_size", 0)
    if padded and (padded < model.get("vocab_size", 0) or padded % tensor):
        yield "model.padded_vocab_size", padded, f"a multiple of tensor={tensor}, and no less than model.vocab_size"


def _one_head(family: Family, model: Values) -> Faults:
    of_family = f"with model.family={family.name}"
    for key in family.without:
        if model.get(key, OPTIONS[key]) != OPTIONS[key]:
            yield f"model.{key}", model[key], f"{json.dumps(OPTIONS[key])} {of_family}"
    if model.get("heads", 1) != 1:
        yield "model.heads", model["heads"], f"1 {of_family}"
    if model.get("layers", family.fewest_layers) < family.fewest_layers:
        yield "model.layers", model["layers"], f"at least {family.fewest_layers} {of_family}"


def _train(plan: Values) -> Faults:
    train = plan["train"]
    if {"min_lr", "lr"} <= train.keys() and train["min_lr"] > train["lr"]:
        yield "train.min_lr", train["min_lr"], f"at most train.lr={train['lr']}"
    warmup, decay = train.get("lr_warmup_iterations", 0), train.get("lr_decay_iterations", math.inf)
    policy = train.get("lr_policy", COSINE)
    if warmup >= decay and policy in DECAYING:
        yield "train.lr_warmup_iterations", warmup, f"below train.lr_decay_iterations={decay}"
    if policy in (STEP, EXPONENTIAL) and train.get("lr_step_iterations") is None:
        yield "train.lr_step_iterations", None, f"given with train.lr_policy={policy}"
    if train.get("nesterov") and train.get("momentum") == 0:
        yield "train.momentum", 0, "above 0 with train.nesterov"
    if policy == NOAM and not warmup:
        yield "train.lr_warmup_iterations", warmup, "at least 1 with train.lr_policy=noam"
    epochs, samples = train.get("epochs"), train.get("samples")
    if epochs is not None and (samples is None or samples % epochs):
        yield "train.samples", samples, f"a multiple of train.epochs={epochs}"
    if train.get("max_cost") is not None and train.get("price_per_hour") is None:
        yield "train.price_per_hour", None, "given with train.max_cost"
    if train.get("eval_interval") is None:
        for key in EVALUATING:
            if train.get(key) is not None:
                yield f"train.{key}", train[key], "null without train.eval_interval"
    for key, (decider, allowed) in ONLY_WITH.items():
        value, decided = train.get(key, OPTIONS_OF_TRAINING[key]), train.get(decider, OPTIONS_OF_TRAINING.get(decider))
        if decided not in allowed and value != OPTIONS_OF_TRAINING[key]:
            yield f"train.{key}", value, f"{json.dumps(OPTIONS_OF_TRAINING[key])} with train.{decider}={decided}"


def _data(plan: Values) -> Faults:
    split, blend, prefix = plan["data_split"], plan["data_blend"], plan["data_prefix"]
    if len(split) != 3 or not split[0]:
        yield "data_split", split, "three weights, the first above 0"
    if blend and (len(blend) < 2 or blend[0].get("prefix", prefix) != prefix):
        prefixes = [corpus.get("prefix") for corpus in blend]
        yield "data_blend", prefixes, f"empty, or two or more, data_prefix={prefix} first"


def _masking(plan: Values) -> Faults:
    family, masking = _family_of(plan), plan.get("data_masking")
    if family.masks != (masking is not None):
        yield "data_masking", masking, f"{'given' if masking is None else 'null'} with model.family={family.name}"


def _augment(plan: Values) -> Faults:
    family, augment = _family_of(plan), plan.get("data_augment")
    if family.learns != IMAGES and augment is not None:
        yield "data_augment", augment, f"null with model.family={family.name}"


def _bucketing(plan: Values) -> Faults:
    family, bucketing = _family_of(plan), plan.get("data_bucketing")
    if not family.translates and bucketing is not None:
        yield "data_bucketing", bucketing, f"null with model.family={family.name}"


def _family_of(plan: Values) -> Family:
    return family_named(plan["model"].get("family", DEFAULT))


RULES: Rules = [
    (("model", "tensor"), _model),
    (("train",), _train),
    (("data_split", "data_blend", "data_prefix"), _data),
    (("model", "data_prefix"), _masking),
    (("model", "data_prefix"), _augment),
    (("model",), _bucketing),
]
