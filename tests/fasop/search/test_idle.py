"""Plans that leave GPUs idle say so, and the best plan without these nodes stands beside them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from conf.compose import compose
from conf.schema.values.partition import Partition
from fasop.search.arguments import Arguments
from fasop.search.findings.idle_gpus import idle, left, notes
from fasop.search.inputs import read
from fasop.search.plan import Plan, by_time
from fasop.search.run import best_plans
from launch.cli import main
from megatron_ext.contract.parallel_config import Schedule

SLOW = (
    *("cluster=a100x8_a10x8", "model=xl", "train.precision=fp16", "parallel.global_batch_size=16"),
    *("cluster.groups.a100.count=2", "cluster.groups.a10.count=2", "cluster.groups.a10.inter_gbit_per_s=1"),
    "parallel.schedule=one_f_one_b",
)
"""A10 nodes that are not worth their messages."""


@pytest.fixture(scope="module")
def everywhere() -> tuple[list[Plan], list[str]]:
    """On all nodes."""
    sought = best_plans(read([*SLOW, "parallel.data=8"]), Arguments(top=3, leave_out=False))
    return [*sought.plans], [*sought.notes]


@pytest.mark.parametrize(
    ("data", "chunks", "partition", "gpus", "whole", "where"),
    [
        (8, 1, "16-0-16-16", 8, ("a10",), "a10"),
        (8, 1, "48-0-0-0", 16, ("a10", "a10"), "a10*2"),
        (8, 1, "0-24-24-0", 0, (), ""),
        (4, 1, "8-8-0-8-8-0-8-8", 8, (), "4 of 8 GPUs of a10 (on 2 nodes)"),
        (4, 1, "8-8-0-0-8-0-8-16", 12, ("a10",), "a10, 4 of 8 GPUs of a10"),
        (8, 2, "8-0-8-8-8-0-8-8", 8, ("a10",), "a10"),
        (8, 2, "8-0-8-8-8-8-0-8", 0, (), ""),
    ],
    ids=["one-node", "two-nodes", "ends", "halves", "both", "chunks", "one-chunk"],
)
def test_gpus_of_stages_without_layers_are_counted_on_their_nodes(
    everywhere: tuple[list[Plan], list[str]],
    data: int,
    chunks: int,
    partition: str,
    gpus: int,
    whole: tuple[str, ...],
    where: str,
) -> None:
    plan = everywhere[0][0]
    kinds = {node.name: node for node in plan.nodes}
    schedule = Schedule.interleaved if chunks > 1 else Schedule.one_f_one_b
    layers = Partition.parse(partition).layers
    parallel = replace(
        plan.training.parallel,
        tensor=1,
        data=data,
        pipeline=32 // data,
        schedule=schedule,
        chunks=chunks,
        partition=layers,
    )
    nodes = [kinds[name] for name in ("a100", "a10", "a10", "a100")]
    training = replace(plan.training, parallel=parallel)
    found = idle(replace(plan, training=training, partition=Partition.parse(partition), nodes=nodes))
    assert (found.gpus, tuple(found.whole), found.where) == (gpus, whole, where)


def test_the_best_plan_without_idle_nodes_stands_beside(everywhere: tuple[list[Plan], list[str]]) -> None:
    plans, told = everywhere
    plan, sentence = plans[0], told[0]
    assert set(idle(plan).whole) == {"a10"}
    assert f"plan 1 leaves GPUs without layers idle, {idle(plan).gpus} of 32: a10*2" in sentence
    assert "without these nodes a100*2, which leave_out=true shows, is the best: " in sentence
    assert "for $65.55 an hour instead of $85.09" in sentence
    both = best_plans(read([*SLOW, "parallel.data=8"]), Arguments(top=1)).plans[0]
    assert both.total < plan.total
    assert left(plan) == {"a100": 2} == left(both)
    shown = notes([both, plan])
    assert len(shown) == 1
    assert "plan 2 leaves GPUs without layers idle" in shown[0]
    assert "without these nodes plan 1 is the best" in shown[0]


def test_of_equally_fast_plans_the_one_on_fewer_nodes_comes_first(everywhere: tuple[list[Plan], list[str]]) -> None:
    plan = everywhere[0][0]
    fewer = replace(plan.training.parallel, data=plan.parallel.data // 2, sharded_optimizer=True)
    other = replace(plan, training=replace(plan.training, parallel=fewer))
    assert sorted([plan, other], key=by_time) == [other, plan]


def test_a_search_may_leave_nodes_out_says_so_and_launch_takes_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"csv={tmp_path / 'plans.csv'}", f"page={tmp_path / 'plans.html'}", f"plan={tmp_path / 'best.yaml'}"]
    assert main(["search", *SLOW, "top=2", *files]) == 0
    told = capsys.readouterr()
    assert "The first plan uses 2 of 4 nodes; leave_out=false shows plans on all of them." in told.err
    words = [word for word in SLOW if not word.startswith("parallel.")]
    taken = compose([*words, f"parallel={tmp_path / 'best.yaml'}"])
    assert str(taken.node_order) == "a100*2"
    assert "The first plan uses 2 of 4 nodes" in (tmp_path / "plans.html").read_text()


def test_idle_gpus_are_marked_in_the_terminal_the_file_and_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [f"csv={tmp_path / 'plans.csv'}", f"page={tmp_path / 'plans.html'}"]
    assert main(["search", *SLOW, "parallel.data=8", "leave_out=false", "top=1", *files]) == 0
    told = capsys.readouterr()
    heading, row, *_ = told.out.splitlines()
    assert heading.rstrip().endswith("idle GPUs")
    assert row.rstrip().endswith("of 32: a10*2")
    (line,) = csv.DictReader((tmp_path / "plans.csv").open())
    assert int(line["idle_gpus"]) > 0
    assert line["idle_nodes"] == "a10*2"
    page = (tmp_path / "plans.html").read_text()
    assert "idle GPUs</th>" in page
    assert "of 32: a10*2" in page
    assert "without these nodes a100*2" in page
