"""Experts that replicas share out: parameters on a rank, the way of tokens, and the search over sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conf.schema.experiment import Recompute
from fasop.costs.hardware import NodeKind
from fasop.costs.memory.stages import stage_memory
from fasop.costs.parallelism import Parallelism
from fasop.costs.shared_layers import experts_s, layer_numbers
from fasop.costs.training import Training
from fasop.errors import SearchError
from fasop.partition.local_search import exhaustive
from fasop.search.arguments import parse
from fasop.search.inputs import Inputs, read
from fasop.search.run import best_plans
from fasop.search.space.candidates import Space, sizes
from fasop.search.space.choices import Choices
from fasop.simulation.nodes import times_on
from launch.cli import main
from tests.support.fasop.searches import bounds

MIXTRAL = ("model=mixtral-tiny", "engine=megatron_core", "parallel.global_batch_size=16")
TWO_KINDS = ("cluster=a100x1_a10x7", "cluster.groups.gpu2.count=1", *MIXTRAL)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return read([*TWO_KINDS, "train.precision=bf16"])


def sized(inputs: Inputs, **changes: Any) -> Training:
    own = dict[str, Any](data=4, pipeline=2, global_batch_size=16)
    return replace(inputs.training, parallel=Parallelism(**{**own, **changes}))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("expert", [1, 2, 4])
def test_a_rank_holds_its_experts_and_all_else(inputs: Inputs, expert: int, tensor: int) -> None:
    training = sized(inputs, expert=expert, tensor=tensor, sequence_parallel=tensor > 1)
    model = training.model.sized(tensor)
    own = [f"experts.{number}." for number in range(4 // expert)]
    parameters = model.traits.parameters(model, "layer")
    held = sum(
        one.numel(tensor)
        for name, one in parameters.items()
        if not name.startswith("experts.") or name.startswith(tuple(own))
    )
    assert layer_numbers(training).held == (held,)


@pytest.mark.parametrize("expert", [1, 2, 4])
def test_a_ring_of_all_sums_as_many_bytes_as_the_rings_that_there_are(inputs: Inputs, expert: int) -> None:
    """All but experts is summed by four replicas, an expert by those of them that have it."""

    def sent(ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    training = sized(inputs, expert=expert)
    whole, held = layer_numbers(sized(inputs)).held[0], layer_numbers(training).held[0]
    of_experts = 0.0 if expert == 1 else (whole - held) / (1 - 1 / expert)
    rings = sent(4) * (whole - of_experts) + sent(4 // expert) * of_experts / expert
    assert sent(4) * layer_numbers(training).summed[0] == pytest.approx(rings)


def test_memory_of_experts_is_shared_out(inputs: Inputs) -> None:
    stage = np.zeros((1, 1))
    alone, shared = (stage_memory(sized(inputs, expert=expert), stage) for expert in (1, 4))
    numbers = layer_numbers(sized(inputs, expert=4))
    for term, each in (("weights", 2), ("gradients", 4), ("optimizer", 12)):
        assert getattr(shared, term).layer.item() == pytest.approx(each * numbers.held[0])
        assert getattr(shared, term).layer.item() < getattr(alone, term).layer.item()
    zero = [stage_memory(sized(inputs, expert=expert, sharded_optimizer=True), stage).optimizer for expert in (1, 4)]
    assert zero[0].layer.item() == pytest.approx(zero[1].layer.item())  # each replica has a fourth of all in any case


def test_tokens_go_to_their_experts_and_back(inputs: Inputs) -> None:
    """Within a node of four GPUs, and out of nodes of two, whose ranks share the way out."""
    (kind, *_) = inputs.kinds
    training = sized(inputs, expert=4, micro_batch_size=2)
    group, model = kind.group, training.model
    size = 2 * model.sequence_length * model.hidden * 2 * 2 / 4  # two experts for a token, two bytes, to each rank
    inside = group.intra_latency_us * 1e-6 + size * 8e-9 / group.intra_gbit_per_s
    assert experts_s(kind, training) == pytest.approx(2 * 3 * inside)
    outside = group.inter_latency_us * 1e-6 + size * 2 * 8e-9 / group.inter_gbit_per_s
    assert experts_s(replace(kind, gpus=2), training) == pytest.approx(2 * (inside + 2 * outside))
    assert experts_s(kind, sized(inputs)) == 0.0


@pytest.mark.parametrize(("recompute", "ways"), [("none", (1, 1)), ("full", (1, 2))])
def test_a_layer_takes_longer_by_the_way_of_its_tokens(inputs: Inputs, recompute: str, ways: Sequence[int]) -> None:
    kind: NodeKind = inputs.kinds[0]
    alone, shared = (times_on(kind, sized(inputs, expert=expert, recompute=Recompute(recompute))) for expert in (1, 2))
    way = experts_s(kind, sized(inputs, expert=2))
    assert shared.layer.forward - alone.layer.forward == pytest.approx(ways[0] * way)
    assert shared.layer.backward - alone.layer.backward == pytest.approx(ways[1] * way)
    assert (shared.embedding, shared.head) == (alone.embedding, alone.head)


def test_the_search_tries_every_size_that_divides_experts_and_replicas(inputs: Inputs) -> None:
    found = {(one.parallel.data, one.parallel.expert) for one in sizes(inputs.training, inputs.kinds)}
    assert found == {(data, expert) for data in (1, 2, 4, 8) for expert in (1, 2, 4) if data % expert == 0}
    plain = read([*TWO_KINDS, "model=llama-tiny"])
    assert {one.parallel.expert for one in sizes(plain.training, plain.kinds)} == {1}


def test_no_plan_with_experts_beats_its_bound(inputs: Inputs) -> None:
    """Over all sizes, each with all of its options and node orders."""
    space = Space(inputs.training, inputs.kinds, inputs.choices)
    least, seen = bounds(space), set[int]()
    for number in range(len(space)):
        for group in space.built(number, space.first):
            _, seconds = exhaustive(group.pipelines, group.layers)
            assert seconds.min() >= least[number] * (1 - 1e-9)
            seen |= {group.training(column).parallel.expert for column in range(len(group))}
    assert seen == {1, 2, 4}


def test_sharing_experts_lets_a_model_fit_and_is_then_chosen() -> None:
    """Eight experts of 5.6 GB each in bf16 do not fit on a GPU; a search without expert sizes finds less."""
    words = [
        *("cluster=a100x8_a10x8", "cluster.groups.a10.count=1", "cluster.groups.a100.count=2", "model=mixtral-8x7b"),
        *("model.layers=4", "engine=megatron_core", "train.precision=bf16", "parallel.global_batch_size=64"),
        *("parallel.tensor=1", "parallel.pipeline=1,2"),
    ]
    args = parse([*words, "top=1"])
    free = best_plans(read(args.overrides), args).plans[0]
    assert free.parallel.expert > 1
    assert f"experts over {free.parallel.expert}" in ", ".join(table_of(free))
    try:
        one = best_plans(read([*args.overrides, "parallel.expert=1"]), args).plans[0].total
    except SearchError:
        one = np.inf
    assert free.total < one


def table_of(plan: Any) -> list[str]:
    from fasop.tables.plans import ranking

    return [cell for row in ranking([plan])[1] for cell in row]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("engine=tdpp",), "model.experts=4 must be null with engine=tdpp; use engine=megatron_core"),
        (("model=vit-tiny",), "model.family=vit cannot be searched with engine=megatron_core"),
        (("model=llama-tiny", "parallel.expert=2"), "has parallel.expert=2; possible: expert 1"),
        (("parallel.expert=3",), "has parallel.expert=3; possible: expert 1, 2, 4"),
    ],
    ids=["tdpp", "bert", "no-experts", "no-divisor"],
)
def test_what_cannot_be_searched_is_one_message(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *TWO_KINDS, *words]) == 1
    assert message in capsys.readouterr().err


def test_a_plan_with_experts_is_launched_as_found(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensor groups share the sequence, as a launch wants it."""
    file = tmp_path / "best.yaml"
    words = [*TWO_KINDS, "parallel.tensor=2", "parallel.expert=2", "top=1"]
    assert main(["search", *words, f"plan={file}"]) == 0
    given = [*TWO_KINDS[:-1], f"parallel={file}", "dry_run=true", "executor=local", "container=none"]
    from conf.compose import compose

    own = compose([word for word in given if word != "dry_run=true"]).parallel
    assert (own.tensor_size, own.expert, own.sequence_parallel) == (2, 2, True)
    assert "experts over 2" in capsys.readouterr().out


def test_choices_have_expert_sizes() -> None:
    assert Choices(expert=(2,)).sizes == {"expert": (2,)}
