"""What `train.compile` compiles: a graph for each kind of layer, however many layers there are."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.parallel.tensor_parallel import TensorGroup

DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
MORE_LAYERS_THAN_GRAPHS = "model.layers=10"
"""torch makes 8 graphs of a function, and then calls it uncompiled."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        (("model=tiny", MORE_LAYERS_THAN_GRAPHS, *DROPOUT), 1),
        (("model=llama-tiny", MORE_LAYERS_THAN_GRAPHS, *DROPOUT), 1),
        (("model=bert-tiny", MORE_LAYERS_THAN_GRAPHS, *DROPOUT), 1),
        (("model=t5-tiny", "model.layers=9", "model.decoder_layers=9", *DROPOUT), 2),
    ],
    ids=["gpt", "llama", "bert", "t5"],
)
def test_a_kind_of_layer_is_one_graph_whatever_it_drops_and_rotates(overrides: tuple[str, ...], kinds: int) -> None:
    torch._dynamo.reset()
    plan = make_plan(compose(["parallel=single", "data.prefix=x", *overrides]), "x")
    stage = stage_of(plan, 0, TensorGroup())
    stage.initialise(1)
    stage.place(torch.device("cpu"), torch.float32)
    counter = CompileCounter()
    for module in stage.counted:
        module.forward = torch.compile(module.forward, backend=counter)
    stage(task_of(plan).example(2, torch.Generator()).inputs)
    assert counter.frame_count == kinds
    assert counter.op_count > 0
