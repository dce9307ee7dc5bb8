"""The nodes that an elastic run goes on with after an epoch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from launch.control.planning.predictions import started_on
from launch.node.elastic.epochs import Logged, chosen, epoch_of
from launch.node.elastic.replan import replanned
from megatron_ext.contract.plan import Plan

SETTINGS = (
    *("elastic.enabled=true", "elastic.epoch=1200", "elastic.restart_s=0", "train.save_interval=5"),
    *("parallel=single", "parallel.global_batch_size=12", "parallel.micro_batch_size=1", "parallel.data=3"),
    *("cluster.groups.local.count=3", "cluster.groups.local.gpus_per_node=1", "train.iterations=1000"),
)


@pytest.fixture(scope="module")
def planned() -> Plan:
    """Three nodes alike at a dollar an hour each, and times to choose by."""
    words = [*SETTINGS, "elastic.by=dollars", "cluster.groups.local.price_per_hour=1"]
    return make_plan(compose(words), "run")


def steady(plan: Plan, seconds: float = 1.0) -> list[Logged]:
    """The log of an epoch whose batch stays."""
    return [Logged(number * 12.0, 12.0, seconds) for number in range(1, 101)]


def with_rest(plan: Plan, rest_s: list[float]) -> Plan:
    """Micro-batches of a second; of three, two and one nodes, what an iteration takes beside them."""
    content = plan.as_json()
    choosing = content["elastic"]["choosing"]
    choosing["micro_batch_s"] = [1.0] * 3
    assert [one["counts"] for one in choosing["candidates"]] == [{"local": count} for count in (3, 2, 1)]
    for one, seconds in zip(choosing["candidates"], rest_s, strict=True):
        one["rest_s"] = seconds
    return Plan.parse(content, plan.folder)


def test_a_plan_has_the_predicted_times_of_all_numbers_of_its_nodes(planned: Plan) -> None:
    assert planned.elastic is not None
    assert planned.elastic.choosing is not None
    assert planned.elastic.prices == [1.0] * 3
    assert [one.counts["local"] for one in planned.elastic.choosing.candidates] == [3, 2, 1]
    assert len({*planned.elastic.choosing.micro_batch_s}) == 1
    assert Plan.parse(planned.as_json(), planned.folder) == planned


def test_the_cheapest_nodes_are_chosen_among_those_that_are_there(planned: Plan) -> None:
    """Gradients cost three nodes 3 s: 7 s of three dollars, 7 of two, 12 of one. Without: 4, 6 and 12."""
    dear = with_rest(planned, [3.0, 1.0, 0.0])
    found = chosen(dear, {0, 1, 2}, steady(dear))
    assert found is not None
    assert found[0] == [0]
    assert found[1].startswith("epoch 1 ended: ")
    assert chosen(with_rest(planned, [0.0, 0.0, 0.0]), {0, 1, 2}, steady(planned)) is None
    one = replanned(dear, {1})
    assert chosen(one, {0, 1, 2}, steady(dear)) is None
    assert chosen(replanned(dear, {0, 1}), {0, 1}, steady(dear)) == ([0], found[1].replace("42.9", "14.3"))


def test_by_time_waiting_nodes_take_part_again(planned: Plan) -> None:
    content = with_rest(planned, [0.0, 0.0, 0.0]).as_json()
    content["elastic"]["choosing"]["by"] = "time"
    alone = replanned(Plan.parse(content, planned.folder), {1})
    found = chosen(alone, {0, 1, 2}, steady(alone))
    assert found is not None
    assert found[0] == [0, 1, 2]
    assert chosen(alone, {1, 2}, steady(alone)) == ([1, 2], found[1].replace("66.7", "50.0"))


def test_a_restart_that_takes_longer_than_it_gains_is_not_made(planned: Plan) -> None:
    """Of an epoch of 100 iterations, one second each on one node, two thirds could be gained at most."""
    content = with_rest(planned, [0.0, 0.0, 0.0]).as_json()
    content["elastic"]["choosing"] |= {"by": "time", "restart_s": 60.0}
    alone = replanned(Plan.parse(content, planned.folder), {1})
    assert chosen(alone, {0, 1, 2}, steady(alone, seconds=1.0)) is not None
    assert chosen(alone, {0, 1, 2}, steady(alone, seconds=0.8)) is None


def test_samples_say_which_epoch_it_is(planned: Plan) -> None:
    assert [epoch_of(planned, consumed) for consumed in (0, 1199, 1200, 2500)] == [0, 0, 1, 2]


def test_after_the_last_epoch_nothing_is_chosen(planned: Plan) -> None:
    dear = with_rest(planned, [3.0, 1.0, 0.0])
    assert chosen(dear, {0, 1, 2}, [Logged(12_000.0, 12.0, 1.0)]) is None


def test_the_public_initial_configuration_says_where_a_run_starts(tmp_path: Path) -> None:
    path = tmp_path / "2_node_config.json"
    path.write_text('{"0": 1, "2": "1", "1": 0}')
    plan = make_plan(compose([*SETTINGS[:1], *SETTINGS[3:], f"elastic.start={path}"]), "run")
    assert plan.used == [0, 2]
    assert sum(plan.micro_batches) == 12


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        pytest.param("[]", "must be numbers of GPUs", id="no-object"),
        pytest.param("{", "cannot be read as JSON", id="no-json"),
        pytest.param({"3": 4}, "0 to 2", id="no-such-node"),
        pytest.param({"a": 4}, "0 to 2", id="no-number"),
        pytest.param({"0": 2}, "give 4 or 0", id="part-of-a-node"),
        pytest.param({"0": 0}, "no node has GPUs", id="none"),
        pytest.param({"0": "4", "1": 0}, "gives GPUs to 1 node, fewer than elastic.min_nodes=2", id="too-few"),
        pytest.param({"0": 4.5}, "give 4 or 0", id="no-whole-number"),
        pytest.param({"0": True, "1": 4}, "give 4 or 0", id="no-number-of-gpus"),
    ],
)
def test_another_initial_configuration_is_refused(tmp_path: Path, content: object, rule: str) -> None:
    path = tmp_path / "start.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=rule) as refused:
        started_on(str(path), [4, 4, 4], min_nodes=2)
    assert str(refused.value).startswith(f"elastic.start={path}: ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(["elastic.by=time"], "elastic.epoch", id="no-epoch"),
        pytest.param(["elastic.by=dollars", "elastic.epoch=5"], "price_per_hour", id="no-price"),
        pytest.param(["elastic.release=true"], "elastic.release=true has no effect", id="nothing-to-release"),
        pytest.param(["elastic.epoch=5"], "elastic.epoch=5 has no effect", id="no-choice"),
    ],
)
def test_what_says_nothing_or_too_little_is_refused(words: list[str], named: str) -> None:
    own = [word for word in SETTINGS if not word.startswith(("elastic.epoch", "elastic.restart"))]
    with pytest.raises(ConfigError, match=named):
        compose([*own, *words])
