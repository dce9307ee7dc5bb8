"""Sequences that ranks share: what a rank keeps and takes of them, the way of keys and values, and the search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import compose
from conf.schema.experiment import Recompute
from fasop.costs.layers import _between
from fasop.costs.memory.stages import stage_memory
from fasop.costs.parallelism import Parallelism
from fasop.costs.shared_layers import sequences_s
from fasop.costs.training import Training
from fasop.partition.local_search import exhaustive
from fasop.search.inputs import Inputs, read
from fasop.search.space.candidates import Space, sizes
from fasop.simulation.nodes import times_on
from launch.cli import main
from tests.support.fasop.searches import bounds

LLAMA = ("model=llama-tiny", "engine=megatron_core", "train.precision=bf16", "parallel.global_batch_size=16")
TWO_KINDS = ("cluster=a100x1_a10x7", "cluster.groups.gpu2.count=1", *LLAMA)
LONG = "model.sequence_length=8192"


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read([*TWO_KINDS, LONG])


def sized(inputs: Inputs, context: int = 1, **changes: Any) -> Training:
    """Four ranks with the same weights, of which `context` share sequences."""
    own = dict[str, Any](data=4, pipeline=2, context=context, micro_batch_size=2, global_batch_size=16)
    return replace(inputs.training, parallel=Parallelism(**{**own, **changes}))


def test_ranks_that_share_sequences_take_the_same_micro_batches(inputs: Inputs) -> None:
    assert [sized(inputs, context).parallel.micro_batches for context in (1, 2, 4)] == [2, 4, 8]
    own = sized(inputs, 2).parallel
    given = own.configured()
    assert (given.data, given.context, given.world_size, Parallelism.of(given)) == (2, 2, 8, own)


def test_a_rank_keeps_its_part_of_activations_and_sends_it(inputs: Inputs) -> None:
    stage = np.zeros((1, 1))
    held = 3 + stage
    alone, shared = (stage_memory(sized(inputs, context), stage, held) for context in (1, 4))
    assert shared.activations.layer.item() == pytest.approx(alone.activations.layer.item() / 4)
    for term in ("weights", "gradients", "optimizer"):
        assert getattr(shared, term).layer.item() == getattr(alone, term).layer.item()
    assert [4 * size for size in sized(inputs, 4).messages] == sized(inputs).messages


@pytest.mark.parametrize(("recompute", "ways"), [("none", 2), ("full", 3)])
def test_keys_and_values_go_round_once_forward_and_twice_back(inputs: Inputs, recompute: str, ways: int) -> None:
    """Within a node of four GPUs, and across nodes of two, whose ranks share the way out."""
    (kind, *_) = inputs.kinds
    way = Recompute(recompute)
    alone = times_on(kind, sized(inputs, micro_batch_size=1, recompute=way))
    shared = times_on(kind, sized(inputs, 4, micro_batch_size=4, recompute=way))
    group, model = kind.group, inputs.training.model.sized(1)
    size = 2 * (4 * 8192 / 4) * model.query_groups * model.head_width * 2  # keys, values; four samples; two bytes
    ring = 3 * (group.intra_latency_us * 1e-6 + size * 8e-9 / group.intra_gbit_per_s)
    assert shared.layer.forward == pytest.approx(alone.layer.forward + ring)
    assert shared.layer.backward == pytest.approx(alone.layer.backward + ways * ring)
    assert shared.head.forward == pytest.approx(alone.head.forward)
    across = 3 * (group.inter_latency_us * 1e-6 + size * 8e-9 / group.inter_gbit_per_s)
    assert sequences_s(replace(kind, gpus=2), sized(inputs, 4, micro_batch_size=4)) == pytest.approx(across)


@pytest.mark.parametrize(
    ("measured", "wanted"), [([3.0, 4.0], 2.25), ([3.0, 7.0], 0.75), ([3.0, 2.5], 3.0), ([3.0], 0.75)]
)
def test_a_part_of_a_sample_takes_what_does_not_depend_on_samples(measured: list[float], wanted: float) -> None:
    """A quarter of one, where micro-batches of 1 and 2 were measured: no less than its part, no more than all."""
    _, of = _between([1, 2][: len(measured)], 0.25)
    assert of(measured) == pytest.approx(wanted)


def test_sizes_are_tried_where_the_sequence_is_long_or_where_they_are_asked_for(inputs: Inputs) -> None:
    def tried(*words: str) -> set[int]:
        one = read([*TWO_KINDS, *words])
        return {found.parallel.context for found in sizes(one.training, one.kinds, one.choices)}

    assert tried() == {1}
    assert tried(LONG) == {1, 2}
    assert tried("parallel.context=1,4") == {1, 4}
    assert tried(LONG, "engine=tdpp") == {1}
    asked = read([*TWO_KINDS, LONG, "parallel.context=2", "parallel.data=2"])
    found = [one.parallel for one in sizes(asked.training, asked.kinds, asked.choices)]
    assert {(one.data, one.context, one.configured().data) for one in found} == {(4, 2, 2)}


def test_no_plan_that_shares_sequences_beats_its_bound() -> None:
    inputs = read([*TWO_KINDS, "parallel.context=1,2,4"])
    space = Space(inputs.training, inputs.kinds, inputs.choices)
    least, seen = bounds(space), set[int]()
    for number in range(len(space)):
        for group in space.built(number, space.first):
            _, seconds = exhaustive(group.pipelines, group.layers)
            assert seconds.min() >= least[number] * (1 - 1e-9)
            seen |= {group.training(column).parallel.context for column in range(len(group))}
    assert seen == {1, 2, 4}


def test_tdpps_engine_is_not_searched_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *TWO_KINDS, "engine=tdpp", "parallel.context=2"]) == 1
    assert "parallel.context=2 must be 1 with engine=tdpp; use engine=megatron_core" in capsys.readouterr().err


def test_a_plan_is_launched_as_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.yaml"
    words = [*TWO_KINDS, "parallel.data=2", "parallel.context=2", "top=1", "leave_out=false", f"plan={file}"]
    assert main(["search", *words]) == 0
    own = compose([*TWO_KINDS[:-1], f"parallel={file}", "executor=local", "container=none"]).parallel
    assert (own.data, own.context, own.world_size) == (2, 2, 8)
    assert "context 2" in capsys.readouterr().out
