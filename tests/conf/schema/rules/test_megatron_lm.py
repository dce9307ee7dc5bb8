"""What Megatron-LM cannot do is refused before anything starts, in one message with the way out."""

from __future__ import annotations

import re

import pytest

from conf.compose import compose
from conf.errors import ConfigError

SEED = ["experiment=seed_a10x8", "engine=megatron_lm", "engine.checkout=/opt/megatron-lm"]

BROKEN = {
    "a checkout is named": (["engine.checkout=null"], "engine.kind=megatron_lm needs engine.checkout, the folder of"),
    "a checkout is for Megatron-LM": (
        ["engine=tdpp"],
        "engine.checkout is for Megatron-LM, but engine.kind=tdpp; use engine=megatron_lm too",
    ),
    "a tokenizer has two files": (
        ["engine.vocab_file=v.json"],
        "engine.vocab_file=v.json and engine.merge_file=None are the two files of one tokenizer",
    ),
    "another family": (
        ["model=bert-large", "parallel.partition=null"],
        "model.family=bert: Megatron-LM trains only model.family=gpt here, with its pretrain_gpt.py; use engine=tdpp",
    ),
    "GPipe": (
        ["parallel.schedule=gpipe"],
        "parallel.schedule=gpipe: Megatron-LM has one_f_one_b and interleaved only; use one of them, or engine=tdpp",
    ),
    "ZB-H1": (["parallel.schedule=zb_h1"], "parallel.schedule=zb_h1: Megatron-LM has"),
    "a schedule of one's own": (
        ["parallel.schedule_file=mine.json"],
        "parallel.schedule_file=mine.json: Megatron-LM cannot read a schedule",
    ),
    "stages that differ": (
        [
            *("parallel.replicas=24-8", "parallel.pipeline=2", "parallel.partition=null"),
            *("parallel.micro_batch_size=1", "parallel.global_batch_size=48"),
        ],
        "parallel.replicas=24-8: in Megatron-LM all stages have the same numbers of replicas",
    ),
    "interleaved, with a last group of few micro-batches": (
        [
            "parallel.schedule=interleaved",
            "parallel.chunks=2",
            "parallel.partition=null",
            "parallel.global_batch_size=48",
        ],
        "parallel.schedule=interleaved with 12 micro-batches (global_batch_size / (data * micro_batch_size)): "
        "Megatron-LM takes them in groups, and needs a multiple of parallel.pipeline=8; change",
    ),
    "torch.compile": (
        ["train.compile=true"],
        "train.compile=true is for tdpp's own engine only; use train.compile=false, or engine=tdpp",
    ),
    "a checkpoint of the other engine": (
        ["train.load=runs/a/b"],
        "train.load=runs/a/b reads checkpoints of tdpp's own engine; for those of Megatron-LM use "
        "engine.arguments=[--load",
    ),
    "a rehearsal": (
        ["executor.rehearse=virtual"],
        "executor.rehearse=virtual is for tdpp's own engine only; use executor.rehearse=none",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_megatron_lm_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([*SEED, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["parallel.partition=0-11-8-8-0-8-13-0"],
        ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=null"],
        ["engine.vocab_file=v.json", "engine.merge_file=m.txt", "engine.arguments=[--swiglu]"],
        [
            *("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=null"),
            *("parallel.global_batch_size=48", "engine.arguments=[--microbatch-group-size-per-vp-stage,12]"),
        ],
    ],
    ids=["the seed", "an empty stage", "interleaved", "tokenizer and arguments", "groups of one's own size"],
)
def test_what_it_can_do_is_accepted(overrides: list[str]) -> None:
    assert compose([*SEED, *overrides]).engine.kind == "megatron_lm"
