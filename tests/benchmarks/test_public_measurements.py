"""What a layer takes is found from a few measured iterations, and the others follow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.public_measurements import Run, in_a_node, of_one, over_nodes, predicted, runs

LAYER, HEAD = 0.8, 1.9
HEADINGS = "# GPUs,global batch,micro batch,hidden size,heads,# layers,sequence length,tp,dp,pp,iteration time (ms)"
PREDICT = partial(predicted, scatter="false")


def measured(**sizes: int) -> Run:
    run = replace(ONE_STAGE, **sizes)
    return replace(run, ms=PREDICT(run, LAYER, HEAD))


ONE_STAGE = Run(
    gpus=2, batch=4, micro_batch=2, hidden=1024, heads=16, layers=12, sequence=1024, tensor=2, data=1, pipeline=1
)


def test_two_runs_of_one_stage_tell_what_a_layer_and_the_head_take() -> None:
    known = [measured(), measured(layers=24)]
    others = [measured(gpus=8, pipeline=2, data=2, batch=16, layers=20), measured(batch=16)]

    outcomes = dict(in_a_node([*known, *others], PREDICT, 1))

    assert list(outcomes) == others, "no run that times were found from is predicted"
    for run, ms in outcomes.items():
        assert ms == pytest.approx(run.ms, rel=1e-4)


def test_one_run_tells_a_layers_time_if_the_heads_is_in_proportion_to_its_operations() -> None:
    sizes = {"gpus": 16, "pipeline": 2, "tensor": 8}
    layer, head = of_one(measured(**sizes), PREDICT)

    assert layer < LAYER < head, "here the head takes a share of what it has by its operations"
    assert PREDICT(replace(ONE_STAGE, **sizes), layer, head) == pytest.approx(measured(**sizes).ms, rel=1e-4)


def test_runs_with_more_stages_are_predicted_from_the_one_with_the_fewest() -> None:
    every = [measured(gpus=16, tensor=8, pipeline=2), measured(gpus=16, tensor=8, data=2), measured(tensor=1, gpus=1)]

    assert [run.pipeline for run, _ in over_nodes(every, PREDICT)] == [2]


def test_a_table_is_read_without_the_runs_whose_tensor_groups_span_nodes(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(
        f"\ufeffParameters (billion),{HEADINGS}\n3.6,64,512,8,3072,32,30,2048,16,4,1,10894\n"
        "3.6,64,512,8,3072,32,30,2048,8,8,1,5178.5\n",
        "utf-8",
    )

    (run,) = runs(table, skip=1)

    assert (run.tensor, run.data, run.ms) == (8, 8, 5178.5)
    assert run.micro_batches == 8
