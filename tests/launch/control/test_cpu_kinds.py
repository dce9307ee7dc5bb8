"""Processes of this machine that stand for kinds of GPUs train on its processors."""

from __future__ import annotations

from conf.compose import compose
from launch.control.planning.plan import make_plan


def test_nodes_whose_kinds_are_named_after_cpus_have_names_of_their_own_and_no_gpu() -> None:
    plan = make_plan(compose(["experiment=vit_jabas_digits"]), "test/run")
    assert plan.device == "cpu"
    assert [node.gpu for node in plan.nodes] == ["CPU fast", "CPU slow"]
