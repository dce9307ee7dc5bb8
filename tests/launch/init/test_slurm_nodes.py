"""sinfo's lines become groups that Slurm can be asked for, each node in one of them."""

from __future__ import annotations

import pytest

from launch.errors import LaunchError
from launch.init.slurm_nodes import Group, groups, parse
from launch.machine.sinfo import Gres, parse_gres

GPU2 = "gpu2-00{n}|gpu2|gpu2*|up|idle|64|UNLIMITED|256000|infinite|10|OFF|gpu:a10:4|a10"
SCAVENGE = "gpu2-00{n}|scavenge|scavenge|up|idle|64|UNLIMITED|256000|infinite|1|REQUEUE|gpu:a10:4|a10"


def lines(*templates: str, count: int = 3) -> str:
    return "\n".join(template.format(n=n) for n in range(1, count + 1) for template in templates)


def found(text: str) -> list[Group]:
    return groups(parse(text))


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:a100:4(S:0-1)", [("a100", 4)]),
        ("gpu:4", [(None, 4)]),
        ("gpu:a10:2(S:0),gpu:a100:4(S:1),mps:400", [("a100", 4), ("a10", 2)]),
        ("gpu:1g.5gb:7", [("1g.5gb", 7)]),
        ("(null)", []),
        ("craynetwork:4", []),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-1)", [("nvidia_a100-sxm4-80gb", 8)]),
        ("gpu:a100:no_consume:4(S:0,2-3)", [("a100", 4)]),
        ("gpu", [(None, 1)]),
        ("gpu:tesla", [("tesla", 1)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gpus_of_a_gres(text: str, gpus: list[tuple[str | None, int]]) -> None:
    assert parse_gres(text) == tuple(Gres(type=kind, count=count) for kind, count in gpus)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("gpu:a100:6(S:0-1),gpu:a100_1g.10gb:14(S:0-1)", "gpu:a100:6 gpu:a100_1g.10gb:14"),
        (
            "gpu:nvidia_a100_1g.5gb:28,gpu:nvidia_a100-sxm4-40gb:4",
            "gpu:nvidia_a100-sxm4-40gb:4 gpu:nvidia_a100_1g.5gb:28",
        ),
        ("gpu:1g.5gb:7,gpu:4", "gpu:4 gpu:1g.5gb:7"),
        ("gpu:2g.20gb:3,shard:30,mps:400,gpu:a30:1", "gpu:a30:1 gpu:2g.20gb:3"),
        ("gpu:a100-mig:9,gpu:k80:1", "gpu:k80:1 gpu:a100-mig:9"),
        ("gpu:a100_1g_10gb:14,gpu:A100:2", "gpu:A100:2 gpu:a100_1g_10gb:14"),
        ("gpu:1g.5gb:7,gpu:3g.20gb:2", "gpu:1g.5gb:7 gpu:3g.20gb:2"),
        ("gpu:a10:8,gpu:a100:2", "gpu:a100:2 gpu:a10:8"),
        ("gpu:rtx_2080_ti:8,gpu:rtx_3090:2", "gpu:rtx_3090:2 gpu:rtx_2080_ti:8"),
        ("gpu:p100:9,gpu:t4:12,gpu:v100l:1", "gpu:v100l:1 gpu:t4:12 gpu:p100:9"),
        ("gpu:quadro_rtx_6000:7,gpu:rtx_a6000:1", "gpu:rtx_a6000:1 gpu:quadro_rtx_6000:7"),
        ("gpu:k80:20,gpu:ours:8,gpu:h100_nvl:1", "gpu:h100_nvl:1 gpu:ours:8 gpu:k80:20"),
        ("gpu:a100_40gb:6,gpu:a100_80gb:2", "gpu:a100_80gb:2 gpu:a100_40gb:6"),
        ("gpu:ours:1,gpu:theirs:2", "gpu:theirs:2 gpu:ours:1"),
    ],
    ids=lambda value: value.replace(":", "-"),
)
def test_whole_gpus_are_asked_for_before_parts_and_faster_ones_before_slower(text: str, order: str) -> None:
    assert " ".join(map(str, parse_gres(text))) == order
    other_way = ",".join(reversed(text.split(",")))
    assert parse_gres(other_way) == parse_gres(text)


def test_a_group_of_nodes_with_whole_gpus_and_parts_uses_the_whole_ones() -> None:
    mixed = GPU2.replace("gpu:a10:4", "gpu:a100:6(S:0-1),gpu:a100_1g.10gb:14(S:0-1)")
    (group,) = found(lines(mixed))
    assert (str(group.gres), [str(gres) for gres in group.other_gres]) == ("gpu:a100:6", ["gpu:a100_1g.10gb:14"])


def test_a_node_counts_once_in_a_partition_whose_jobs_need_not_give_way() -> None:
    (group,) = found(lines(SCAVENGE, GPU2))
    assert (group.name, group.partition, group.nodes) == ("gpu2", "gpu2", ("gpu2-001", "gpu2-002", "gpu2-003"))
    assert group.others == ("scavenge",)
    assert group.options == ["--partition=gpu2", "--gres=gpu:a10:4"]


def test_nodes_that_are_down_are_named_and_not_counted() -> None:
    states = GPU2.replace("idle", "{n}state")
    text = lines(states, count=4).replace("1state", "mix").replace("2state", "drng").replace("3state", "down*")
    (group,) = found(text.replace("4state", "idle*"))
    assert (group.nodes, group.unusable) == (("gpu2-001",), ("gpu2-002", "gpu2-003", "gpu2-004"))


