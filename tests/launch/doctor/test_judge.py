"""What `tdpp doctor` says of what the nodes found: a table of cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.run_folder.gpu_lines import entries
from conf.visible import size_text
from launch.doctor.devices import devices
from launch.doctor.findings import Check, Level, Link, Looked, NodeFindings, RankFindings, Taken
from launch.doctor.judge import Case, checkpoint_bytes, judge

SEED = compose(["experiment=seed_a100x1_a10x7", "container=none", "executor=slurm"])
LOCAL = compose(["experiment=demo"])
GIB = 2**30
FOUND_AS = {"hgx": "NVIDIA A100-SXM4-40GB", "gpu2": "NVIDIA A10"}
MEMORY = {"hgx": 39.4 * GIB, "gpu2": 22.1 * GIB}


def rank(number: int, **changes: Any) -> RankFindings:
    """A rank of the seed's cluster, four on a node, that found nothing wrong."""
    group = "hgx" if number < 4 else "gpu2"
    sizes = {"hgx": (1500.0, 1600.0), "gpu2": (100.0, 110.0)}
    neighbours = [number + 1] if number % 4 < 3 else []
    links = [
        Link(to=other, latency_us=8.0, gbit_per_s=sizes[group][0], gbit_per_s_back=sizes[group][1])
        for other in neighbours
    ]
    links += [Link(to=(number + 4) % 32, latency_us=18.0, gbit_per_s=9.0, gbit_per_s_back=9.5)]
    fine = RankFindings(
        rank=number,
        stage="done",
        exit_code=0,
        torch="2.1.0",
        nccl="2.18.1",
        gpus=(FOUND_AS[group],) * 4,
        memory=(int(MEMORY[group] - GIB), int(MEMORY[group])),
        all_reduce_ms=1.0 + number / 10,
        clock=(0, 0) if number < 4 else (2_000_000, 15_000),
        links=tuple(links),
    )
    return replace(fine, **changes)


def node(number: int, **changes: Any) -> NodeFindings:
    fine = NodeFindings(
        name=f"gpu2-{number - 1}" if number else "hgx-0",
        group="gpu2" if number else "hgx",
        wanted=4,
        host=f"n{number:03d}",
        python="3.8.10",
        cpus=16,
        files={"/data/my.bin": Looked(bytes=1000), "/data/my.idx": Looked(bytes=100)},
        maps={"/data/my": Looked(folder=Path("/data"))},
        disk=500 * GIB,
        shared_memory=64 * GIB,
        address=f"10.1.0.{10 + number}",
        interface="ib0",
        unreached={},
        ranks=tuple(rank(4 * number + index) for index in range(4)),
    )
    return replace(fine, **changes)


ALL = tuple(node(number) for number in range(8))


def but(*changed: NodeFindings) -> tuple[NodeFindings, ...]:
    """All nodes, some of them otherwise."""
    names = {one.name: one for one in changed}
    return tuple(names.get(one.name, one) for one in ALL)


