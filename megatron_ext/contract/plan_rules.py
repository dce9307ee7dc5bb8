"""What the values of plan.json have to do with each other; `plan_check` looks at each alone."""

from __future__ import annotations

import json
import math
from typing import Any, Callable, Collection, Iterator, List, Mapping, Tuple

from megatron_ext.contract.adaptive.config import ADAPTS, NONE
from megatron_ext.contract.adaptive.rules import Rungs
from megatron_ext.contract.layout import Layout, lcm
from megatron_ext.contract.models.model import (
    BERT,
    GPT,
    IMAGES,
    MEASURED,
    MODULE,
    OF_TRANSFORMERS,
    ONLY_OF,
    OPTIONS,
    PAIRED,
    POSITIONS,
    POSITIONS_OF,
    RECURRENT,
    S2VT,
    T5,
    TRANSLATION,
    needed,
)
from megatron_ext.contract.plan_check import fault
from megatron_ext.contract.schedule.streams import PIPEDREAM
from megatron_ext.contract.train_config import COSINE, DECAYING, EVALUATING, EXPONENTIAL, NOAM, ONLY_WITH, STEP
from megatron_ext.contract.train_config import OPTIONS as OPTIONS_OF_TRAINING

Values = Mapping[str, Any]
Faults = Iterator[Tuple[str, Any, str]]
"""Keys, their values and what these must be."""


def check_rules(plan: Values) -> None:
    """Checks what values have to do with each other, as far as they are there; each alone is known to be right.

    Raises:
        PlanFault: a rule does not hold.
    """
    for keys, rule in _RULES:
        if all(key in plan for key in keys):
            for key, value, must in rule(plan):
                raise fault(key, value, must)


def _partition(plan: Values) -> Faults:
    parts, pipeline, chunks = plan["partition"], plan["pipeline"], plan["chunks"]
    if len(parts) != pipeline * chunks:
        yield "partition", parts, f"of pipeline * chunks = {pipeline} * {chunks} = {pipeline * chunks} numbers"
    model = plan["model"]
    layers = model.get("layers", sum(parts))
    words = f"model.layers={layers}"
    if model.get("family", GPT) in PAIRED and "layers" in model:
        decoder = layers if model.get("decoder_layers") is None else model["decoder_layers"]
        words = f"{words} + model.decoder_layers={decoder} = {layers + decoder}"
        layers += decoder
    if sum(parts) != layers:
        yield "partition", parts, f"of numbers that add up to {words}, not to {sum(parts)}"


def _schedule(plan: Values) -> Faults:
    interleaved, chunks = plan["schedule"] == "interleaved", plan["chunks"]
    if plan["schedule_file"] is None and interleaved != (chunks > 1):
        yield "chunks", chunks, f"{'at least 2' if interleaved else '1'} with schedule={plan['schedule']}"
    if chunks > 1 and plan["pipeline"] == 1:
        yield "chunks", chunks, "1 with pipeline=1"


def _batch(plan: Values) -> Faults:
    streams = plan.get("streaming") is not None
    if plan.get("replicas") is not None or streams:
        if plan["global_batch_size"] % plan["micro_batch_size"]:
            yield (
                "global_batch_size",
                plan["global_batch_size"],
                f"a multiple of micro_batch_size={plan['micro_batch_size']}",
            )
        elif plan["global_batch_size"] // plan["micro_batch_size"] < plan["data"] and not streams:
            yield (
                "global_batch_size",
                plan["global_batch_size"],
                f"at least one micro-batch for each of {plan['data']} replicas",
            )
        return
    if plan.get("shares") is not None:
        return
    step = plan["data"] * plan["micro_batch_size"]
    if plan["global_batch_size"] % step:
        what = f"data * micro_batch_size = {plan['data']} * {plan['micro_batch_size']} = {step}"
        yield "global_batch_size", plan["global_batch_size"], f"a multiple of {what}"


def _streams(plan: Values) -> Faults:
    streams, data = plan["streams"], plan["data"]
    if streams is not None and len(streams) != data:
        yield "streams", streams, f"of data={data} numbers"
    if streams is not None and (plan["tensor"], plan["pipeline"]) != (1, 1):
        yield "streams", streams, "null with several stages or a tensor group"


