"""Searches where links differ by pairs of node groups, held against brute force."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.schema.values.links import PairLink
from fasop.costs.hardware import NodeKind
from fasop.costs.network.links import transfer_s
from fasop.costs.training import Training
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.search.search import Best, explore
from fasop.search.space.candidates import Space
from fasop.search.space.choices import Choices
from fasop.simulation.predict import predict, predict_plan
from tests.support.cases import fewer
from tests.support.fasop.modules import random_profile, words, written
from tests.support.fasop.plans import kinds, mixed
from tests.support.fasop.random_clusters import random_case, with_collectives, with_links
from tests.support.fasop.searches import against_brute_force
from tests.support.fasop.seeds import seeds


def _best_order(nodes: list[NodeKind], training: Training) -> list[str]:
    keep = Best(1)
    explore([Space(training, nodes, Choices())], keep)
    return [node.name for node in keep.plans[0].nodes]


def test_zones_decide_the_order_of_nodes() -> None:
    """Three groups of like nodes: neighbours are those with the quick links, whichever these are."""
    training = replace(Training.of(mixed("parallel.global_batch_size=32")))
    training = replace(training, model=replace(training.model, layers=10))
    a10 = kinds(mixed())[1]

    def nodes(quick: tuple[str, str], other: tuple[str, str]) -> list[NodeKind]:
        table: dict[str, dict[str, PairLink]] = {name: {} for name in "abc"}
        for here in "abc":
            for there in "abc":
                fast = {here, there} in (set(quick), set(other))
                table[here][there] = PairLink(gbit_per_s=100 if fast else 0.5)
        return [replace(a10, name=name, group=replace(a10.group, count=1), links=table[name]) for name in "abc"]

    middles = {
        _best_order(nodes(("a", "b"), ("b", "c")), training)[1],
        _best_order(nodes(("b", "a"), ("a", "c")), training)[1],
    }
    assert middles == {"a", "b"}


@pytest.mark.slow
def test_the_best_order_is_that_of_brute_force_with_links_of_pairs() -> None:
    """In some cases it is another order than without the table."""
    pairs = [[plan.parallel.node_order for plan in both] for both in against_brute_force(14, 40, with_links)]
    assert any(linked != plain for linked, plain in pairs)


@pytest.mark.slow
def test_the_best_plan_is_that_of_brute_force_with_measured_collectives() -> None:
    assert sum(one.total != plain.total for one, plain in against_brute_force(14, 40, with_collectives)) > 3


@pytest.mark.slow
def test_the_replay_and_the_search_agree_on_links_of_pairs() -> None:
    tried = 0
    for seed in seeds(fewer(10, 25)):
        rng = np.random.default_rng(seed)
        training, nodes, choices = random_case(rng)
        linked = with_links(rng, nodes)
        keep = Best(3)
        explore([Space(training, linked, choices)], keep)
        for plan in keep.plans:
            assert predict_plan(plan).iteration_s == pytest.approx(plan.total, rel=1e-9)
            tried += 1
    assert tried > 8


def test_a_plan_on_some_of_the_groups_has_their_part_of_the_table() -> None:
    """As a run that leaves one zone out."""
    words = ("cluster=a10_zones", "model=xl", "train.precision=fp16", "executor=slurm", "parallel.micro_batch_size=1")
    sizes = ("parallel.global_batch_size=8", "parallel.tensor=1", "parallel.data=4", "parallel.pipeline=4")
    within, across = (
        predict(compose([*words, *sizes, f"parallel.node_order={order}", "parallel.partition=null"])).iteration_s
        for order in ("west*4", "west*2+east*2")
    )
    assert 1.3 * within < across


def test_messages_of_a_module_of_ones_own_have_the_bandwidth_of_their_size(tmp_path: Path) -> None:
    """Two nodes, and one cut: in the middle of a module whose cut there has the largest message."""
    profile = random_profile(np.random.default_rng(3), tmp_path, 5)
    sizes = ("parallel.global_batch_size=8", "parallel.pipeline=2", "parallel.micro_batch_size=2")
    path = str(written(profile, tmp_path))
    inputs = read(words(tmp_path, "cluster.groups.local.gpus_per_node=1", *sizes), path)
    (node,), link = inputs.kinds, PairLink(gbit_per_s_by_bytes=((1000, 0.1), (10**8, 1.0)))
    two = [replace(node, name=name, links={other: link}) for name, other in ("ab", "ba")]
    (plan,) = best_plans(replace(inputs, kinds=two), Arguments(top=1, leave_out=False)).plans
    assert predict_plan(plan).iteration_s == pytest.approx(plan.total)
    sent = plan.training.messages
    cut = int(np.argmax(sent[:-1]))
    (hop, _), seconds = plan.pipelines.messages(np.array([[cut], [len(sent) - 1 - cut]])), transfer_s(link, sent[cut])
    assert seconds is not None
    assert hop[0, 0] == pytest.approx(node.group.inter_latency_us * 1e-6 + seconds)