def test_a_feature_tells_nodes_of_a_partition_apart() -> None:
    small = GPU2.replace("|64|", "|32|").replace("gpu2-", "old-").replace("|a10", "|a10,old")
    new, old = found(lines(GPU2.replace("|a10", "|a10,new"), small))
    assert {(new.name, new.cpus, new.constraint), (old.name, old.cpus, old.constraint)} == {
        ("gpu2-a10-1", 32, "old"),
        ("gpu2-a10-2", 64, "new"),
    }


def test_nodes_that_slurm_cannot_be_asked_for_apart_are_one_group_of_the_least() -> None:
    small = GPU2.replace("|64|UNLIMITED|256000|", "|32|UNLIMITED|128000|").replace("gpu2-", "old-")
    (group,) = found(lines(GPU2, small))
    assert (len(group.nodes), group.cpus, group.constraint) == (6, 32, None)


PLAIN = GPU2.replace("gpu:a10:4|a10", "(null)|plain").replace("gpu2-", "cpu-")


@pytest.mark.parametrize("other", ["gpu2", "fast"], ids=["of the same partition", "with a partition of their own"])
def test_nodes_without_gpus_are_asked_for_by_a_feature_that_nodes_with_gpus_lack(other: str) -> None:
    more = [GPU2.replace("|gpu2|gpu2*|", f"|{other}|{other}|")] if other != "gpu2" else []
    found_groups = found(lines(GPU2, *more, PLAIN))
    assert [group.constraint for group in found_groups if group.gres is None] == ["plain"]
    assert [group.constraint for group in found_groups if group.gres is not None] == [None]
    assert not any(group.strangers for group in found_groups)


def test_gpus_without_a_type_are_not_mixed_with_nodes_without_gpus() -> None:
    untyped = GPU2.replace("gpu:a10:4|a10", "gpu:4|(null)")
    gpus, plain = found(lines(untyped, PLAIN))
    assert (str(gpus.gres), len(gpus.nodes), plain.gres, len(plain.nodes)) == ("gpu:4", 3, None, 3)


def test_nodes_that_slurm_may_give_instead_are_named() -> None:
    untyped = GPU2.replace("gpu:a10:4|a10", "gpu:4|(null)").replace("gpu2-", "any-")
    groups_of = {str(group.gres): group for group in found(lines(GPU2, untyped, PLAIN.replace("plain", "(null)")))}
    a10 = tuple(f"gpu2-00{n}" for n in (1, 2, 3))
    assert groups_of["gpu:a10:4"].strangers == ()
    assert groups_of["gpu:4"].strangers == a10
    assert groups_of["None"].strangers == (*(f"any-00{n}" for n in (1, 2, 3)), *a10)


def test_types_of_gpu_in_a_partition_are_groups_with_names_of_their_own() -> None:
    other = GPU2.replace("a10", "l40s").replace("gpu2-", "l-")
    assert sorted(group.name for group in found(lines(GPU2, other))) == ["gpu2-a10", "gpu2-l40s"]


def test_memory_that_hardly_differs_makes_no_groups() -> None:
    text = lines(GPU2.replace("256000", "25{n}000"))
    assert [len(group.nodes) for group in found(text)] == [3]


@pytest.mark.parametrize(
    ("partition", "name"), [("gpu 2+", "gpu_2_"), ("a.b", "a_b"), ("1gpu", "p_1gpu"), ("on", "p_on")]
)
def test_a_name_that_no_key_may_have_is_changed(partition: str, name: str) -> None:
    (group,) = found(lines(GPU2.replace("|gpu2|gpu2*|", f"|{partition}|{partition}*|")))
    assert (group.name, group.partition) == (name, partition)


def test_cpus_that_a_partition_keeps_from_its_jobs_are_not_asked_for() -> None:
    (group,) = found(lines(GPU2.replace("|UNLIMITED|", "|48|")))
    assert group.cpus == 48


def test_reserved_nodes_are_not_counted() -> None:
    text = lines(GPU2.replace("idle", "{n}state"), count=2).replace("1state", "resv").replace("2state", "idle")
    assert [(group.nodes, group.unusable) for group in found(text)] == [(("gpu2-002",), ("gpu2-001",))]


def test_nodes_under_maintenance_are_not_counted() -> None:
    text = lines(GPU2.replace("idle", "{n}state"), count=2).replace("1state", "mix$").replace("2state", "idle")
    assert [(group.nodes, group.unusable) for group in found(text)] == [(("gpu2-002",), ("gpu2-001",))]


@pytest.mark.parametrize("state", ["inact", "down", "drain"])
def test_a_partition_that_is_not_up_leaves_its_nodes_to_another_one(state: str) -> None:
    closed = GPU2.replace("|up|", f"|{state}|")
    (group,) = found(lines(closed, SCAVENGE))
    assert (group.partition, len(group.nodes), group.others) == ("scavenge", 3, ("gpu2",))
    (group,) = found(lines(closed))
    assert (group.availability, group.nodes, len(group.unusable)) == (state, (), 3)


def test_a_line_that_is_not_understood_is_shown() -> None:
    with pytest.raises(LaunchError, match="cannot parse a line of sinfo: a\\|b"):
        parse("a|b\n")