def _shares(plan: Values) -> Faults:
    shares, data, size, batch = (plan[key] for key in ("shares", "data", "micro_batch_size", "global_batch_size"))
    if shares is None:
        return
    if len(shares) != data:
        yield "shares", shares, f"of data={data} numbers"
    if sum(shares) * size != batch:
        yield "shares", shares, f"micro-batches of {size} that together are global_batch_size={batch} samples"
    if plan.get("schedule_file") is not None:
        yield "shares", shares, "null with schedule_file, which is for one number of micro-batches"


def _by_stage(plan: Values) -> Faults:
    for key, largest in (("tensors", "tensor"), ("replicas", "data")):
        sizes = plan.get(key)
        if sizes is None:
            continue
        if len(sizes) != plan["pipeline"]:
            yield key, sizes, f"of pipeline={plan['pipeline']} numbers"
        elif len(set(sizes)) == 1:
            yield key, sizes, f"null where all stages are alike, with {largest}={sizes[0]}"
        elif max(sizes) != plan[largest]:
            yield largest, plan[largest], f"the largest of {key}={sizes}"
    if plan.get("replicas") is None:
        return
    for key, allowed in (("shares", None), ("schedule_file", None), ("chunks", 1)):
        if plan.get(key, allowed) != allowed:
            yield key, plan[key], f"{json.dumps(allowed)} where stages have different numbers of replicas"


def _streaming(plan: Values) -> Faults:
    streaming = plan.get("streaming")
    if (plan["schedule"] == PIPEDREAM and plan["schedule_file"] is None) != (streaming is not None):
        yield "streaming", streaming, f"{'given' if streaming is None else 'null'} with schedule={plan['schedule']}"
    if streaming is None:
        return
    for key, allowed in (("shares", None), ("chunks", 1), ("sharded_optimizer", False)):
        if plan.get(key, allowed) != allowed:
            yield key, plan[key], f"{json.dumps(allowed)} with schedule={PIPEDREAM}"
    if plan["tensor"] > 1 and plan.get("replicas") is not None:
        yield "tensor", plan["tensor"], f"1 with schedule={PIPEDREAM} and different numbers of replicas"
    depth = streaming.get("depth")
    if depth is not None and len(depth) != plan["pipeline"]:
        yield "streaming.depth", depth, f"of pipeline={plan['pipeline']} numbers"


def _adapt(plan: Values) -> Faults:
    adapt = plan.get("adapt")
    if adapt is None:
        return
    with_adapt = "with adapt"
    if plan["schedule"] not in ADAPTS or plan.get("schedule_file") is not None:
        yield "schedule", plan["schedule"], f"one of {', '.join(ADAPTS)} {with_adapt}"
    if plan.get("replicas") is not None:
        yield "replicas", plan["replicas"], f"null {with_adapt}"
    yield from _micro_batch_sizes(plan, adapt)
    yield from _numbers_of_streams(plan, adapt)
    if adapt.get("rule", NONE) == NONE:
        return
    if plan["train"].get("samples") is None:
        yield "train.samples", None, f"given {with_adapt}.rule"
    if plan["global_batch_size"] < 2 * plan["micro_batch_size"]:
        yield "global_batch_size", plan["global_batch_size"], f"of at least two micro-batches {with_adapt}.rule"
    try:
        Rungs.between(adapt["lower"], adapt["upper"], plan["micro_batch_size"], plan["data"])
    except ValueError as error:
        yield "adapt.upper", adapt["upper"], f"larger: {error}"


def _micro_batch_sizes(plan: Values, adapt: Values) -> Faults:
    key, sizes, size = "adapt.micro_batch_sizes", adapt.get("micro_batch_sizes"), plan["micro_batch_size"]
    if sizes is None:
        return
    if len(sizes) != plan["data"]:
        yield key, sizes, f"of data={plan['data']} lists"
    if any(size not in of_replica or any(one % size for one in of_replica) for of_replica in sizes):
        yield key, sizes, f"lists of micro_batch_size={size} and multiples of it"
    if not adapt.get("rebalance"):
        yield key, sizes, "null without adapt.rebalance"


