"""What plan.json must hold (docs/formats.md): its keys, and the type and range of each value.

The keys and their types are those of the dataclasses of `megatron_ext.contract.plan` and `plan_parts`.
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
    Mapping,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from megatron_ext.contract.adaptive.config import ADAPT_OPTIONS, LR_SCALINGS, RULES, AdaptConfig
from megatron_ext.contract.adaptive.forecast import GOALS
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.goal import Best, Target
from megatron_ext.contract.models.model import (
    AWD_LM,
    BERT,
    DEPTHS,
    GPT,
    IMAGES,
    LAYER_NORM,
    MODULE,
    OF_TRAINING,
    OPTIONS,
    POSITIONS,
    RMS_NORM,
    S2VT,
    SINUSOIDAL,
    T5,
    TRANSLATION,
    ModelConfig,
    lacking,
)
from megatron_ext.contract.plan_parts import ELASTIC_OPTIONS, Elastic, RehearsalConfig
from megatron_ext.contract.schedule.schedules import NAMES
from megatron_ext.contract.schedule.streams import PIPEDREAM, SEMANTICS
from megatron_ext.contract.train_config import LOSS_SCALERS, LR_POLICIES, OPTIMIZERS, TrainConfig
from megatron_ext.contract.train_config import OPTIONS as TRAIN_OPTIONS

MAY_LACK = (
    *(
        "shares",
        "streams",
        "tensors",
        "replicas",
        "streaming",
        "adapt",
        "elastic",
        "blocks",
        "data_masking",
        "data_augment",
        "data_bucketing",
        "trace_iteration",
    ),
)
"""Keys of a plan that are left out where they are null."""
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


def _parsed_by(parse: Callable[[str], object]) -> Range:
    def holds(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    try:
        parse("")
    except ValueError as rule:
        return Range(str(rule), holds)
    raise AssertionError("an empty text is not allowed")


_COUNT, _NOT_NEGATIVE = _from(1), _from(0)
_POSITIVE = Range("above 0", lambda value: value > 0)
_FRACTION = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
_FILE_NAME = Range("a file's name", lambda name: name not in ("", ".", "..") and not re.search(r"[/\0]", name))
_RANGES: Dict[str, Range] = {
    **dict.fromkeys(("tensor", "data", "pipeline", "chunks", "micro_batch_size", "global_batch_size"), _COUNT),
    "partition": _NOT_NEGATIVE,
    "recompute": _one_of("none", "selective", "full"),
    "schedule": _one_of(*NAMES, PIPEDREAM),
    "streaming.semantics": _one_of(*SEMANTICS),
    "streaming.update_every": _COUNT,
    "streaming.depth": _NOT_NEGATIVE,
    "schedule_file": _FILE_NAME,
    **dict.fromkeys(("shares", "streams", "tensors", "replicas"), _COUNT),
    "adapt.rule": _one_of(*RULES),
    "adapt.lr_scaling": _one_of(*LR_SCALINGS),
    **dict.fromkeys(("adapt.target", "adapt.rate"), Range("above 0 and below 1", lambda value: 0 < value < 1)),
    **{f"adapt.{key}": _COUNT for key in ("lower", "upper", "every", "smoothing", "micro_batch_sizes", "streams")},
    "elastic.min_nodes": _COUNT,
    "elastic.ranks": _COUNT,
    "elastic.weights": _POSITIVE,
    "elastic.prices": _NOT_NEGATIVE,
    **{f"elastic.{key}": _COUNT for key in ("streams", "micro_batch_sizes", "numbers_of_streams")},
    **{f"elastic.times.{key}": _COUNT for key in ("size", "streams")},
    "elastic.times.seconds": _POSITIVE,
    "elastic.choosing.by": _one_of(*GOALS),
    "elastic.choosing.epoch": _POSITIVE,
    "elastic.choosing.restart_s": _NOT_NEGATIVE,
    "elastic.choosing.micro_batch_s": _POSITIVE,
    "elastic.choosing.candidates.rest_s": _NOT_NEGATIVE,
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
            *("image_size", "channels", "classes", "patch_size", "width", "embedding_width", "features"),
        )
    },
    "model.family": _one_of(GPT, BERT, T5, *TRANSLATION, AWD_LM, S2VT, MODULE, *IMAGES),
    "model.normalization": _one_of(LAYER_NORM, RMS_NORM),
    "model.position_embedding_type": _one_of(*POSITIONS, SINUSOIDAL),
    **{f"model.{key}": _POSITIVE for key in ("norm_epsilon", "rotary_base", "rope_scaling_factor")},
    **{f"model.{key}": _FRACTION for key in OF_TRAINING},
    "model.depths": Range("numbers of blocks, such as 3-4-6-3", lambda text: bool(re.fullmatch(DEPTHS, text))),
    **{
        f"train.{key}": _COUNT
        for key in (
            *("iterations", "lr_decay_iterations", "log_interval", "save_interval", "keep_checkpoints"),
            *("comm_timeout_s", "lr_step_iterations", "eval_interval", "eval_iterations", "epochs", "samples"),
        )
    },
    **{
        f"train.{key}": _NOT_NEGATIVE
        for key in ("min_lr", "lr_warmup_iterations", "weight_decay", "clip_grad", "price_per_hour")
    },
    **{f"train.{key}": _POSITIVE for key in ("lr", "adam_eps", "lr_gamma", "lr_power", "max_cost")},
    **{f"train.{key}": _FRACTION for key in ("adam_beta1", "adam_beta2", "momentum")},
    "train.optimizer": _one_of(*OPTIMIZERS),
    "train.lr_policy": _one_of(*LR_POLICIES),
    "train.loss_scaler": _one_of(*LOSS_SCALERS),
    "train.ema": Range("above 0 and below 1", lambda value: 0 < value < 1),
    "train.until": _parsed_by(Target.parse),
    "train.best": _parsed_by(Best.parse),
    "train.seed": _from(0, 2**32 - 1),
    "train.precision": _one_of("fp32", "fp16", "bf16"),
    "data_blend.weight": _POSITIVE,
    "data_split": _NOT_NEGATIVE,
    "data_masking.mask_prob": Range("above 0 and below 1", lambda value: 0 < value < 1),
    "data_masking.short_seq_prob": _from(0, 1),
    "data_masking.max_ngram": _from(1, 10**4),
    "data_bucketing": _COUNT,
    "trace_iteration": _COUNT,
    **{f"data_augment.{key}": _NOT_NEGATIVE for key in ("padding", "rand_augment", "mixup", "cutmix")},
    "data_augment.rand_augment_magnitude": _from(0, 10),
    "data_augment.erasing": _from(0, 1),
    "device": _one_of("cpu", "cuda"),
    "rehearsal.clock": _one_of("virtual", "anchored"),
    "rehearsal.nodes.ranks": _NOT_NEGATIVE,
    "rehearsal.other_sizes.size": _COUNT,
    "rehearsal.in_streams.size": _COUNT,
    "rehearsal.in_streams.rates": _POSITIVE,
    "rehearsal.in_streams.copy_ns": _NOT_NEGATIVE,
    "rehearsal.noise.samples": _NOT_NEGATIVE,
    "rehearsal.noise.scale": Range("above 0", lambda value: value > 0),
    **{
        f"rehearsal.{of}.{key}_ns": _NOT_NEGATIVE
        for of in ("ranks", "other_sizes.ranks", "in_streams.ranks")
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
        raise fault(key or "the plan", value, "a JSON object")
    hints = _hints(kind)
    for name in value if whole else ():
        if name not in hints:
            near = get_close_matches(name, hints, 1)
            meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(hints)}"
            raise PlanFault(f"{_joined(key, name)}={_shown(value[name])} is not a key of a plan; {meant}")
    if whole:
        without = lacking(str(value.get("family", GPT))) if kind is ModelConfig else ()
        require(value, (name for name in hints if not _may_lack(kind, name) and name not in without), key)
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
            raise fault(key, value, "a list")
        for number, item in enumerate(value):
            _check(inner[0], item, f"{key}[{number}]", whole)
    elif origin is dict:
        if not isinstance(value, dict):
            raise fault(key, value, "a JSON object")
        for name, item in value.items():
            _check(inner[1], item, _joined(key, name), whole)
    else:
        for allowed in (_SCALARS[hint], _RANGES.get(re.sub(r"\[\d+\]", "", key))):
            # Whoever shows a plan shows any name; a rank names files by it.
            if allowed is not None and (whole or allowed is not _FILE_NAME) and not allowed.holds(value):
                raise fault(key, value, allowed.words)


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
    return name in MAY_LACK or _has_default(kind, name)


def _has_default(kind: Any, name: str) -> bool:
    return name in _OPTIONS.get(kind, ())


_OPTIONS: Mapping[Any, Mapping[str, Any]] = {
    ModelConfig: OPTIONS,
    TrainConfig: TRAIN_OPTIONS,
    AdaptConfig: ADAPT_OPTIONS,
    Elastic: ELASTIC_OPTIONS,
    RehearsalConfig: {"other_sizes": None, "noise": None, "in_streams": None},
}
_BEFORE = {"chunks": 1, "recompute": "none", "precision": "fp32"}
"""What runs did before there was a key for it."""


def _absent(name: str, hint: Any) -> Any:
    if name in _BEFORE or get_origin(hint) is Union:
        return _BEFORE.get(name)
    return build(hint, {}) if dataclasses.is_dataclass(hint) else (get_origin(hint) or hint)()


def fault(key: str, value: Any, must: str) -> PlanFault:
    """`must` is what the value must be."""
    return PlanFault(f"{key}={_shown(value)} must be {must}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
