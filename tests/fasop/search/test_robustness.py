"""What a plan loses where a part of its nodes is slower, and plans ranked by their worst case."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest

from conf.schema.values.links import PairLink
from fasop.costs.hardware import Factors, NodeKind
from fasop.search import robustness
from fasop.search.arguments import parse
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.robustness import by_worst_case, slowdowns
from fasop.search.run import best_plans
from fasop.simulation.predict import predict_plan

SEED = ("cluster=a100x1_a10x7", "model=small", "train.precision=fp16", "parallel.global_batch_size=16")


def found(*words: str, top: int = 6) -> Sequence[Plan]:
    args = parse([*SEED, "cluster.groups.gpu2.count=3", f"top={top}", *words])
    return best_plans(read(args.overrides), args).plans


@pytest.fixture(scope="module")
def plans() -> Sequence[Plan]:
    return [*found(top=3), *found("leave_out=false", top=3)]


def slowed(node: NodeKind, factor: float) -> NodeKind:
    return replace(node, factors=Factors(forward=factor, backward=factor, optimizer=factor))


def test_a_slower_group_takes_as_long_as_a_cluster_whose_group_is_slower(plans: Sequence[Plan]) -> None:
    plan = plans[0]
    for name in {node.name for node in plan.nodes}:
        (case,) = [one for one in slowdowns(plan, 0.2) if one.what == f"the GPUs of {name}"]
        nodes = [slowed(node, 1.2) if node.name == name else node for node in plan.nodes]
        assert case.seconds == predict_plan(replace(plan, nodes=nodes)).iteration_s


def test_a_slowdown_is_what_a_slower_profile_and_slower_links_say() -> None:
    slower = 1.2
    for plan in found("model=xl", "leave_out=false", "by_stage=false"):
        cases = {case.what: case.seconds for case in slowdowns(plan, slower - 1)}
        for name in {node.name for node in plan.nodes}:
            for what, slow in (("GPUs", measured_slower), ("links", linked_slower)):
                nodes = [slow(node, slower) if node.name == name else node for node in plan.nodes]
                by_hand = predict_plan(replace(plan, nodes=nodes)).iteration_s
                assert cases[f"the {what} of {name}"] == pytest.approx(by_hand, rel=1e-9)


def measured_slower(node: NodeKind, factor: float) -> NodeKind:
    """A node whose profile has longer times; those of an optimizer that was not measured follow from its memory."""
    assert node.profile is not None
    profile = deepcopy(node.profile)
    for part in (part for costs in profile.costs for part in costs.parts.values()):
        for key in ("forward", "backward"):
            object.__setattr__(part, key, getattr(part, key) * factor)
    optimizer = {precision: ns * factor for precision, ns in profile.optimizer_ns_per_parameter.items()}
    return replace(
        node,
        gpu=replace(node.gpu, memory_gb_per_s=node.gpu.memory_gb_per_s / factor),
        profile=replace(profile, optimizer_ns_per_parameter=optimizer),
    )


def linked_slower(node: NodeKind, factor: float) -> NodeKind:
    group = node.group
    return replace(
        node,
        group=replace(
            group,
            intra_gbit_per_s=group.intra_gbit_per_s / factor,
            inter_gbit_per_s=group.inter_gbit_per_s / factor,
            intra_latency_us=group.intra_latency_us * factor,
            inter_latency_us=group.inter_latency_us * factor,
        ),
    )


def test_a_slower_node_costs_no_more_than_its_group_and_no_case_more_than_everything(plans: Sequence[Plan]) -> None:
    for plan in plans:
        usual, *cases = slowdowns(plan, 0.1)
        assert usual.seconds == pytest.approx(predict_plan(plan).iteration_s)
        assert all(usual.seconds <= case.seconds * (1 + 1e-9) for case in cases)
        assert all(case.seconds <= 1.1 * usual.seconds * (1 + 1e-9) for case in cases)
        groups = {case.what: case.seconds for case in cases if case.what.startswith("the GPUs")}
        for case in cases:
            if case.what.startswith("node "):
                name = case.what.partition("(")[2].rstrip(")")
                assert case.seconds <= groups[f"the GPUs of {name}"] * (1 + 1e-9)


@pytest.mark.parametrize("most", [1, *(pytest.param(most, marks=pytest.mark.slow) for most in (3, 10))])
def test_the_first_plans_have_the_best_worst_cases_of_all(plans: Sequence[Plan], most: int) -> None:
    by_time = sorted(plans, key=lambda plan: plan.total)
    for by in (0.1, 0.5, 3.0):
        rated = by_worst_case(by_time, by, most)
        every = sorted(max(case.seconds for case in slowdowns(plan, by)) for plan in plans)
        assert [one.worst.seconds for one in rated[:most]] == every[:most]
        assert len(by_worst_case(plans, by, most=len(plans))) == len(plans)


def test_what_there_is_no_time_for_is_not_rated(plans: Sequence[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "RATED_S", 0.0)
    assert len(by_worst_case(plans, 0.1, most=len(plans))) == 1


def test_a_single_slower_node_keeps_the_links_of_its_group() -> None:
    links = {"hgx": PairLink(gbit_per_s=0.5), "gpu2": PairLink(gbit_per_s=1.0)}
    (own, *_) = found("leave_out=false", top=1)
    plan = replace(own, nodes=[replace(node, links=links) for node in own.nodes])
    usual, *cases = slowdowns(plan, 1e-9)
    assert usual.seconds > 1.01 * slowdowns(own, 1e-9)[0].seconds
    assert all(case.seconds == pytest.approx(usual.seconds) for case in cases)