def _numbers_of_streams(plan: Values, adapt: Values) -> Faults:
    key, counts = "adapt.streams", adapt.get("streams")
    if counts is None:
        return
    sizes = adapt.get("micro_batch_sizes") or [[plan["micro_batch_size"]]] * plan["data"]
    if [len(of_replica) for of_replica in counts] != [len(of_replica) for of_replica in sizes]:
        yield key, counts, "a list of numbers for each replica and size of its micro-batches"
    if not adapt.get("rebalance"):
        yield key, counts, "null without adapt.rebalance"
    if (plan["tensor"], plan["pipeline"]) != (1, 1):
        yield key, counts, "null with several stages or a tensor group"


def _elastic(plan: Values) -> Faults:
    elastic, nodes = plan.get("elastic"), len(plan["nodes"])
    if elastic is None:
        return
    ranks = elastic.get("ranks", [1] * nodes)
    if len(ranks) != nodes:
        yield "elastic.ranks", ranks, f"of {nodes} numbers, one for each node"
    replicas = sum(count // plan["tensor"] for count in ranks)
    for key in ("weights", "streams", "micro_batch_sizes", "numbers_of_streams", "times"):
        if elastic.get(key) is not None and len(elastic[key]) != replicas:
            yield f"elastic.{key}", elastic[key], f"of length {replicas}, one entry for each replica of all nodes"
    if plan["pipeline"] > 1:
        yield "pipeline", plan["pipeline"], "1 with elastic"


def _ranks(plan: Values) -> Faults:
    grid = Layout.grid(*(plan[key] for key in _GRID))
    layout = Layout(tuple(plan.get("tensors") or grid.tensors), tuple(plan.get("replicas") or grid.replicas))
    ranks, count = plan["ranks"], layout.world_size
    sizes = f"tensor * data * pipeline = {plan['tensor']} * {plan['data']} * {plan['pipeline']}"
    order = "rank = (stage * data + dp) * tensor + tp"
    if layout != grid:
        sizes, order = "the sum over stages of tensor size * replicas", "its place, stage by stage"
    if len(ranks) != count:
        yield "ranks", [place.get("rank") for place in ranks], f"{sizes} = {count}, 0 to {count - 1}"
    for number, place in enumerate(ranks):
        own = {"rank": number, **dict(zip(("stage", "dp", "tp"), layout.stage_dp_tp(number)))}
        for key, wanted in own.items():
            if place.get(key, wanted) != wanted:
                yield f"ranks[{number}].{key}", place[key], f"{wanted}: {order}"


def _nodes(plan: Values) -> Faults:
    nodes, ranks = plan["nodes"], plan["ranks"]
    names = [node.get("name", number) for number, node in enumerate(nodes)]
    if len(set(names)) < len(names):
        yield "nodes", names, "of different names"
    held = [rank for node in nodes for rank in node.get("ranks", ())]
    if all("ranks" in node for node in nodes) and sorted(held) != list(range(len(ranks))):
        yield "nodes", [node["ranks"] for node in nodes], f"given each of the ranks 0 to {len(ranks) - 1} once"
    for number, place in enumerate(ranks):
        node, local = place.get("node"), place.get("local_rank")
        if node is None:
            continue
        if node >= len(nodes):
            yield f"ranks[{number}].node", node, f"below {len(nodes)}, the number of nodes"
        if local is not None and nodes[node].get("ranks", [])[local : local + 1] not in ([], [number]):
            yield f"ranks[{number}].local_rank", local, f"its place in nodes[{node}].ranks={nodes[node]['ranks']}"


def _model(plan: Values) -> Faults:
    model, tensor = plan["model"], lcm(plan.get("tensors") or [plan["tensor"]])
    family = model.get("family", GPT)
    for key, families in ONLY_OF.items():
        if family not in families and model.get(key, OPTIONS[key]) != OPTIONS[key]:
            yield f"model.{key}", model[key], f"{json.dumps(OPTIONS[key])} with model.family={family}"
    if family in RECURRENT:
        yield from _recurrent(family, model)
    positions = model.get("position_embedding_type", OPTIONS["position_embedding_type"])
    if positions not in (allowed := POSITIONS_OF.get(family, POSITIONS)):
        yield "model.position_embedding_type", positions, f"{' or '.join(allowed)} with model.family={family}"
    if family == MODULE and not model.get("code"):
        yield "model.code", model.get("code"), "FILE.py:NAME with model.family=module"
    for key in needed(family):
        if model.get(key) is None:
            yield f"model.{key}", None, f"given with model.family={family}"
    if family in MEASURED and tensor > 1:
        yield "tensor", tensor, f"1 with model.family={family}"
    if "heads" in model and model.get("kv_channels") is None and model.get("hidden", 0) % model["heads"]:
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


def _recurrent(family: str, model: Values) -> Faults:
    of_family = f"with model.family={family}"
    for key in OF_TRANSFORMERS:
        if model.get(key, OPTIONS[key]) != OPTIONS[key]:
            yield f"model.{key}", model[key], f"{json.dumps(OPTIONS[key])} {of_family}"
    if model.get("heads", 1) != 1:
        yield "model.heads", model["heads"], f"1 {of_family}"
    if model.get("layers", 2) < 2 and family != S2VT:
        yield "model.layers", model["layers"], f"at least 2 {of_family}"


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
    family, masking = plan["model"].get("family", GPT), plan.get("data_masking")
    if (family in (BERT, T5)) != (masking is not None):
        yield "data_masking", masking, f"{'given' if masking is None else 'null'} with model.family={family}"


def _augment(plan: Values) -> Faults:
    family, augment = plan["model"].get("family", GPT), plan.get("data_augment")
    if family not in IMAGES and augment is not None:
        yield "data_augment", augment, f"null with model.family={family}"


def _bucketing(plan: Values) -> Faults:
    family, bucketing = plan["model"].get("family", GPT), plan.get("data_bucketing")
    if family not in TRANSLATION and bucketing is not None:
        yield "data_bucketing", bucketing, f"null with model.family={family}"


def _rehearsal(plan: Values) -> Faults:
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
    """By rank."""
    count, chunks = len(plan["ranks"]), plan["chunks"]
    if len(times) != count:
        yield key, len(times), f"of {count} ranks"
    for number, of_rank in enumerate(times):
        for of_chunks in ("forward_ns", "backward_ns"):
            if len(of_rank.get(of_chunks, range(chunks))) != chunks:
                yield f"{key}[{number}].{of_chunks}", of_rank[of_chunks], f"of chunks={chunks} numbers"


def _blocks(plan: Values) -> Faults:
    blocks = plan.get("blocks")
    if blocks is not None and len(blocks) != sum(plan["partition"]):
        yield "blocks", blocks, f"{sum(plan['partition'])} names, as many as partition has blocks"


_GRID = ("tensor", "data", "pipeline")
_RULES: List[Tuple[Tuple[str, ...], Callable[[Values], Faults]]] = [
    (("partition", "pipeline", "chunks", "model"), _partition),
    (("schedule", "schedule_file", "chunks", "pipeline"), _schedule),
    (("data", "micro_batch_size", "global_batch_size"), _batch),
    (("streams", "data", "tensor", "pipeline"), _streams),
    (("shares", "data", "micro_batch_size", "global_batch_size"), _shares),
    (_GRID, _by_stage),
    ((*_GRID, "schedule", "schedule_file", "train"), _streaming),
    ((*_GRID, "micro_batch_size", "global_batch_size", "schedule", "train"), _adapt),
    (("nodes", "pipeline", "tensor"), _elastic),
    ((*_GRID, "ranks"), _ranks),
    (("nodes", "ranks"), _nodes),
    (("model", "tensor"), _model),
    (("partition",), _blocks),
    (("train",), _train),
    (("data_split", "data_blend", "data_prefix"), _data),
    (("model", "data_prefix"), _masking),
    (("model", "data_prefix"), _augment),
    (("model",), _bucketing),
    (("rehearsal", "ranks", "chunks"), _rehearsal),
]
"""By the keys that they need."""
