"""Recomputing some layers of each stage: what it costs in memory and time, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.errors import ConfigError
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.stages import stage_memory
from fasop.costs.parallelism import Parallelism
from fasop.errors import SearchError
from fasop.search import inputs
from fasop.search.space.choices import split
from fasop.simulation.linear import Again, Linear
from fasop.simulation.predict import predict
from launch.control.planning.plan import make_plan
from megatron_ext.contract.parallel_config import Recompute
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault
from tests.support.fasop.plans import training

WORDS = (
    "model=tiny", "model.layers=6", "parallel=single", "parallel.global_batch_size=16", "parallel.micro_batch_size=4",
    "data.prefix=data/none", "executor=local", "container=none",
)  # fmt: skip


def seconds(recompute: str) -> float:
    return predict(compose([*WORDS, f"parallel.recompute={recompute}"])).iteration_s


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "zb_h1"])
def test_memory_lies_between_that_of_no_layer_and_of_all(schedule: str) -> None:
    def of(recompute: str, layers: int) -> float:
        one = training(f"parallel.recompute={recompute}", f"parallel.schedule={schedule}")
        return float(stage_memory(one, 1).of(layers))

    assert of("full:3", 3) == of("full:8", 3) == of("full", 3)
    spared = [of(f"full:{number}", 8) - of(f"full:{number + 1}", 8) for number in range(1, 6)]
    assert min(spared) == pytest.approx(max(spared))
    assert spared[0] > 0
    assert of("full", 8) <= of("full:7", 8) < of("full:1", 8) < of("none", 8)


def test_what_is_computed_again_adds_nothing_where_logits_have_left_room_for_it() -> None:
    """On the last stage, whose logits are gone by then: each such layer saves the same, the first one, too."""

    def of(recompute: str) -> float:
        one = training(f"parallel.recompute={recompute}", "model.vocab_size=500000")
        return float(stage_memory(one, one.parallel.pipeline - 1).of(8))

    assert of("none") - of("full:1") == pytest.approx(of("full:1") - of("full:2"))


@pytest.mark.parametrize("gib", [0.5, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("number", [1, 3, 9])
def test_the_capacity_is_the_most_layers_that_fit(number: int, gib: float) -> None:
    memory = stage_memory(training(f"parallel.recompute=full:{number}"), np.array([[1.0]]))
    most = int(memory.capacity(np.array([[gib]]))[0, 0])
    if most >= 0:
        assert memory.of(most)[0, 0] <= gib * GIB < memory.of(most + 1)[0, 0]
    else:
        assert memory.of(0)[0, 0] > gib * GIB


def test_every_layer_that_is_computed_again_takes_its_forward_pass_longer() -> None:
    times = [seconds(one) for one in ("none", *(f"full:{number}" for number in range(1, 7)), "full")]
    steps = np.diff(times[:-1])
    assert steps == pytest.approx([steps[0]] * 6)
    assert steps[0] > 0
    assert times[-1] == pytest.approx(times[-2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel.recompute=full:99", r"recompute=full:99 computes 99 layers .*no stage has more than 6; use full"),
        ("parallel.pipeline=2 parallel.recompute=full:4-none", r"full:4-none computes 4 layers .*that stage has 3"),
    ],
    ids=["once", "by-stage"],
)
def test_more_layers_than_a_stage_has_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([*WORDS, *words.split()])


def test_a_stage_with_fewer_layers_computes_only_those_again() -> None:
    one, two = np.ones((1, 1)), np.full((1, 1), 2.0)
    line = Linear(fixed=one, layer=two, again=Again(most=np.array([3]), layer=one))
    assert [float(line.of(np.array([[count]]))[0, 0]) for count in (0, 2, 3, 5)] == [1, 7, 10, 14]
    assert line.take(np.array([0])).again is not None


@pytest.mark.parametrize("text", ["full:0", "full:", "full:x", "selective:2", "all"])
def test_another_text_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.recompute=.* must be none, selective, full, or full:N") as caught:
        compose([*WORDS, f"parallel.recompute='{text}'"])
    assert len(str(caught.value).splitlines()) == 1


def test_a_plan_keeps_the_number_of_layers() -> None:
    content = make_plan(compose([*WORDS, "parallel.recompute=full:3"]), "test/again").as_json()
    assert content["recompute"] == "full:3"
    assert Plan.parse(content, Path()).recompute.layers == 3
    with pytest.raises(PlanFault, match=r'recompute="full:0" must be none, selective, full'):
        Plan.parse({**content, "recompute": "full:0"}, Path())


def test_a_search_tries_the_numbers_that_it_is_given() -> None:
    given, _ = split(["parallel.recompute=none,full:3,full"])
    assert given == {"recompute": ("none", "full:3", "full")}
    assert [one.layers for one in given["recompute"]] == [None, 3, None]


def test_a_search_refuses_more_layers_than_the_model_has() -> None:
    words = [*WORDS[:2], "parallel.recompute=none,full:99"]
    with pytest.raises(
        SearchError, match=r"^parallel\.recompute=full:99 computes 99 layers .* has 6; use full for all"
    ):
        inputs.read(words)


@pytest.mark.parametrize(("layers", "launched"), [((2, 4), "full:3"), ((3, 3), "full:3"), ((2, 2), "full")])
def test_a_plan_is_launched_with_no_more_layers_than_a_stage_has(layers: tuple[int, ...], launched: str) -> None:
    one = Parallelism(global_batch_size=4, pipeline=2, partition=layers, recompute=Recompute("full:3"))
    assert one.configured().recompute == launched