def with_rank(number: int, **changes: Any) -> NodeFindings:
    ranks = tuple(rank(one.rank, **changes) if one.rank == number else one for one in ALL[number // 4].ranks)
    return node(number // 4, ranks=ranks)


def judged(nodes: tuple[NodeFindings, ...] = ALL, **changes: Any) -> dict[tuple[str, str], Check]:
    case = Case(experiment=SEED, groups=("hgx", *["gpu2"] * 7), cuda=True, nodes=nodes, lost={})
    return {(check.where, check.what): check for check in judge(replace(case, **changes))}


def test_a_line_tells_of_each_check_of_each_group_when_all_is_well() -> None:
    found = judged()
    assert {check.level for check in found.values()} == {Level.ok}
    assert {place: check.text for place, check in found.items() if place[0] != "hgx"} == {
        ("gpu2", "nodes"): "n001, n002, n003, n004, n005, n006, n007",
        ("gpu2", "software"): "python 3.8.10, torch 2.1.0, NCCL 2.18.1",
        ("gpu2", "GPUs"): "4 x NVIDIA A10 on each node, free",
        ("gpu2", "data"): f"{SEED.data.prefix}: 1.07 KiB, readable",
        ("gpu2", "disk"): "500.0 GiB free in runs_dir; a checkpoint takes 17.4 GiB",
        ("gpu2", "ports"): "all nodes reach each other",
        (
            "gpu2",
            "open ports",
        ): "ranks listen on free ports of 10.1.0.11 (ib0), 10.1.0.12 (ib0) and on 5 more nodes; gloo "
        "and NCCL accept anybody who can reach them",
        ("all nodes", "all-reduce"): "correct on all 32 ranks, 1 MiB in 4.1 ms",
        ("all nodes", "clocks"): "at most 2.000 ms off hgx-0's, accurate to 15 us",
        ("gpu2", "links in a node"): "100 Gbit/s, 8 us (slowest of 21: gpu2-0); configured 128 Gbit/s, 10 us; "
        "a message of the plan takes 1.3 times as long as configured",
        ("gpu2", "links between nodes"): "36 Gbit/s, 18 us (slowest of 6: gpu2-0 - gpu2-1); configured 40 Gbit/s, "
        "20 us; a message of the plan takes 1.1 times as long as configured",
        ("hgx - gpu2", "links between nodes"): "36 Gbit/s, 18 us (slowest of 2: hgx-0 - gpu2-0); configured 40 Gbit/s, "
        "20 us; a message of the plan takes 1.1 times as long as configured",
    }


READING = (
    "2026-11-21T22:02:10+09:00 n001: 2 GPUs, reading 1, every 1 s\n"
    "[0] NVIDIA A10       | 88'C,  97 % | 11468 / 22731 MB |  80 / 150 W | - | GPU-0 | clocks: {}\n"
    "[1] NVIDIA A10       | 61'C,  97 % | 11468 / 22731 MB | 148 / 150 W | - | GPU-1 | clocks: power cap\n"
)
FAULT = "GPU 1 (NVIDIA A10): it has no spare memory rows left for those that fail; have it replaced"


@pytest.mark.parametrize(
    ("clocks", "fault", "level", "text"),
    [
        ("-", "", Level.ok, "no GPU has a fault or lower clocks from heat or its power supply"),
        (
            "hardware slowdown, heat (hardware)",
            "",
            Level.warning,
            "gpu2-0: GPU 0 lowers its clocks: heat (hardware), hardware slowdown; check its cooling",
        ),
        ("-", f"2026-11-21T22:02:10+09:00 {FAULT}\n", Level.warning, f"gpu2-0: {FAULT}"),
    ],
    ids=["fine", "heat", "fault"],
)
def test_what_the_gpus_drivers_say_is_judged(clocks: str, fault: str, level: Level, text: str) -> None:
    found = judged(readings={"gpu2-0": entries(fault + READING.format(clocks))})
    assert (found["gpu2", "GPU driver"].level, found["gpu2", "GPU driver"].text) == (level, text)
    assert ("hgx", "GPU driver") not in found


NO_GPU = "torch 2.1.0 sees no GPU: Found no NVIDIA driver"
OTHER_SOFTWARE = node(3, ranks=tuple(rank(number, torch="2.13.0") for number in range(12, 16)))


@pytest.mark.parametrize(
    ("wrong", "place", "level", "text"),
    [
        (
            node(2, ranks=tuple(rank(number, gpus=("NVIDIA A10",) * 3) for number in range(8, 12))),
            ("gpu2", "GPUs"),
            Level.error,
            "gpu2-1: torch sees 3, but the plan needs 4 x A10 (cluster.groups.gpu2.gpus_per_node); make sure that",
        ),
        (
            node(2, ranks=tuple(rank(n, gpus=(), failed=NO_GPU, stage="alone") for n in range(8, 12))),
            ("gpu2", "GPUs"),
            Level.error,
            f"gpu2-1: {NO_GPU}, but the plan needs 4 x A10 (cluster.groups.gpu2.gpus_per_node)",
        ),
        (
            node(0, ranks=tuple(rank(number, gpus=("NVIDIA A10",) * 4) for number in range(4))),
            ("hgx", "GPUs"),
            Level.warning,
            "hgx-0: found NVIDIA A10, but cluster.groups.hgx.gpu=a100_40gb is A100-40GB",
        ),
        (
            with_rank(9, memory=(int(2.2 * GIB), int(22.1 * GIB))),
            ("gpu2", "GPUs"),
            Level.warning,
            "gpu2-1: the GPU of rank 9 has only 2.2 of 22.1 GiB free: another process uses it",
        ),
        (
            with_rank(0, memory=(int(19 * GIB), int(20 * GIB))),
            ("hgx", "GPUs"),
            Level.warning,
            "hgx-0: its GPU has 20.0 GiB, but cluster.gpus.a100_40gb.memory_gib=39.59",
        ),
        (
            node(5, files=dict.fromkeys(("/data/my.bin", "/data/my.idx"), Looked(error="Permission denied"))),
            ("gpu2", "data"),
            Level.error,
            "gpu2-4: /data/my.bin, /data/my.idx: Permission denied; data.prefix and train.load must name the same",
        ),
        (
            node(5, maps={"/data/my": Looked(folder=Path("/home/me/.cache/tdpp"))}),
            ("gpu2", "index maps"),
            Level.warning,
            "gpu2-4: /data/my is read-only, so its index maps go to /home/me/.cache/tdpp; ",
        ),
        (
            node(5, maps={"/data/my": Looked(error="/data/my: its index maps cannot be written in /data or in /x")}),
            ("gpu2", "index maps"),
            Level.error,
            "gpu2-4: /data/my: its index maps cannot be written",
        ),
        (
            node(5, files={"/data/my.bin": Looked(bytes=999), "/data/my.idx": Looked(bytes=100)}),
            ("gpu2", "data"),
            Level.error,
            "gpu2-4: /data/my.bin: 999 bytes, but 1000 on hgx-0; ",
        ),
        (
            node(1, disk=10 * GIB),
            ("gpu2", "disk"),
            Level.error,
            "gpu2-0: 10.0 GiB free in runs_dir; a checkpoint takes",
        ),
        (node(1, disk=30 * GIB), ("gpu2", "disk"), Level.warning, "gpu2-0: 30.0 GiB free in runs_dir; a checkpoint"),
        (node(1, shared_memory=2**26), ("gpu2", "disk"), Level.warning, "gpu2-0: 64 MiB free in /dev/shm; NCCL wants"),
        (
            OTHER_SOFTWARE,
            ("all nodes", "software"),
            Level.error,
            "torch 2.1.0, NCCL 2.18.1 on hgx-0, gpu2-0, gpu2-1, gpu2-3, gpu2-4, gpu2-5, gpu2-6; torch 2.13.0",
        ),
        (
            node(1, ranks=(), problem="torch cannot be used: No module named 'torch'"),
            ("gpu2", "software"),
            Level.error,
            "gpu2-0: torch cannot be used: No module named 'torch'",
        ),
        (
            node(1, ranks=tuple(rank(number, torch="1.13.1") for number in range(4, 8))),
            ("gpu2", "software"),
            Level.error,
            "gpu2-0: python 3.8.10 and torch 1.13.1; ranks need Python 3.8 and torch 2.0 or newer",
        ),
        (
            with_rank(8, clock=(3_200_000_000, 20_000)),
            ("all nodes", "clocks"),
            Level.warning,
            "gpu2-1: its clock is +3.2 s off hgx-0's; synchronise the nodes' clocks",
        ),
        (
            with_rank(5, links=(Link(to=6, latency_us=8.0, gbit_per_s=100.0, gbit_per_s_back=12.0),)),
            ("gpu2", "links in a node"),
            Level.warning,
            "12 Gbit/s, 8 us (slowest of 21: gpu2-0); configured 128 Gbit/s, 10 us; a message of the plan takes 10 "
            "times",
        ),
        (
            node(3, unreached={"hgx-0": "timed out", "gpu2-0": "timed out"}),
            ("gpu2", "ports"),
            Level.warning,
            "gpu2-2: cannot reach hgx-0, gpu2-0 (timed out); nodes must reach every TCP port",
        ),
        (
            node(3, address="8.8.8.8", interface="eth0"),
            ("gpu2", "open ports"),
            Level.warning,
            "gpu2-2: ranks listen on 8.8.8.8 (eth0), a public address; choose an interface of the cluster's own",
        ),
    ],
    ids=[
        "too-few-gpus",
        "no-gpu",
        "other-gpus",
        "gpu-in-use",
        "small-gpu",
        "data-missing",
        "maps-in-the-cache",
        "maps-nowhere",
        "data-differ",
        "disk-full",
        "disk-tight",
        "shared-memory",
        "versions-differ",
        "no-torch",
        "old-torch",
        "clock",
        "slow-link",
        "ports",
        "public-address",
    ],
)
def test_a_fault_of_one_node_is_told_with_its_name_and_its_weight(
    wrong: NodeFindings, place: tuple[str, str], level: Level, text: str
) -> None:
    found = judged(but(wrong))
    assert found[place].level is level
    assert found[place].text.startswith(text)
    everywhere = {("all nodes", "all-reduce"), ("all nodes", "software")}
    assert {check.level for at, check in found.items() if at not in {place, *everywhere}} == {Level.ok}


def with_table(table: str) -> list[Check]:
    """Checks of links between nodes."""
    experiment = compose(
        ["experiment=seed_a100x1_a10x7", "container=none", "executor=slurm", f"+cluster.links={table}"]
    )
    case = Case(experiment=experiment, groups=("hgx", *["gpu2"] * 7), cuda=True, nodes=ALL, lost={})
    return [check for check in judge(case) if check.what == "links between nodes"]


def test_a_pairs_link_is_held_against_the_table_in_each_direction() -> None:
    """36 Gbit/s one way and 38 the other, from either end."""
    pair, own, *odd = with_table(
        "{hgx: {gpu2: {gbit_per_s: 40}}, gpu2: {hgx: {gbit_per_s_by_bytes: {1: 1, 4194304: 160}, latency_us: 5}}}"
    )
    assert own.level is Level.ok
    assert "configured 40 Gbit/s, 20 us" in own.text
    assert (pair.where, pair.level) == ("hgx - gpu2", Level.warning)
    assert pair.text.startswith(
        "36 Gbit/s, 18 us (slowest of 2: gpu2-6 - hgx-0) from gpu2 to hgx; configured 160 Gbit/s, 5 us; a message of "
        "the plan takes 4.4 times as long as configured; check the network in use"
    )
    assert pair.text.endswith("or correct cluster.links.gpu2.hgx")
    assert {(check.where, check.level) for check in odd} == {("cluster.links", Level.warning)}
    assert [check.text.partition(";")[0] for check in odd] == [
        "cluster.links.gpu2.hgx has up to 160 Gbit/s and cluster.links.hgx.gpu2 40: most networks are equal in both "
        "directions",
        "cluster.links.gpu2.hgx has up to 160 Gbit/s, but a node's own link (inter_gbit_per_s) has 40",
    ]


def test_a_table_as_it_was_measured_is_well() -> None:
    found = with_table("{hgx: {gpu2: {gbit_per_s: 36}}, gpu2: {hgx: {gbit_per_s: 38}, gpu2: {latency_us: 18}}}")
    assert {check.level for check in found} == {Level.ok}
    assert len(found) == 2


def test_ranks_that_only_their_own_node_reaches_have_no_open_ports() -> None:
    alone = node(0, address="127.0.0.1", interface="lo")
    assert ("hgx", "open ports") not in judged((alone,), groups=("hgx",))


def test_nodes_with_the_same_fault_are_named_together() -> None:
    text = judged(but(node(2, disk=GIB), node(6, disk=GIB)))["gpu2", "disk"].text
    assert text.startswith("gpu2-1, gpu2-5: 1.0 GiB free")


LOST_ALL = "an all-reduce of 32 ranks failed: Connection closed by peer"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            with_rank(9, stage="meeting", exit_code=-9, all_reduce_ms=None),
            "rank 9 (gpu2-1) hung in meeting",
        ),
        (with_rank(9, stage="meeting", exit_code=-6, all_reduce_ms=None), "rank 9 (gpu2-1) died in meeting"),
        (
            with_rank(9, stage="all-reduce", exit_code=0, all_reduce_ms=None, failed="an all-reduce gave 3 to 3 in …"),
            "rank 9 (gpu2-1), all-reduce: an all-reduce gave 3 to 3 in …",
        ),
        (
            with_rank(9, stage="all-reduce", all_reduce_ms=None, failed=LOST_ALL, symptom=True),
            f"rank 9 (gpu2-1), all-reduce: {LOST_ALL}",
        ),
        (
            with_rank(9, stage="alone", all_reduce_ms=None, hindrance="node gpu2-3 did not join"),
            "not tried: node gpu2-3 did not join",
        ),
        (with_rank(9, stage="alone", exit_code=-9, all_reduce_ms=None), "not tried: not every rank joined"),
    ],
    ids=["hung", "died", "wrong", "lost-others", "hindered", "stopped"],
)
def test_what_ended_the_all_reduce_is_named(changed: NodeFindings, text: str) -> None:
    symptom = node(0, ranks=tuple(rank(n, all_reduce_ms=None, exit_code=0) for n in range(4)))
    check = judged(but(symptom, changed))["all nodes", "all-reduce"]
    assert (check.level, check.text) == (Level.error, text)


