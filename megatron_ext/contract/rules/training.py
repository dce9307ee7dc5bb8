"""What a plan trains, how, and on which data; and what a rehearsed plan knows of its times."""

from __future__ import annotations

from typing import Collection, Iterator, List

from megatron_ext.contract.keys import Get, shown
from megatron_ext.contract.layout import lcm
from megatron_ext.contract.models.keys import DEFAULT, ROTARY
from megatron_ext.contract.models.model import IMAGES, OPTIONS, Family, families_with, family_named
from megatron_ext.contract.plan_check import Faults, PlanFault, Rules, Values
from megatron_ext.contract.train_config import broken_by_training


def broken_by_model(get: Get, family: Family) -> Iterator[str]:
    """Every rule that a model of this family breaks, as a message; each key alone is known to be right. `get` gives the
    value of a key of `model`, or what it is to be where there is none."""
    yield from _broken_options(get, family)
    if family.user_code:
        return
    of_family = f"model.family={family.name}"
    for key in family.needs:
        if get(key, None) is None:
            yield f"model.{key} is not set, but {of_family} needs it; give model.{key}=…"
    if family.counts_all:
        return
    if family.one_head:
        heads, layers = get("heads", 1), get("layers", family.fewest_layers)
        if heads != 1:
            yield f"model.heads={heads}: {family.one_head}; use 1"
        if layers < family.fewest_layers:
            yield f"model.layers={layers}: {family.why_layers}; use {family.fewest_layers} or more"
    yield from _broken_positions(get, family)
    yield from _broken_window(get)


def _broken_options(get: Get, family: Family) -> Iterator[str]:
    """Options that say nothing with this family."""
    of_family = f"model.family={family.name}"
    for key, default in OPTIONS.items():
        value = get(key, default)
        if value == default:
            continue
        families = families_with(key)
        if families and key not in family.options:
            *others, last = families
            whose = f"{', '.join(others)} or {last}" if others else last
            yield (
                f"model.{key}={shown(value)} is only for model.family={whose}, not for {of_family}; leave it out, or "
                f"use model.{key}={shown(default)}"
            )
        if family.one_head and key in family.without:
            yield f"model.{key}={shown(value)} is for transformers, not for {of_family}; leave it out"


def _broken_window(get: Get) -> Iterator[str]:
    every = get("full_attention_every", None)
    if every is not None and get("sliding_window", None) is None:
        yield f"model.full_attention_every={every} says nothing without model.sliding_window; set that, or leave it out"

    base = get("sliding_rotary_base", None)
    if base is not None and get("sliding_window", None) is None:
        yield f"model.sliding_rotary_base={base:g} says nothing without model.sliding_window; set that, or leave it out"
    if get("geglu", False) and not get("swiglu", False):
        yield "model.geglu=true says nothing without model.swiglu=true, the gate; set that, or leave it out"


