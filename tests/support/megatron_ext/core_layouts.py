"""Models and layouts that both engines can have: tdpp's own and `engine=megatron_core`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

from conf.compose import compose
from launch.control import megatron_lm
from tests.support.megatron_ext.engine_run import TINY

MEGATRON = "engine=megatron_core"
MODELS = {
    "gpt2": ("model.layers=4",),
    "llama": (
        *("model.layers=4", "model.normalization=RMSNorm", "model.position_embedding_type=rope", "model.swiglu=true"),
        *("model.add_bias_linear=false", "model.untie_embeddings_and_output_weights=true"),
        *("model.num_query_groups=2", "model.ffn_hidden=48"),
    ),
}
SINGLE = ("parallel=single",)
LAYOUTS = {
    "single": SINGLE,
    "pipeline": (*SINGLE, "parallel.pipeline=2", "parallel.partition=2-2"),
    "uneven": (*SINGLE, "parallel.pipeline=2", "parallel.partition=1-3"),
    "no-layer": (*SINGLE, "parallel.pipeline=3", "parallel.partition=0-4-0"),
    "tensor": (*SINGLE, "parallel.tensor=2"),
    "sequence": (*SINGLE, "parallel.tensor=2", "parallel.sequence_parallel=true", "parallel.pipeline=2"),
    "data": (*SINGLE, "parallel.data=2"),
    "interleaved": (
        *SINGLE,
        *("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=2-1-0-1"),
    ),
    "sharded": (*SINGLE, "parallel.data=2", "parallel.sharded_optimizer=true", "parallel.pipeline=2"),
    "recomputed": (*SINGLE, "parallel.recompute=full"),
    "core-recomputed": (*SINGLE, "parallel.recompute=selective"),
    "context": (*SINGLE, "parallel.context=2"),
    "context, pipeline": (*SINGLE, "parallel.context=2", "parallel.pipeline=2", "parallel.partition=1-3"),
    "context, interleaved": (
        *SINGLE,
        *("parallel.context=2", "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"),
    ),
    "context, tensor": (
        *SINGLE,
        *("parallel.context=2", "parallel.tensor=2", "parallel.sequence_parallel=true"),
    ),
    "context, data": (*SINGLE, "parallel.context=3", "parallel.data=2", "parallel.sharded_optimizer=true"),
    "context, recomputed": (*SINGLE, "parallel.context=2", "parallel.recompute=selective"),
    "all": (
        *("parallel=single", "parallel.data=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.partition=3-1"),
        *("parallel.sharded_optimizer=true", "parallel.sequence_parallel=true"),
    ),
}


def arguments_of(*words: str) -> Namespace:
    """What Megatron-LM makes of the options with which tdpp would start it, as far as they say what the model is."""
    experiment = compose([*TINY, *words])
    options = {name.replace("-", "_"): value for name, value in megatron_lm.model_options(experiment.model).items()}
    given = {name: True if value == "" else value for name, value in options.items() if value is not None}
    usual = {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "norm_epsilon": 1e-5}
    usual |= {"ffn_hidden_size": 4 * experiment.model.hidden, "rotary_base": 10000, "moe_layer_freq": 1}
    found = {**usual, "optimizer": "adam", "decoupled_weight_decay": True, "window_size": None, **given}
    found["add_bias_linear"] = not found.pop("disable_bias_linear", False)
    return Namespace(**found, vocab_size=None, padded_vocab_size=experiment.model.vocab_size)


@contextmanager
def saves_alone() -> Iterator[None]:
    """megatron.core's saving leaves no process: its own one for the results would be started with this Python's main
    program, and outlive a rank. Nor does it ask psutil, which is not there and for which it would wait for ever."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with get_context("fork").Manager() as manager:
        filesystem_async._get_write_results_queue = manager.Queue
        filesystem_async._process_memory = lambda: 0
        yield