def test_the_cause_comes_before_ranks_that_only_lost_others() -> None:
    told = {"stage": "all-reduce", "all_reduce_ms": None, "exit_code": 0}
    symptoms = node(0, ranks=tuple(rank(n, failed=LOST_ALL, symptom=True, **told) for n in range(4)))
    check = judged(but(symptoms, with_rank(9, **(told | {"exit_code": -11}))))["all nodes", "all-reduce"]
    assert check.text == "rank 9 (gpu2-1) died in all-reduce"


def test_a_node_that_told_nothing_hides_nothing_of_the_others() -> None:
    lost = {"gpu2": {"gpu2-6": "told nothing: job 12 is FAILED"}}
    found = judged(ALL[:-1], lost=lost)
    assert found["gpu2", "nodes"].text == "gpu2-6: told nothing: job 12 is FAILED"
    assert {place for place, check in found.items() if check.level is Level.error} == {
        ("gpu2", "nodes"),
        ("all nodes", "all-reduce"),
    }
    assert judged((), lost={"hgx": {"hgx-0": "lost"}}).keys() == {("hgx", "nodes"), ("gpu2", "nodes")}


def test_fewer_cpus_than_ranks_are_a_warning_with_the_way_out() -> None:
    found = judged(but(node(1, cpus=1)), cuda=False)
    assert found["gpu2", "CPUs"].text == (
        "gpu2-0: 1 CPU for 4 ranks: request more with cluster.groups.gpu2.cpus_per_task=4"
    )
    here = replace(node(0, cpus=2), group="local")
    (check,) = devices(LOCAL, False, "local", [here])
    assert check.level is Level.warning
    assert "2 CPUs for 4 ranks: ranks that share a CPU wait for each other" in check.text


