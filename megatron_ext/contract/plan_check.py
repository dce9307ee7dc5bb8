"""What plan.json must hold (docs/formats.md): the type and range of each value, and what values have to do with others.

The keys and their types are those of the dataclasses of `megatron_ext.contract.plan`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from difflib import get_close_matches
from functools import lru_cache
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Tuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.model import (
    BERT,
    GPT,
    LAYER_NORM,
    LEARNED,
    MODULE,
    NO_POSITIONS,
    ONLY_OF,
    OPTIONS,
    RMS_NORM,
    ROTARY,
    SIZES,
    T5,
    ModelConfig,
)
from megatron_ext.contract.rank_order import stage_dp_tp

_SHOWN = 80
"""Characters of a value in a message."""


class PlanFault(EngineError):
    """A key of the plan, its value and the rule that it breaks."""


class Range(NamedTuple):
    """What a value may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _from(least: int, most: float = math.inf) -> Range:
    words = f"at least {least}" if most == math.inf else f"from {least} to {most}"
    return Range(words, lambda value: least <= value <= most)


def _one_of(*names: str) -> Range:
    return Range(f"one of {', '.join(names)}", lambda value: value in names)


_COUNT, _NOT_NEGATIVE = _from(1), _from(0)
_POSITIVE = Range("above 0", lambda value: value > 0)
_FRACTION = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
_FILE_NAME = Range("a file's name", lambda name: name not in ("", ".", "..") and not re.search(r"[/\0]", name))
_RANGES: Dict[str, Range] = {
    **dict.fromkeys(("tensor", "data", "pipeline", "chunks", "micro_batch_size", "global_batch_size"), _COUNT),
    "partition": _NOT_NEGATIVE,
    "recompute": _one_of("none", "selective", "full"),
    "schedule": _one_of("gpipe", "one_f_one_b", "interleaved", "zb_h1"),
    "schedule_file": _FILE_NAME,
    "master_port": _from(1, 65535),
    "meeting_timeout_s": _COUNT,
    "nodes.name": _FILE_NAME,
    "nodes.ranks": _NOT_NEGATIVE,
    **{f"ranks.{key}": _NOT_NEGATIVE for key in ("rank", "node", "local_rank", "stage", "dp", "tp")},
    "model.layers": _NOT_NEGATIVE,
    **{
        f"model.{key}": _COUNT
        for key in (
            *("hidden", "heads", "sequence_length", "vocab_size", "padded_vocab_size"),
            *("ffn_hidden", "num_query_groups", "kv_channels", "decoder_layers", "decoder_sequence_length"),
        )
    },
    "model.family": _one_of(GPT, BERT, T5, MODULE),
    "model.normalization": _one_of(LAYER_NORM, RMS_NORM),
    "model.position_embedding_type": _one_of(LEARNED, ROTARY, NO_POSITIONS),
    **{f"model.{key}": _POSITIVE for key in ("norm_epsilon", "rotary_base", "rope_scaling_factor")},
    **{f"model.{key}": _FRACTION for key in ("hidden_dropout", "attention_dropout")},
    **{
        f"train.{key}": _COUNT
        for key in (
            *("iterations", "lr_decay_iterations", "log_interval", "save_interval", "keep_checkpoints"),
            "comm_timeout_s",
        )
    },
    **{f"train.{key}": _NOT_NEGATIVE for key in ("min_lr", "lr_warmup_iterations", "weight_decay", "clip_grad")},
    **{f"train.{key}": _POSITIVE for key in ("lr", "adam_eps")},
    **{f"train.{key}": _FRACTION for key in ("adam_beta1", "adam_beta2")},
    "train.seed": _from(0, 2**32 - 1),
    "train.precision": _one_of("fp32", "fp16", "bf16"),
    "data_blend.weight": _POSITIVE,
    "data_split": _NOT_NEGATIVE,
    "data_masking.mask_prob": Range("above 0 and below 1", lambda value: 0 < value < 1),
    "data_masking.short_seq_prob": _from(0, 1),
    "data_masking.max_ngram": _from(1, 10**4),
    "device": _one_of("cpu", "cuda"),
    "rehearsal.clock": _one_of("virtual", "anchored"),
    "rehearsal.nodes.ranks": _NOT_NEGATIVE,
    **{
        f"rehearsal.ranks.{key}_ns": _NOT_NEGATIVE
        for key in (
            *("forward", "backward", "send_forward", "send_backward", "grads_all_reduce", "embedding_all_reduce"),
            *("optimizer", "params_all_gather"),
        )
    },
}
"""By key, without the places in lists."""


