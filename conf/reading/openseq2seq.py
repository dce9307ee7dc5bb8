"""A configuration of OpenSeq2Seq (`openseq2seq=transformer-base.py`) as words of the command line.

It is read, not run (`python_values`). What it sets here, what it does not say here, and what cannot be expressed is in
docs/translation.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import ConfigError
from conf.reading.python_values import Imported, Unread, values
from conf.reading.words import in_word
from megatron_ext.contract.files import read_regular_text

MOST_BYTES = 1 << 18
MOST_SHOWN = 120
"""Characters of a value in a message."""
MODEL = "model=transformer-base"
"""Which the file's own sizes then change."""
ENCODER, DECODER = "TransformerEncoder", "TransformerDecoder"
LOSSES = ("PaddedCrossEntropyLossWithSmoothing",)
PRECISIONS = {"tf.float32": "fp32", "mixed": "fp16", "tf.float16": "fp16"}
SCALERS = {"backoff": "backoff", "logmax": "logmax"}
PLACES = ("parallel=", "experiment=")
"""Words that say how the ranks are laid out."""


@dataclass
class _Reading:
    """One file, while it is read: what has become of its keys."""

    words: dict[str, Any] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, key: str, value: Any, why: str) -> None:
        self.refused.append(f"{key}={_shown(value)}: {why}")