def test_a_checkpoint_is_as_large_as_it_is_said_to_be() -> None:
    assert checkpoint_bytes(SEED) == 12 * SEED.model.parameters()
    assert [size_text(size) for size in (0, 1023, 2048, 3.5 * 2**20, 2**40)] == [
        *("0 bytes", "1023 bytes", "2 KiB", "3.5 MiB", "1024.0 GiB")
    ]  # fmt: skip


def test_images_of_docker_that_differ_are_an_error() -> None:
    same = judged(images={one.name: "sha256:1" for one in ALL})["all nodes", "image"]
    assert (same.level, same.text.count("sha256:1")) == (Level.ok, 1)
    other = judged(images={one.name: "sha256:1" for one in ALL} | {"gpu2-3": "sha256:2"})["all nodes", "image"]
    assert other.level is Level.error
    assert "sha256:2 on gpu2-3: put the same container.image=" in other.text


def test_the_interface_that_gloo_takes_is_named_and_one_that_nobody_reaches_is_an_error() -> None:
    name = "what the host's name, n001, resolves to"
    good = Taken(library="gloo", address="10.1.0.11", interface="ib0", why=name)
    home = Taken(library="gloo", address="127.0.1.1", interface="lo", why=name)
    fine = judged(tuple(replace(one, taken=good) for one in ALL))
    assert fine["gpu2", "interface"].text == "gloo uses ib0, by the host's name"
    lost = tuple(replace(one, ranks=tuple(replace(one, all_reduce_ms=None) for one in one.ranks)) for one in ALL)
    wrong = judged(
        (
            replace(lost[0], taken=good, unreached_messages={"gpu2-0": "Connection refused"}),
            *(replace(one, taken=home if one.name == "gpu2-0" else good) for one in lost[1:]),
        )
    )
    assert wrong["gpu2", "interface"].level is Level.error
    assert wrong["gpu2", "interface"].text == (
        f"gpu2-0: gloo uses 127.0.1.1 (lo): {name}, which no other node can reach; set "
        "cluster.environment.GLOO_SOCKET_IFNAME to the interface of the nodes' own network"
    )
    assert wrong["hgx", "interface"].text.startswith(
        "hgx-0: cannot reach the address that gloo uses on gpu2-0 (Connection refused); set cluster.environment."
    )
