"""What a plan trains, how, and on which data."""

from __future__ import annotations

from megatron_ext.contract.layout import lcm
from megatron_ext.contract.models.keys import DEFAULT
from megatron_ext.contract.models.model import IMAGES, Family, family_named
from megatron_ext.contract.models.rules import broken_by_model
from megatron_ext.contract.plan_check import Faults, PlanFault, Rules, Values
from megatron_ext.contract.train_config import broken_by_training


def _model(plan: Values) -> Faults:
    model, tensor = plan["model"], lcm(plan.get("tensors") or [plan["tensor"]])
    family = _family_of(plan)
    with_family = f"with model.family={family.name}"
    for broken in broken_by_model(model.get, family):
        yield PlanFault(broken)
    if family.user_code and not model.get("code"):
        yield "model.code", model.get("code"), f"FILE.py:NAME {with_family}"
    if family.measured and not family.shares_layers and tensor > 1:
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


def _train(plan: Values) -> Faults:
    train = plan["train"]
    for broken in broken_by_training(train.get):
        yield PlanFault(broken)
    if train.get("epochs") is not None and train.get("samples") is None:
        yield "train.samples", None, f"a multiple of train.epochs={train['epochs']}"
    if train.get("max_cost") is not None and train.get("price_per_hour") is None:
        yield "train.price_per_hour", None, "given with train.max_cost"


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


def _documents(plan: Values) -> Faults:
    family, documents = _family_of(plan), plan.get("data_documents")
    if documents is None:
        return
    if not family.running_text:
        yield "data_documents", documents, f"null with model.family={family.name}"
    elif documents["packing"] and not family.packs:
        yield "data_documents.packing", True, f"false with model.family={family.name}"


def _adapters(plan: Values) -> Faults:
    family, rank = _family_of(plan), plan["train"].get("lora_rank")
    if rank is not None and not family.adapters:
        yield "train.lora_rank", rank, f"null with model.family={family.name}"


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
    (("model",), _documents),
    (("model", "train"), _adapters),
]