def _broken_positions(get: Get, family: Family) -> Iterator[str]:
    key = "position_embedding_type"
    positions, width, scaling = get(key, OPTIONS[key]), get("kv_channels", None), get("rope_scaling_factor", None)
    percent = get("rotary_percent", 1.0)
    if positions not in family.positions:
        yield (
            f"model.{key}={positions} cannot be combined with model.family={family.name}; use "
            f"{' or '.join(family.positions)}"
        )
    if positions != ROTARY:
        if scaling is not None:
            yield (
                f"model.rope_scaling_factor={scaling} is only for model.{key}=rope, not for {positions}; use null, or "
                "rope"
            )
        if (base := get("sliding_rotary_base", None)) is not None:
            yield f"model.sliding_rotary_base={base:g} is only for model.{key}=rope, not for {positions}; leave it out"
        if percent != 1.0:
            yield f"model.rotary_percent={percent} is only for model.{key}=rope, not for {positions}; use 1.0, or rope"
        return
    if width is not None and width % 2:
        yield (
            f"model.kv_channels={width} is odd, but model.{key}=rope rotates pairs of numbers; use {width + 1}, or "
            "another even number"
        )
    hidden, heads = get("hidden", 0), get("heads", 1)
    if width is None and heads and not hidden % heads and hidden // heads % 2:
        yield (
            f"model.hidden={hidden} and model.heads={heads} give heads of width {hidden // heads}, but "
            f"model.{key}=rope rotates pairs of numbers; choose sizes whose ratio is even"
        )
    whole = width or (hidden // heads if heads else 0)
    rotated = int(whole * percent)
    if percent != 1.0 and whole and (rotated % 2 or not rotated):
        yield (
            f"model.rotary_percent={percent} rotates {rotated} of a head's {whole} numbers, but model.{key}=rope "
            f"rotates pairs of them; use {2 * max(1, rotated // 2) / whole:g}, or another even number of them"
        )


def _model(plan: Values) -> Faults:
    model, tensor = plan["model"], lcm(plan.get("tensors") or [plan["tensor"]])
    family = _family_of(plan)
    with_family = f"with model.family={family.name}"
    yield from map(PlanFault, broken_by_model(model.get, family))
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
    yield from map(PlanFault, broken_by_training(train.get))
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


def _of_family(plan: Values) -> Faults:
    """What only some families have."""
    family, documents = _family_of(plan), plan.get("data_documents")
    for key, given, has in (
        ("data_augment", plan.get("data_augment"), family.learns == IMAGES),
        ("data_bucketing", plan.get("data_bucketing"), family.translates),
        ("data_documents", documents, family.running_text),
        ("train.lora_rank", plan.get("train", {}).get("lora_rank"), family.adapters),
    ):
        if given is not None and not has:
            yield key, given, f"null with model.family={family.name}"
    if documents is not None and family.running_text and documents["packing"] and not family.packs:
        yield "data_documents.packing", True, f"false with model.family={family.name}"


def _family_of(plan: Values) -> Family:
    return family_named(plan["model"].get("family", DEFAULT))


def _rehearsal(plan: Values) -> Faults:
    from megatron_ext.contract.adaptive.config import NONE  # a search reads the rules of models alone

    rehearsal, adapt = plan["rehearsal"] or {}, plan.get("adapt") or {}
    if rehearsal.get("ranks") is None:
        return
    yield from _times("rehearsal.ranks", rehearsal["ranks"], plan)
    others = rehearsal.get("other_sizes") or []
    for number, other in enumerate(others):
        yield from _times(f"rehearsal.other_sizes[{number}].ranks", other["ranks"], plan)
    timed = {plan.get("micro_batch_size"), *(other["size"] for other in others)}
    lacking = {size for sizes in adapt.get("micro_batch_sizes") or () for size in sizes} - timed
    if lacking:
        yield "rehearsal.other_sizes", sorted(timed), f"with the times of micro-batches of {min(lacking)} samples"
    yield from _rehearsed_streams(plan, rehearsal.get("in_streams") or [], timed)
    samples = [point["samples"] for point in rehearsal.get("noise") or ()]
    if adapt.get("rule", NONE) != NONE and not samples:
        yield "rehearsal.noise", rehearsal.get("noise"), "given with adapt.rule"
    if samples != sorted({*samples}):
        yield "rehearsal.noise", samples, "samples in increasing order"


def _rehearsed_streams(plan: Values, timed: List[Values], sizes: Collection[int]) -> Faults:
    """Whether there are times for all streams that replicas may have, with each size of micro-batches."""
    of_replicas = (plan.get("adapt") or {}).get("streams") or ()
    counts = [*(plan.get("streams") or ()), *(one for sizes in of_replicas for of_size in sizes for one in of_size)]
    most = max(counts, default=1)
    lacking = {*sizes} - {one["size"] for one in timed}
    if most > 1 and lacking:
        yield "rehearsal.in_streams", [one["size"] for one in timed], f"with micro-batches of {min(lacking)} samples"
    for number, one in enumerate(timed):
        key = f"rehearsal.in_streams[{number}]"
        yield from _times(f"{key}.ranks", one["ranks"], plan)
        if len(one["rates"]) != len(plan["ranks"]) or min(map(len, one["rates"])) < most:
            yield f"{key}.rates", one["rates"], f"of {len(plan['ranks'])} ranks, for up to {most} streams each"
        if len(one["copy_ns"]) != len(plan["ranks"]):
            yield f"{key}.copy_ns", one["copy_ns"], f"of {len(plan['ranks'])} ranks"


def _times(key: str, times: List[Values], plan: Values) -> Faults:
    """Faults of the ranks' times."""
    count, chunks = len(plan["ranks"]), plan["chunks"]
    if len(times) != count:
        yield key, len(times), f"of {count} ranks"
    for number, of_rank in enumerate(times):
        for of_chunks in ("forward_ns", "backward_ns"):
            if len(of_rank.get(of_chunks, range(chunks))) != chunks:
                yield f"{key}[{number}].{of_chunks}", of_rank[of_chunks], f"of chunks={chunks} numbers"


RULES: Rules = [
    (("model", "tensor"), _model),
    (("train",), _train),
    (("data_split", "data_blend", "data_prefix"), _data),
    (("model", "data_prefix"), _masking),
    (("model",), _of_family),
    (("rehearsal", "ranks", "chunks"), _rehearsal),
]
