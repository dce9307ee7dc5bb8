"""A group with too few nodes that take jobs is named with those that are absent, and a way to go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.compose import compose
from conf.schema.cluster import Cluster, NodeGroup
from launch.control.executors.sbatch import Component, component
from launch.control.executors.slurm import Shortage, shortages
from launch.machine.sinfo import parse

LINE = "gpu2-{n:03d}|gpu2|gpu2*|{up}|{state}|64|UNLIMITED|256000|infinite|10|OFF|{gres}|a10,ib"
GROUP = NodeGroup(
    gpu="a10",
    gpus_per_node=4,
    partition="gpu2",
    gres="gpu:a10:4",
    cpus_per_task=64,
    intra_gbit_per_s=100,
    intra_latency_us=5,
    inter_gbit_per_s=10,
    inter_latency_us=5,
)


def gpu2(exclude: list[str] | None = None, **changes: object) -> Component:
    shipped = compose(["experiment=seed_a100x1_a10x7"]).cluster
    group = replace(GROUP, **changes)  # type: ignore[arg-type]
    return component("gpu2", Cluster(name="c", gpus=shipped.gpus, groups={"gpu2": group}, exclude=exclude or []))


GPU2 = gpu2()


def of_states(*states: str, gres: str = "gpu:a10:4", up: str = "up") -> str:
    return "\n".join(LINE.format(n=n, state=state, gres=gres, up=up) for n, state in enumerate(states, 1))


def found(text: str, wanted: int, asked: Component = GPU2) -> Shortage | None:
    return next(iter(shortages([(asked, wanted)], parse(text))), None)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (["idle", "down", "mix"], "gpu2: 2 of 3 usable, gpu2-002 is down"),
        (["idle", "down*", "down"], "gpu2: 1 of 3 usable, gpu2-002, gpu2-003 are down"),
        (["drain", "drng", "idle*"], "gpu2: 0 of 3 usable, {}"),
        (["resv", "idle", "maint"], "gpu2: 1 of 3 usable, gpu2-001 is reserved, gpu2-003 is under maintenance"),
        (["unk", "idle~", "idle#"], "gpu2: 2 of 3 usable, gpu2-001 is unknown to Slurm"),
        (["down"] * 6, "gpu2: 0 of 6 usable, gpu2-001, gpu2-002, gpu2-003, gpu2-004 and 2 others are down"),
        (["idle", "alloc"], "gpu2: 2 of 2 usable"),
    ],
    ids=["down", "two down", "none left", "reserved", "unknown and asleep", "many", "never enough"],
)
def test_absent_nodes_are_named_with_what_they_are(states: list[str], message: str) -> None:
    several = "gpu2-001 is drained, gpu2-002 is draining, gpu2-003 is not answering Slurm"
    assert str(found(of_states(*states), 3)) == message.format(several)


@pytest.mark.parametrize("states", [["idle", "down", "mix"], ["alloc", "alloc", "down"], ["idle~", "idle#", "down"]])
def test_nodes_that_are_busy_or_asleep_are_enough(states: list[str]) -> None:
    assert found(of_states(*states), 2) is None


def test_the_way_out_fits_what_is_left() -> None:
    fewer = "go on with cluster.groups.gpu2.count=2 (a launch needs a plan for it: 'tdpp search … cluster.groups.gpu2."
    down, resv, few = (found(of_states("idle", *more), 3) for more in (["idle", "down"], ["idle", "resv"], ["idle"]))
    assert down is not None and down.way_out.startswith(f"wait for them ('sinfo -R' says more), or {fewer}")
    assert resv is not None and resv.way_out.startswith("wait for them ('scontrol show reservation' says more), or ")
    assert few is not None and few.way_out.startswith(f"there are no more such nodes; {fewer}")
    none = found(of_states("down"), 1)
    assert none is not None and none.way_out.endswith(
        "leave gpu2 out of the cluster and of the plan (parallel.node_order)"
    )


@pytest.mark.parametrize(
    ("change", "fitting"),
    [
        ({"partition": None}, 2),
        ({"partition": "debug,gpu2"}, 2),
        ({"partition": "debug"}, 0),
        ({"gres": "gpu:2"}, 2),
        ({"gres": "gpu:a100:1"}, 0),
        ({"gres": "gpu:8"}, 0),
        ({"gres": None}, 2),
        ({"constraint": "a10&ib"}, 2),
        ({"constraint": "a100|ib"}, 2),
        ({"constraint": "a100"}, 0),
        ({"constraint": "[rack1*2&rack2]"}, 2),
        ({"cpus_per_task": 65}, 0),
    ],
    ids=str,
)
def test_only_nodes_that_a_job_of_the_group_could_have_count(change: dict[str, object], fitting: int) -> None:
    shortage = found(of_states("down", "down"), 1, gpu2(**change))  # type: ignore[arg-type]
    assert (shortage.fitting if shortage else 0) == fitting


def test_nodes_that_the_user_excludes_do_not_count() -> None:
    shortage = found(of_states("idle", "idle", "idle"), 3, gpu2(exclude=["gpu2-[002-003]", "elsewhere"]))
    assert str(shortage) == "gpu2: 1 of 3 usable, gpu2-002, gpu2-003 are excluded"
    assert shortage is not None and shortage.way_out.startswith("exclude fewer nodes (cluster.exclude), or go on")


def test_a_closed_partition_has_no_usable_node() -> None:
    assert str(found(of_states("idle", up="down"), 1)) == (
        "gpu2: 0 of 1 usable, gpu2-001 is in a partition that is down"
    )
