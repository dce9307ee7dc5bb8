"""A GPU's memory is predicted as torch's own allocator gives it, which is at work under the stand-in."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.gpu_counts import CASES, DOCUMENTS, GPT, MICRO_BATCHES, TOKENS, Case, Counter, words_of
from conf.compose import compose
from fasop.costs.memory.activations import kept_by_layer
from fasop.costs.training import Training
from fasop.simulation.memory_of_stages import memory_of
from fasop.simulation.predict import predict
from launch.commands.launching.preflight import with_length
from megatron_ext.data.indexed_dataset import write_indexed
from tests.cuda.test_stand_in import HEADER
from tests.megatron_ext.families.test_huggingface import NAMED
from tests.support.megatron_ext.engine_run import EngineRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HEADER.exists(), reason="Triton builds its launcher with Python's headers"),
]
MIB = 2**20
LEAST, MOST = -0.01, 0.03
"""By how much of what was given out at most a prediction may be off."""
COUNTED = 0.05
"""The same of a model whose blocks are counted on the device meta."""
NO_TENSOR_PLAN = ("gpt_oss",)
ADAPTERS_FROM = 2
"""Models of this number or a later one get adapters, which alone are trained."""


def assert_memory_as_predicted(words: Sequence[str], run: EngineRun, least: float = LEAST, most: float = MOST) -> None:
    """Of every rank: what was given out at most, and what the allocator held besides, which is the fragments'."""
    stages = predict(with_length(compose([*words, f"data.prefix={run.plan.data_prefix}"]))).stages
    for place in run.plan.ranks:
        measured = json.loads((run.run.path / "memory" / f"rank-{place.rank:05d}.json").read_text())["mib"]
        stage = stages[place.stage]
        parts = {name: amount.of(sum(stage.layers)) / MIB for name, amount in stage.memory.by_term().items()}
        fragments, predicted = parts.pop("fragments"), sum(parts.values()) - parts["communicators"] - parts["context"]
        given, held = measured["max_allocated"], measured["max_reserved"]
        assert least <= predicted / given - 1 <= most, (place.rank, predicted, given, parts)
        assert held - given <= fragments, (place.rank, held, given, fragments)


MEASURED = ("sharded optimizer", "two stages", "recomputed", "some layers recomputed", "offloaded")
OFFLOADED = ("activations offloaded", "two stages, activations offloaded")
SCATTERED = ("scattered gradients", "scattered gradients of tied words")
GATHERED = ("gathered weights", "gathered weights of tied words")


@pytest.mark.parametrize("name", [*MEASURED, *SCATTERED, *GATHERED])
def test_memory_of_a_layout_is_predicted(name: str, tmp_path: Path) -> None:
    case, counter = CASES[name], Counter(tmp_path)
    run = counter.run_of(case)
    ranks = counter.ours(run, case.gpus)
    assert_memory_as_predicted(words_of(case), run)
    for rank in ranks:
        loading, _, after_one, *_ = rank.peaks
        assert loading < 1.01 * after_one, "the pass that loads kernels takes more memory than training"


@pytest.mark.parametrize("name", ["sharded optimizer", *SCATTERED, *GATHERED])
def test_memory_of_unlike_parts_is_predicted(name: str, tmp_path: Path) -> None:
    """As of a GPU of 24 and one of 80 GiB."""
    case, counter = CASES[name], Counter(tmp_path)
    run, shards = counter.run_of(case), (3, 10)
    run.run.write_json(run.run.plan, {**run.plan.as_json(), "shards": [[*shards]]})
    counter.ours(run, case.gpus)
    one = Training.of(with_length(compose([*words_of(case), f"data.prefix={run.plan.data_prefix}"])))
    for rank, part in enumerate(shards):
        measured = json.loads((run.run.path / "memory" / f"rank-{rank:05d}.json").read_text())["mib"]["max_allocated"]
        terms = memory_of(one, run.plan.partition, 0, None, 1, part / sum(shards)).by_term()
        given = sum(amount.of(run.plan.partition[0]) for key, amount in terms.items() if key != "fragments") / MIB
        assert abs(given / measured - 1) <= COUNTED, (rank, given, measured, terms)


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_activations_leave_as_much_memory_as_is_predicted(name: str, tmp_path: Path) -> None:
    """Bytes that go to the host in an iteration are those of all layers and micro-batches; those of a last layer need
    not come back."""
    case, counter = CASES[name], Counter(tmp_path)
    run = counter.run_of(case)
    ranks = counter.ours(run, case.gpus)
    assert_memory_as_predicted(words_of(case), run)
    of_layer = kept_by_layer(Training.of(compose([*words_of(case), f"data.prefix={run.plan.data_prefix}"])), 0)
    for place, rank in zip(run.plan.ranks, ranks, strict=True):
        layers = run.plan.partition[place.stage]
        assert rank.copied["gpu-host"] == pytest.approx(MICRO_BATCHES * layers * of_layer, rel=0.01)
        assert layers - 1 <= rank.copied["host-gpu"] / (MICRO_BATCHES * of_layer) <= 1.01 * layers
        assert sum(rank.waits.values()) <= 3


