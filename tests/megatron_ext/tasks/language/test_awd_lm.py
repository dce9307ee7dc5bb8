"""The AWD-LSTM language model by itself: its sizes, how it begins, and what is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from conf.compose import compose
from conf.schema.experiment import Recompute, Schedule
from fasop.search.space.choices import runnable
from megatron_ext.contract.models.counts import flops_per_sample, parameter_count
from megatron_ext.contract.plan import Plan
from megatron_ext.families.awd_lm.task import DroppedEmbedding, DroppedLayer
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.measuring.passes import Parts
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.stage import Stage
from tests.megatron_ext.engine.test_awd_lm_agrees import MODELS, SIZES
from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.known_sizes import assert_sizes_known

Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, corpus: Path) -> Planned:
    def plan(*overrides: str) -> Plan:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        return make_run(folder, corpus, *overrides).plan

    return plan


def stage(plan: Plan) -> Stage:
    return stage_of(plan, 0, TensorGroup())


def test_three_layers_have_the_24_million_weights_of_the_paper_and_six_those_that_torchs_lstms_have() -> None:
    three, six = (
        compose(["model=awd-lm", f"model.layers={layers}", "parallel.partition=null"]).model.sized(1)
        for layers in (3, 6)
    )
    assert round(parameter_count(three) / 1e6) == 24
    layers = [nn.LSTM(400, 1150), *(nn.LSTM(1150, 1150) for _ in range(4)), nn.LSTM(1150, 400)]
    lstms = sum(one.numel() for layer in layers for one in layer.parameters())
    assert parameter_count(six) == lstms + 10000 * 400 + 10000
    matrices = sum(one.numel() for layer in layers for one in layer.parameters() if one.dim() > 1)
    assert flops_per_sample(six) == 3 * 2 * 70 * (matrices + 10000 * 400)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_known_without_torch_are_those_of_the_blocks(planned: Planned, model: str) -> None:
    plan = planned(*MODELS[model])
    task, sized = task_of(plan), plan.model
    numbers = assert_sizes_known(task, sized)
    left = stage(plan)(task.example(3, torch.Generator().manual_seed(0)).inputs)["logits"]
    assert left.numel() == 3 * numbers["logits"]
    assert [block.name for block in task.blocks if block.placement.name == "COUNTED"] == [
        sized.block_name(number) for number in range(sized.counted)
    ]


def test_weights_begin_as_the_papers(planned: Planned) -> None:
    for name, one in stage(planned(*MODELS["untied"], "model.hidden=100")).parameters_by_name():
        if name == "head.bias":
            assert not one.any()
            continue
        limit = 0.1  # of torch's LSTM of width 100, too
        assert one.abs().max() <= limit
        assert one.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_the_first_layer_is_torchs_lstm_where_nothing_is_dropped(planned: Planned) -> None:
    layer = next(one for one in stage(planned(*SIZES)).blocks if isinstance(one, DroppedLayer))
    lstm = nn.LSTM(20, 32, batch_first=True)
    lstm.load_state_dict(layer.lstm.state_dict())
    x = torch.randn(3, 9, 20)
    torch.testing.assert_close(layer(x, torch.arange(3)), lstm(x)[0])


def test_each_of_the_five_kinds_of_dropout_makes_a_difference_and_none_when_it_is_evaluated(planned: Planned) -> None:
    rates = ("embedding_dropout", "input_dropout", "hidden_dropout", "output_dropout", "weight_dropout")
    plain = stage(planned(*SIZES))
    micro = task_of(planned(*SIZES)).example(2, torch.Generator().manual_seed(0))
    expected = plain(micro.inputs)["logits"]
    for rate in rates:
        one = stage(planned(*SIZES, f"model.{rate}=0.3"))
        assert not torch.allclose(one(micro.inputs)["logits"], expected), rate
        torch.testing.assert_close(one.eval()(micro.inputs)["logits"], expected)


def test_a_word_is_dropped_wherever_it_stands_in_a_sample_and_others_are_scaled(planned: Planned) -> None:
    embedding = next(
        one for one in stage(planned(*SIZES, "model.embedding_dropout=0.4")).blocks if isinstance(one, DroppedEmbedding)
    )
    tokens = torch.arange(61).repeat(2).expand(300, -1)
    x = embedding(tokens, torch.arange(300))
    torch.testing.assert_close(x[:, :61], x[:, 61:])
    kept = x[:, :61].abs().sum(-1) > 0
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.02)
    assert not torch.equal(kept[0], kept[1])
    torch.testing.assert_close(x[:, :61][kept], (embedding.word[tokens[:, :61]] / 0.6)[kept], rtol=1e-4, atol=1e-6)


def test_what_is_dropped_of_a_samples_vectors_is_the_same_at_all_its_tokens(planned: Planned) -> None:
    embedding = next(
        one for one in stage(planned(*SIZES, "model.input_dropout=0.5")).blocks if isinstance(one, DroppedEmbedding)
    )
    x = embedding(torch.arange(40).expand(2, -1), torch.arange(2))
    dropped = x == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert 0 < dropped[0, 0].sum() < 20
    assert not torch.equal(dropped[0, 0], dropped[1, 0])


def test_a_search_leaves_out_what_lstms_cannot_do() -> None:
    experiment = compose(["model=awd-lm-tiny", "parallel.partition=null"])
    allowed = runnable(experiment.engine, experiment.train, experiment.model)
    assert Schedule.zb_h1 not in allowed.schedule
    assert Recompute.selective not in allowed.recompute
    assert Schedule.one_f_one_b in allowed.schedule


def test_a_profile_times_every_kind_of_block(planned: Planned) -> None:
    plan = planned(*MODELS["tied"])
    parts = Parts(plan, plan.model, TensorGroup(), 2, torch.device("cpu"))
    assert parts.kept_bytes().keys() == {"embedding", "layer_first", "layer", "layer_last", "head"}
    parts._pass()