def check_object(kind: Any, value: Any, key: str, whole: bool) -> None:
    """Checks a JSON object against a dataclass; with `whole` it has every key and no other.

    Raises:
        PlanFault: it does not fit.
    """
    if not isinstance(value, dict):
        raise _fault(key or "the plan", value, "a JSON object")
    hints = _hints(kind)
    for name in value if whole else ():
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(hints)}"
            raise PlanFault(f"{_joined(key, name)}={_shown(value[name])} is not a key of a plan; {meant}")
    if whole:
        lacking = SIZES if kind is ModelConfig and value.get("family") == MODULE else ()
        require(value, (name for name in hints if not _may_lack(kind, name) and name not in lacking), key)
    for name, hint in hints.items():
        if name in value:
            _check(hint, value[name], _joined(key, name), whole)


def require(value: Mapping[str, Any], keys: Iterable[str], key: str) -> None:
    """Raises PlanFault if the object under `key` lacks one of `keys`."""
    for name in keys:
        if name not in value:
            raise PlanFault(f"{_joined(key, name)} is missing")


@lru_cache(maxsize=None)
def _hints(kind: Any) -> Dict[str, Any]:
    return get_type_hints(kind)


def _check(hint: Any, value: Any, key: str, whole: bool) -> None:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Union:  # Optional
        if value is not None:
            _check(inner[0], value, key, whole)
    elif dataclasses.is_dataclass(hint):
        check_object(hint, value, key, whole)
    elif origin is list:
        if not isinstance(value, list):
            raise _fault(key, value, "a list")
        for number, item in enumerate(value):
            _check(inner[0], item, f"{key}[{number}]", whole)
    elif origin is dict:
        if not isinstance(value, dict):
            raise _fault(key, value, "a JSON object")
        for name, item in value.items():
            _check(inner[1], item, _joined(key, name), whole)
    else:
        for allowed in (_SCALARS[hint], _RANGES.get(re.sub(r"\[\d+\]", "", key))):
            # Whoever shows a plan shows any name; a rank names files by it.
            if allowed is not None and (whole or allowed is not _FILE_NAME) and not allowed.holds(value):
                raise _fault(key, value, allowed.words)


_SCALARS: Dict[Any, Range] = {
    bool: Range("true or false", lambda value: isinstance(value, bool)),
    int: Range("a whole number", lambda value: type(value) is int and abs(value) < 2**63),
    float: Range("a number", lambda value: type(value) in (int, float) and abs(value) < 1e300),  # nor is NaN
    str: Range("a text", lambda value: isinstance(value, str)),
    object: Range("a number, a text, true or false", lambda value: isinstance(value, (bool, int, float, str))),
}


def build(hint: Any, value: Any) -> Any:
    """What was checked, as the dataclasses that it describes; what a plan of another version lacks is empty,
    or has its default."""
    origin, inner = get_origin(hint), get_args(hint)
    if value is not None and origin is Union:
        return build(inner[0], value)
    if origin is list:
        return [build(inner[0], item) for item in value]
    if dataclasses.is_dataclass(hint):
        hints = _hints(hint)  # type: ignore[arg-type]
        return hint(  # type: ignore[operator]
            **{
                field.name: build(hints[field.name], value[field.name])
                if field.name in value
                else _absent(field.name, hints[field.name])
                for field in dataclasses.fields(hint)
                if field.name in value or not _has_default(hint, field.name)
            }
        )
    return value


def _may_lack(kind: Any, name: str) -> bool:
    """Whether a plan may lack a key: what is of other families than GPT-2, or of its options, is not written."""
    return name == "data_masking" or _has_default(kind, name)


def _has_default(kind: Any, name: str) -> bool:
    return kind is ModelConfig and name in OPTIONS


_BEFORE = {"chunks": 1, "recompute": "none", "precision": "fp32"}
"""What runs did before there was a key for it."""


def _absent(name: str, hint: Any) -> Any:
    if name in _BEFORE or get_origin(hint) is Union:
        return _BEFORE.get(name)
    return build(hint, {}) if dataclasses.is_dataclass(hint) else (get_origin(hint) or hint)()


Values = Mapping[str, Any]


