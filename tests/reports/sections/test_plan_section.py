"""The plan's section calls the blocks of a model as the model does, and says nothing of what it does not have."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from launch.control.planning.dry_run import stage_contents as dry_run_contents
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault
from reports.readers.record import stage_contents
from reports.sections.plan_section import plan_section


def planned(*overrides: str) -> Plan:
    defaults = (
        "cluster=local",
        "data.prefix=/data/none",
        "parallel.micro_batch_size=1",
        "parallel.global_batch_size=8",
    )
    return make_plan(compose([*defaults, *overrides]), "a/b")


def sentences(plan: Plan) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<p>(.*?)</p>", plan_section(plan))]


@pytest.mark.parametrize("model", ["tiny", "bert-tiny", "llama-tiny"])
def test_layers_of_one_kind_are_counted(model: str) -> None:
    plan = planned(
        f"model={model}", "model.layers=4", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-3"
    )
    assert (
        "The 4 transformer layers are divided 1-3; the first stage also has the embedding, the last one the final norm "
        "and the head."
    ) in sentences(plan)
    assert [stage_contents(plan, stage) for stage in range(2)] == ["1 + embedding", "3 + head"]


def test_encoder_and_decoder_are_named_and_so_is_the_stage_in_which_they_meet() -> None:
    plan = planned("model=t5-base", "parallel.data=1", "parallel.pipeline=4", "parallel.partition=8-5-11-0")
    said = sentences(plan)
    assert (
        "The 12 encoder and 12 decoder layers are divided 8-5-11-0; the first stage also has the embedding, the stage "
        "of decoder.0 the encoder norm and the decoder embedding, the last one the final norm and the head."
    ) in said
    assert any("8 samples of 512 + 128 tokens" in sentence for sentence in said)
    assert "Model: t5, hidden size 768, 12 heads, vocabulary 30622 (padded to 30720)." in said
    assert [stage_contents(plan, stage) for stage in range(4)] == [
        "encoder.0-7 + embedding",
        "encoder.8-11 + decoder.0",
        "decoder.1-11",
        "none + head",
    ]


def test_chunks_of_encoder_and_decoder_are_named_one_after_another() -> None:
    schedule = ("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=6-6-6-6")
    plan = planned("model=t5-base", "parallel.data=1", "parallel.pipeline=2", *schedule)
    assert [stage_contents(plan, stage) for stage in range(2)] == [
        "encoder.0-5, decoder.0-5 + embedding",
        "encoder.6-11, decoder.6-11 + head",
    ]
    assert any(
        "The first stage's first chunk also has the embedding, the stage of decoder.0" in s for s in sentences(plan)
    )


def test_a_users_module_has_blocks_and_nothing_else(tmp_path: Path) -> None:
    code = tmp_path / "my.py"
    code.write_text("from torch import nn\n\nNet = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])\n")
    layout = ("model.layers=5", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=2-3")
    plan = planned("model=module", f"model.code={code}:Net", *layout)
    said = sentences(plan)
    assert {"The 5 blocks are divided 2-3.", "Model: module my.py:Net."} <= set(said)
    assert not re.search(r"\b0\b|None|vocabulary|tokens|heads|hidden|embedding", " ".join(said))
    assert [stage_contents(plan, stage) for stage in range(2)] == ["2", "3"]


def test_a_module_s_blocks_are_named_where_they_are_known(tmp_path: Path) -> None:
    code = tmp_path / "my.py"
    code.write_text("from torch import nn\n\nNet = nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)])\n")
    layout = ("model.layers=5", "parallel.data=1", "parallel.pipeline=2", "parallel.partition=4-1")
    plan = planned("model=module", f"model.code={code}:Net", *layout)
    for names, held in (
        (["embedding", "encoder.0", "encoder.1", "decoder.0", "head"], ["embedding + encoder.0-1 + decoder.0", "head"]),
        (["a", "b", "c", "d", "e"], ["a to d (4)", "e"]),
        (["0", "1", "3", "4", "5"], ["0-1 + 3-4", "5"]),
    ):
        named = replace(plan, blocks=names)
        assert [stage_contents(named, stage) for stage in range(2)] == held
        assert [dry_run_contents(named, stage) for stage in range(2)] == held
        assert Plan.parse(json.loads(json.dumps(named.as_json())), tmp_path).blocks == names
    with pytest.raises(PlanFault, match=r"blocks=\[.*5 names"):
        Plan.parse({**plan.as_json(), "blocks": ["a"]}, tmp_path)


def test_what_a_model_does_not_have_is_not_said() -> None:
    plan = planned("model=tiny", "parallel.data=1", "parallel.pipeline=1", "parallel.partition=null")
    nothing = replace(plan.model, hidden=0, heads=0, sequence_length=0, vocab_size=0, padded_vocab_size=0)
    said = " ".join(sentences(replace(plan, model=nothing)))
    assert not re.search(r"\b0\b|None|vocabulary|tokens|heads|hidden|Model:", said)