STAGES = "parallel.pipeline=2 parallel.partition=6-6"
SMALLER = (
    *("model=llama-7b", "model.layers=4", "model.hidden=512", "model.heads=4", "model.ffn_hidden=1408"),
    *("model.sequence_length=256", "model.vocab_size=50257", "parallel.micro_batch_size=4"),
)
BY_STAGE = {
    "llama-7b on four A10, as searched": Case(
        4, SMALLER, "parallel.data=4 parallel.pipeline=1 parallel.partition=4 parallel.zero=3 parallel.offload=both"
    ),
    "zero=2 of untied words": Case(
        2, SMALLER, "parallel.data=2 parallel.pipeline=1 parallel.partition=4 parallel.zero=2"
    ),
    "zero=3-1": Case(4, GPT, f"{STAGES} parallel.data=2 parallel.zero=3-1"),
    "zero=0-2": Case(4, GPT, f"{STAGES} parallel.data=2 parallel.zero=0-2"),
    "recompute=full:2-none": Case(2, GPT, f"{STAGES} parallel.data=1 parallel.recompute=full:2-none"),
    "offload=optimizer-activations": Case(2, GPT, f"{STAGES} parallel.data=1 parallel.offload=optimizer-activations"),
}


@pytest.mark.parametrize("case", BY_STAGE.values(), ids=BY_STAGE.keys())
def test_memory_of_stages_that_keep_unlike_things_is_predicted(case: Case, tmp_path: Path) -> None:
    counter = Counter(tmp_path)
    run = counter.run_of(case)
    counter.ours(run, case.gpus)
    assert_memory_as_predicted(words_of(case), run, -COUNTED, COUNTED)


def drawn(kind: str, number: int) -> tuple[dict[str, int], tuple[str, ...], Case]:
    """Sizes by the names of transformers, the data's words, and a layout: others with another `TDPP_SEED`."""
    source = random.Random(f"{kind} {number} {os.environ.get('TDPP_SEED', '0')}")
    hidden, heads, layers = source.choice([192, 256, 512, 768]), source.choice([4, 8]), source.choice([2, 4, 6])
    experts, stages = source.choice([4, 8]), source.choice([1, 2])
    tensor = 1 if kind in NO_TENSOR_PLAN else source.choice([1, 2])
    sizes = {
        **{"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 2},
        **{"head_dim": hidden // heads, "intermediate_size": source.choice([2, 3]) * hidden},
        **{"moe_intermediate_size": hidden, "num_experts": experts, "num_local_experts": experts},
        **{"num_experts_per_tok": 2, "vocab_size": source.choice([4096, 10000, 32000]), "sliding_window": 128},
        **{"max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    first = source.randint(1, layers - 1)
    length, micro = source.choice([128, 256, 384, 512]), source.choice([1, 2])
    model = (f"model.sequence_length={length}", f"parallel.micro_batch_size={micro}")
    layout = (
        f"parallel=single parallel.pipeline={stages} parallel.tensor={tensor}",
        f"parallel.partition={layers if stages == 1 else f'{first}-{layers - first}'}",
        f"parallel.recompute={source.choice(['none', 'full'])}",
    )
    words = [f"train.precision={source.choice(['fp32', 'bf16'])}"]
    if number >= ADAPTERS_FROM:
        words += [
            f"train.lora_rank={source.choice([4, 16])}",
            f"train.lora_targets={source.choice(['null', '[o_proj]'])}",
        ]
    return sizes, tuple(words), Case(stages * tensor, model, " ".join(layout))


def prepared(kind: str, number: int, folder: Path) -> tuple[Case, tuple[str, ...]]:
    """A case of `drawn` with its model and data in a folder, and words that are not of the case."""
    sizes, words, case = drawn(kind, number)
    usual = CONFIG_MAPPING[kind]().to_dict()
    config: Any = CONFIG_MAPPING[kind](**{key: value for key, value in sizes.items() if key in usual})
    if number >= ADAPTERS_FROM:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        words = (*words, f"train.load={folder}")
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "model_type": kind}, default=str))
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, DOCUMENTS * TOKENS, dtype=np.uint16)
    write_indexed(folder / "data", np.split(tokens, DOCUMENTS), np.dtype(np.uint16))
    return replace(case, model=("model=huggingface", f"model.config={folder / 'config.json'}", *case.model)), words


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", NAMED)
def test_memory_of_models_of_transformers_is_predicted_without_a_profile(
    kind: str, number: int, tmp_path: Path
) -> None:
    (case, words), counter = prepared(kind, number, tmp_path), Counter(tmp_path)
    run = counter.run_of(case, *words)
    counter.ours(run, case.gpus, BESIDE=str(Path(transformers.__file__).parents[1]))
    assert_memory_as_predicted([*words_of(case), *words], run, -COUNTED, COUNTED)
