"""What ranks with `engine=megatron_lm` run: a checkout's pretrain_gpt.py, with the options of the plan.

Option names are those of Megatron-LM core_v0.19.0. What Megatron-LM cannot do is refused in
`conf.schema.rules.execution`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from conf.schema.experiment import ContainerKind, Experiment, Model, Parallel, Precision, Recompute
from launch.errors import LaunchError
from megatron_ext.contract.checkout import PRETRAIN_GPT, fault
from megatron_ext.contract.layout import megatron_layout
from megatron_ext.contract.models.counts import BALANCE

ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Megatron-LM wants its kernels queued in order where tensor parallelism overlaps with communication."""


Options = Mapping[str, str | int | float | list[str] | None]
"""Options by name without dashes. "" is an option without a value, a list is several; one with None is left out."""
ON_CPU: Options = {
    **{"transformer-impl": "local", "distributed-backend": "gloo", "use-cpu-initialization": ""},
    **{f"no-{name}-fusion": "" for name in ("bias-gelu", "bias-swiglu", "bias-dropout", "masked-softmax", "rope")},
    **{"no-gradient-accumulation-fusion": "", "no-persist-layer-norm": ""},
}
"""What Megatron-LM must do without where there is no GPU."""


def script(experiment: Experiment, checkpoints: Path) -> list[str]:
    """The path of pretrain_gpt.py, and its options."""
    assert experiment.engine.checkout is not None
    options, cluster = pretrain_options(experiment, checkpoints), experiment.cluster
    on_cpus = all(cluster.gpus[cluster.groups[name].gpu].is_cpu for name in experiment.node_order.groups)
    words = _words({**options, **ON_CPU} if on_cpus else options)
    folder = os.path.abspath(experiment.engine.checkout)  # noqa: PTH100  (resolves '..', follows no link)
    return [str(Path(folder) / PRETRAIN_GPT), *words, *experiment.engine.arguments]


def check(experiment: Experiment) -> None:
    """Raises LaunchError if the checkout is not there or cannot train here, as far as this machine, which the ranks
    know as theirs without a container, can tell."""
    if experiment.container.kind is not ContainerKind.none:
        return
    found = fault(script(experiment, Path()))
    if found is not None:
        raise LaunchError(found)


def _words(options: Options) -> list[str]:
    return [word for name, value in options.items() if value is not None for word in (f"--{name}", *_values(value))]


def _values(value: str | int | float | list[str]) -> list[str]:
    if isinstance(value, list):
        return value
    return [] if value == "" else [str(value)]


def pretrain_options(experiment: Experiment, checkpoints: Path) -> Options:
    """The options of pretrain_gpt.py. The model is the one that tdpp's own engine trains."""
    return {
        **model_options(experiment.model),
        **layout_options(experiment.parallel, experiment.partition.layers),
        **_training(experiment),
        **_data(experiment),
        **_output(experiment, checkpoints),
    }


def model_options(model: Model) -> Options:
    """Returns the options that make a model."""
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "seq-length": model.sequence_length,
        "max-position-embeddings": model.sequence_length,
        "make-vocab-size-divisible-by": model.vocab_multiple,
        "attention-dropout": model.attention_dropout,
        "hidden-dropout": model.hidden_dropout,
        **_unlike_gpt2(model),
    }


def _unlike_gpt2(model: Model) -> Options:
    """Returns the options that differ from GPT-2's, which are Megatron-LM's own defaults."""
    sizes = model.sized(1)
    own = sizes.own_options()
    rotary = model.rotary_base  # a whole number there
    return {
        "ffn-hidden-size": sizes.inner if model.swiglu else model.ffn_hidden,  # it would shrink a gated one
        "kv-channels": model.kv_channels,
        "group-query-attention": _flag(model.num_query_groups is not None),
        "num-query-groups": model.num_query_groups,
        "normalization": str(model.normalization) if "normalization" in own else None,
        "norm-epsilon": model.norm_epsilon if "norm_epsilon" in own else None,
        "position-embedding-type": str(model.position_embedding_type) if "position_embedding_type" in own else None,
        "rotary-base": (int(rotary) if rotary == int(rotary) else rotary) if "rotary_base" in own else None,
        "rotary-percent": model.rotary_percent if "rotary_percent" in own else None,
        "use-rope-scaling": _flag(model.rope_scaling_factor is not None),
        "rope-scaling-factor": model.rope_scaling_factor,
        "swiglu": _flag(model.swiglu),
        "disable-bias-linear": _flag(not model.add_bias_linear),
        "untie-embeddings-and-output-weights": _flag(model.untie_embeddings_and_output_weights),
        **_experts(model),
    }