class _Part:
    """The keys of a dictionary of the file, each taken once; what is left is not known here."""

    def __init__(self, name: str, content: Any, reading: _Reading) -> None:
        if not isinstance(content, dict):
            reading.refused.append(
                f"{name or 'base_params'} is not a dictionary that can be evaluated: {_shown(content)}"
            )
        self._left = dict(content) if isinstance(content, dict) else {}
        self._prefix, self._reading = f"{name}." if name else "", reading

    def take(self, key: str, kinds: type | tuple[type, ...] = object, default: Any = None) -> Any:
        """Its value, or `default` where it is not there, or no such value, which is refused."""
        value = self._left.pop(key, default)
        if value is default or value is None:
            return default
        fits = isinstance(value, kinds) and (kinds in (bool, object) or not isinstance(value, bool))
        if isinstance(value, Unread) or not fits:
            self._reading.refuse(f"{self._prefix}{key}", value, "its value cannot be evaluated")
            return default
        return value

    def name(self, key: str) -> str | None:
        """The name of what the value stands for, such as tf.float32."""
        value = self.take(key)
        return None if value is None else _shown(value)

    def part(self, key: str) -> _Part:
        return _Part(f"{self._prefix}{key}", self._left.pop(key, {}), self._reading)

    def require(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        value = self.take(key)
        if value is not None and value not in allowed:
            self._reading.refuse(f"{self._prefix}{key}", value, why)

    def forget(self, *keys: str) -> None:
        """What says nothing of the training."""
        for key in keys:
            self._left.pop(key, None)

    def rest(self) -> list[str]:
        return [f"{self._prefix}{key}" for key in self._left]


def words_of(path: Path, given: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """The words that a file stands for, and notes: a `Reader` of conf/foreign_files.py."""
    try:
        known = values(read_regular_text(path, MOST_BYTES))
    except OSError as error:
        raise ConfigError(f"openseq2seq={path}: cannot be read: {error.strerror}; give the path of a file") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"openseq2seq={path}: this is not a Python file ({error}); give a configuration file"
        ) from error
    except Unread as unread:
        raise ConfigError(f"openseq2seq={path}: {unread}; tdpp reads the file without running it") from unread
    if "base_params" not in known:
        raise ConfigError(f"openseq2seq={path}: no base_params, so this is not an OpenSeq2Seq configuration")
    reading, base = _Reading(), known["base_params"]
    if isinstance(base, dict):
        base = {**base, **_dict(known, "train_params")}
    whole = _Part("", base, reading)
    _model(whole, path.stem, reading)
    if not reading.refused:
        _training(whole, reading)
        _batches(whole, given, reading)
        _data(whole, path.stem, reading)
    if reading.refused:
        lines = "".join(f"\n  {one}" for one in reading.refused)
        raise ConfigError(f"openseq2seq={path} cannot be trained unchanged:{lines}")
    if rest := whole.rest():
        reading.notes.append(f"unknown to tdpp, so ignored: {', '.join(rest)}")
    if any(word.startswith("model=") for word in given):
        del reading.words[MODEL.partition("=")[0]]
    return [f"{key}={in_word(value)}" for key, value in reading.words.items()], reading.notes


def _dict(known: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = known.get(name, {})
    return found if isinstance(found, dict) else {}


def _model(base: _Part, name: str, reading: _Reading) -> None:
    for key, wanted in (("encoder", ENCODER), ("decoder", DECODER)):
        if (found := base.name(key)) != wanted:
            reading.refuse(key, found, f"only {ENCODER} with {DECODER} is supported; model=gnmt is a GNMT with LSTMs")
    if (loss := base.name("loss")) is not None and loss not in LOSSES:
        reading.refuse("loss", loss, f"a transformer is trained with {LOSSES[0]}")
    if reading.refused:
        return
    encoder, decoder = base.part("encoder_params"), base.part("decoder_params")
    sizes = {
        "hidden_size": "model.hidden",
        "num_heads": "model.heads",
        "filter_size": "model.ffn_hidden",
        "attention_dropout": "model.attention_dropout",
        "layer_postprocess_dropout": "model.hidden_dropout",
    }
    words = reading.words
    group, _, choice = MODEL.partition("=")
    words |= {group: choice, "model.name": name}
    words["model.layers"] = encoder.take("encoder_layers", int)
    words["model.decoder_layers"] = decoder.take("num_hidden_layers", int)
    for key, ours in sizes.items():
        one, other = (part.take(key, (int, float)) for part in (encoder, decoder))
        if one != other:
            reading.refuse(f"encoder_params.{key}", one, f"the decoder has {other}, but tdpp uses the same for both")
        words[ours] = one
    for part in (encoder, decoder):
        dropped = part.take("relu_dropout", (int, float), words["model.hidden_dropout"])
        if dropped != words["model.hidden_dropout"]:
            why = f"layer_postprocess_dropout is {words['model.hidden_dropout']}, but tdpp uses one number for both"
            reading.refuse("relu_dropout", dropped, why)
        norm = part.part("norm_params")
        norm.require("type", ("layernorm_L2",), "tdpp's norms are layer norms with mean and variance")
        words["model.norm_epsilon"] = norm.take("epsilon", float, words.get("model.norm_epsilon", 1e-6))
        norm.forget("momentum")
        part.require("regularizer", (), "tdpp has no weight penalty in the loss; use train.weight_decay")
        part.forget("regularizer_params", "pad_embeddings_2_eight", "remove_padding")
        part.forget("EOS_ID", "GO_SYMBOL", "END_SYMBOL", "PAD_SYMBOL", "extra_decode_length")
    beam, alpha = decoder.take("beam_size", int), decoder.take("alpha", (int, float))
    if beam is not None:
        found = f"tdpp translate --beam {beam} --length-norm {alpha}"
        reading.notes.append(f"the search is set when translating: {found}")
    for part in (encoder, decoder):
        if rest := part.rest():
            reading.notes.append(f"unknown to tdpp, so ignored: {', '.join(rest)}")
    words["model.label_smoothing"] = base.part("loss_params").take("label_smoothing", (int, float), 0.0)
    for key in ("model.layers", "model.decoder_layers", "model.hidden", "model.heads"):
        if words[key] is None and not reading.refused:
            reading.refused.append(f"{key} is missing; encoder_params and decoder_params need it")


def _training(base: _Part, reading: _Reading) -> None:
    words = reading.words
    optimizer, options = base.name("optimizer") or "", base.part("optimizer_params")
    kind = optimizer.rpartition(".")[2].removesuffix("Optimizer")
    if kind in ("Adam", "LazyAdam"):
        words["train.optimizer"] = "adam"
        words["train.adam_beta1"] = options.take("beta1", float, 0.9)
        words["train.adam_beta2"] = options.take("beta2", float, 0.999)
        words["train.adam_eps"] = options.take("epsilon", float, 1e-8)
    elif kind == "Momentum":
        words["train.optimizer"] = "sgd"
        words["train.momentum"] = options.take("momentum", float, 0.9)
        words["train.nesterov"] = options.take("use_nesterov", bool, False)
    else:
        reading.refuse("optimizer", optimizer, "Adam, LazyAdam and Momentum are supported")
    words["train.weight_decay"] = 0.0
    if rest := options.rest():
        reading.notes.append(f"unknown to tdpp, so ignored: {', '.join(rest)}")
    base.require("larc_params", (), "tdpp has no LARC; train.optimizer=lamb scales updates similarly")
    steps, epochs = base.take("max_steps", int), base.take("num_epochs", int)
    if steps is not None:
        words["train.iterations"] = steps
    elif epochs is not None:
        words |= {"train.iterations": None, "train.epochs": epochs}
    else:
        reading.refused.append("neither max_steps nor num_epochs is given; a training needs one of them")
    _learning_rate(base, steps, reading)
    words["train.clip_grad"] = base.take("max_grad_norm", (int, float), 0.0)
    precision = base.name("dtype") or "tf.float32"
    if precision in PRECISIONS:
        words["train.precision"] = PRECISIONS[precision]
    else:
        reading.refuse("dtype", precision, f"{', '.join(PRECISIONS)} are supported")
    scaling = base.take("loss_scaling")
    if isinstance(scaling, str) and scaling.lower() in SCALERS and precision != "tf.float32":
        words["train.loss_scaler"] = SCALERS[scaling.lower()]
    elif scaling is not None and precision != "tf.float32":
        reading.refuse("loss_scaling", scaling, "Backoff and LogMax are supported")
    base.forget("loss_scaling_params")
    for key, ours in (("print_loss_steps", "log_interval"), ("eval_steps", "eval_interval"), ("random_seed", "seed")):
        if (value := base.take(key, int)) is not None:
            words[f"train.{ours}"] = value
    if (value := base.take("save_checkpoint_steps", int)) is not None:
        words["train.save_interval"] = value
    base.forget("print_samples_steps", "save_summaries_steps", "summaries", "logdir", "num_checkpoints")


def _learning_rate(base: _Part, steps: int | None, reading: _Reading) -> None:
    words = reading.words
    policy, options = base.name("lr_policy") or "fixed_lr", base.part("lr_policy_params")
    rate = options.take("learning_rate", (int, float))
    if rate is None:
        reading.refused.append("lr_policy_params.learning_rate is missing")
        return
    words |= {"train.lr_warmup_iterations": 0, "train.min_lr": 0.0}
    if policy == "transformer_policy":
        warmup, width = options.take("warmup_steps", int), options.take("d_model", int)
        if not (warmup and width):
            reading.refused.append("lr_policy_params: transformer_policy needs warmup_steps and d_model")
            return
        top = rate * options.take("coefficient", (int, float), 1.0) / math.sqrt(width * warmup)
        words |= {"train.lr_policy": "noam", "train.lr": top, "train.lr_warmup_iterations": warmup}
        if (most := options.take("max_lr", (int, float))) is not None and most < top:
            reading.refuse("lr_policy_params.max_lr", most, f"the rate would rise to {top:.6g}; tdpp does not cap it")
    elif policy in ("poly_decay", "cosine_decay"):
        words |= {"train.lr_policy": "polynomial" if policy == "poly_decay" else "cosine", "train.lr": rate}
        power = options.take("power", (int, float), 1.0)
        if policy == "poly_decay":
            words["train.lr_power"] = power
        words["train.min_lr"] = options.take("min_lr", (int, float), 0.0)
        options.require("begin_decay_at", (0,), "the rate falls only after the warm-up")
        options.require("warmup_steps", (0,), "there the decay starts during the warm-up, in tdpp after it")
        words["train.lr_decay_iterations"] = options.take("decay_steps", int, steps)
    elif policy == "fixed_lr":
        words |= {"train.lr_policy": "constant", "train.lr": rate}
    else:
        reading.refuse("lr_policy", policy, "transformer_policy, poly_decay, cosine_decay and fixed_lr are supported")
        return
    if rest := options.rest():
        reading.notes.append(f"unknown to tdpp, so ignored: {', '.join(rest)}")


def _batches(base: _Part, given: tuple[str, ...], reading: _Reading) -> None:
    words = reading.words
    batch, gpus = base.take("batch_size_per_gpu", int), base.take("num_gpus", int, 1)
    repeats = base.take("iter_size", int, 1)
    base.forget("use_horovod", "gpu_ids")
    if batch is None:
        reading.refused.append("batch_size_per_gpu is missing")
        return
    words["parallel.micro_batch_size"] = batch
    if any(word.startswith(PLACES) for word in given):
        each = batch * repeats
        reading.notes.append(f"set parallel.global_batch_size yourself: {each} per replica of the model")
        return
    data = next((word.partition("=")[2] for word in given if word.startswith("parallel.data=")), str(gpus))
    words |= {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.partition": None, "parallel.data": data}
    if data.isdecimal():
        words["parallel.global_batch_size"] = batch * repeats * int(data)


def _data(base: _Part, name: str, reading: _Reading) -> None:
    layer = base.part("data_layer_params")
    base.forget("data_layer")
    length = layer.take("max_length", int)
    if length is not None:
        reading.words |= {"model.sequence_length": length, "model.decoder_sequence_length": length}
    files = [layer.take(key, str) for key in ("source_file", "target_file")]
    vocabularies = [layer.take(key, str) for key in ("src_vocab_file", "tgt_vocab_file")]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        reading.notes.append("its two vocabularies become one that both languages share")
    if None not in files:
        reading.words["data.prefix"] = f"data/{name}"
        reading.notes.append(
            f"its sentences ({', '.join(map(str, files))}) must be prepared with tdpp data pairs --output "
            f"data/{name}; give the model.vocab_size that it prints"
        )
    layer.forget("pad_vocab_to_eight", "delimiter", "shuffle", "shuffle_buffer_size", "repeat", "map_parallel_calls")
    layer.forget("prefetch_buffer_size", "special_tokens_already_in_vocab", "use_start_token", "pad_lengths_to_eight")
    if rest := layer.rest():
        reading.notes.append(f"unknown to tdpp, so ignored: {', '.join(rest)}")


def _shown(value: Any) -> str:
    if not isinstance(value, str | int | float | bool | Imported | Unread):
        return type(value).__name__
    text = str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