def check_rules(plan: Values) -> None:
    """Checks what values have to do with each other, as far as they are there; each alone is known to be right.

    Raises:
        PlanFault: a rule does not hold.
    """
    for keys, rule in _RULES:
        if all(key in plan for key in keys):
            for key, value, must in rule(plan):
                raise _fault(key, value, must)


Faults = Iterator[Tuple[str, Any, str]]
"""Keys, their values and what these must be."""


def _partition(plan: Values) -> Faults:
    parts, pipeline, chunks = plan["partition"], plan["pipeline"], plan["chunks"]
    if len(parts) != pipeline * chunks:
        yield "partition", parts, f"of pipeline * chunks = {pipeline} * {chunks} = {pipeline * chunks} numbers"
    model = plan["model"]
    layers = model.get("layers", sum(parts))
    words = f"model.layers={layers}"
    if model.get("family", GPT) == T5 and "layers" in model:
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
    step = plan["data"] * plan["micro_batch_size"]
    if plan["global_batch_size"] % step:
        what = f"data * micro_batch_size = {plan['data']} * {plan['micro_batch_size']} = {step}"
        yield "global_batch_size", plan["global_batch_size"], f"a multiple of {what}"


def _ranks(plan: Values) -> Faults:
    tensor, data, pipeline = plan["tensor"], plan["data"], plan["pipeline"]
    count, ranks = tensor * data * pipeline, plan["ranks"]
    if len(ranks) != count:
        numbers = [place.get("rank") for place in ranks]
        yield "ranks", numbers, f"tensor * data * pipeline = {tensor} * {data} * {pipeline} = {count}, 0 to {count - 1}"
    for number, place in enumerate(ranks):
        own = {"rank": number, **dict(zip(("stage", "dp", "tp"), stage_dp_tp(number, tensor, data)))}
        for key, wanted in own.items():
            if place.get(key, wanted) != wanted:
                yield f"ranks[{number}].{key}", place[key], f"{wanted}: rank = (stage * data + dp) * tensor + tp"


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
    model, tensor = plan["model"], plan["tensor"]
    family = model.get("family", GPT)
    for key, families in ONLY_OF.items():
        if family not in families and model.get(key, OPTIONS[key]) != OPTIONS[key]:
            yield f"model.{key}", model[key], f"{json.dumps(OPTIONS[key])} with model.family={family}"
    if family == MODULE:
        if not model.get("code"):
            yield "model.code", model.get("code"), "FILE.py:NAME with model.family=module"
        if tensor > 1:
            yield "tensor", tensor, "1 with model.family=module"
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


def _train(plan: Values) -> Faults:
    train = plan["train"]
    if {"min_lr", "lr"} <= train.keys() and train["min_lr"] > train["lr"]:
        yield "train.min_lr", train["min_lr"], f"at most train.lr={train['lr']}"
    warmup, decay = train.get("lr_warmup_iterations", 0), train.get("lr_decay_iterations", math.inf)
    if warmup >= decay:
        yield "train.lr_warmup_iterations", warmup, f"below train.lr_decay_iterations={decay}"


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


def _rehearsal(plan: Values) -> Faults:
    rehearsal, ranks, chunks = plan["rehearsal"], plan["ranks"], plan["chunks"]
    times = (rehearsal or {}).get("ranks")
    if times is None:
        return
    if len(times) != len(ranks):
        yield "rehearsal.ranks", len(times), f"of {len(ranks)} ranks"
    for number, of_rank in enumerate(times):
        for key in ("forward_ns", "backward_ns"):
            if len(of_rank.get(key, range(chunks))) != chunks:
                yield f"rehearsal.ranks[{number}].{key}", of_rank[key], f"of chunks={chunks} numbers"


_GRID = ("tensor", "data", "pipeline")
_RULES: List[Tuple[Tuple[str, ...], Callable[[Values], Faults]]] = [
    (("partition", "pipeline", "chunks", "model"), _partition),
    (("schedule", "schedule_file", "chunks", "pipeline"), _schedule),
    (("data", "micro_batch_size", "global_batch_size"), _batch),
    ((*_GRID, "ranks"), _ranks),
    (("nodes", "ranks"), _nodes),
    (("model", "tensor"), _model),
    (("train",), _train),
    (("data_split", "data_blend", "data_prefix"), _data),
    (("model", "data_prefix"), _masking),
    (("rehearsal", "ranks", "chunks"), _rehearsal),
]
"""By the keys that they need."""


def _fault(key: str, value: Any, must: str) -> PlanFault:
    return PlanFault(f"{key}={_shown(value)} must be {must}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