def _experts(model: Model) -> Options:
    experts: int | None = getattr(model, "experts", None)
    if experts is None:
        return {}
    return {
        "num-experts": experts,
        "moe-router-topk": getattr(model, "experts_per_token", 2),
        "moe-aux-loss-coeff": BALANCE,
        "moe-token-dispatcher-type": "alltoall",
    }


def layout_options(parallel: Parallel, layers: Sequence[int]) -> Options:
    """Returns the options that cut a model and a batch; `layers` are those of each (virtual) stage."""
    again = parallel.recompute
    full, some = again.way is Recompute.full, again.layers is not None
    return {
        "tensor-model-parallel-size": parallel.tensor_size,
        "pipeline-model-parallel-size": parallel.pipeline,
        "pipeline-model-parallel-layout": megatron_layout(layers, parallel.pipeline),
        **({"expert-model-parallel-size": parallel.expert} if parallel.expert > 1 else {}),
        **({"context-parallel-size": parallel.context} if parallel.context > 1 else {}),
        "sequence-parallel": _flag(parallel.sequence_parallel),
        "use-distributed-optimizer": _flag(parallel.sharded_optimizer),
        "recompute-granularity": None if again is Recompute.none else str(again.way),
        "recompute-method": ("block" if some else "uniform") if full else None,
        "recompute-num-layers": (again.layers or 1) if full else None,
        "micro-batch-size": parallel.micro_batch_size,
        "global-batch-size": parallel.global_batch_size,
    }


def _training(experiment: Experiment) -> Options:
    train = experiment.train
    return {
        "train-iters": train.last_iteration,
        "seed": train.seed,
        "lr": train.lr,
        "min-lr": train.min_lr,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": train.lr_warmup_iterations,
        "lr-decay-iters": train.last_iteration if train.lr_decay_iterations is None else train.lr_decay_iterations,
        "weight-decay": train.weight_decay,
        "adam-beta1": train.adam_beta1,
        "adam-beta2": train.adam_beta2,
        "adam-eps": train.adam_eps,
        "clip-grad": train.clip_grad,
        **precision_options(train.precision),
        "distributed-timeout-minutes": math.ceil(train.comm_timeout_s / 60),
    }


def precision_options(precision: Precision) -> Options:
    """Returns the option of a precision, of which Megatron-LM has none for fp32."""
    return {} if precision is Precision.fp32 else {str(precision): ""}


def _data(experiment: Experiment) -> Options:
    engine = experiment.engine
    tokenizer: Options = (
        {"tokenizer-type": "NullTokenizer", "vocab-size": experiment.model.vocab_size}
        if engine.vocab_file is None
        else {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": engine.vocab_file, "merge-file": engine.merge_file}
    )
    return {
        "data-path": [
            word
            for corpus in experiment.data.corpora()
            for word in (*([str(corpus.weight)] if experiment.data.blend else []), os.path.abspath(corpus.prefix))  # noqa: PTH100
        ],
        "split": experiment.data.split,
        "data-cache-path": experiment.data.cache and os.path.abspath(experiment.data.cache),  # noqa: PTH100
        **tokenizer,
        # No evaluation, as in tdpp's own engine; Megatron-LM divides by the interval all the same.
        "eval-iters": 0,
        "eval-interval": experiment.train.last_iteration,
    }


def _output(experiment: Experiment, checkpoints: Path) -> Options:
    train = experiment.train
    kept: Options = (
        {
            "save": str(checkpoints),
            "save-interval": train.last_iteration
            if train.auto_interval
            else train.save_interval or train.last_iteration,
            "async-save": _flag(train.save_async),
            "load": str(checkpoints),  # of this run, when it was interrupted and is started again
            "exit-signal-handler": "",
        }
        if train.checkpoint
        else {}
    )
    return {"log-interval": train.log_interval, "log-throughput": "", **kept}


def _flag(given: bool) -> str | None:
    return "" if given else None
