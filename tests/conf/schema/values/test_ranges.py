"""Every number of a configuration has a smallest and a largest value, looked at before anything is computed from it."""

from __future__ import annotations

import re
import resource
import typing
from dataclasses import fields, is_dataclass

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema import experiment
from conf.schema.data import Augment
from conf.schema.train import INTERVALS, KEEPS
from conf.schema.values.partition import Partition
from megatron_ext.contract.keys import Range, ranges_of


def numbers(kind: type) -> set[str]:
    hints = typing.get_type_hints(kind)
    return {
        field.name
        for field in fields(kind)
        if (hints[field.name] is typing.Any and field.default != "auto")
        or field.name in (*INTERVALS, KEEPS)
        or {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}
    }


def test_no_number_of_the_schema_is_without_a_range() -> None:
    classes = {kind for kind in vars(experiment).values() if isinstance(kind, type) and is_dataclass(kind)}
    for kind in {*classes, Augment} - {Partition, Range}:
        assert {*ranges_of(kind)} == numbers(kind), kind


@pytest.mark.parametrize(
    "override",
    [
        "parallel.pipeline=4294967296",
        "model.hidden=100000000001",
        "model.heads=99999999999999999999999999",
        "cluster.groups.local.gpus_per_node=1000000000000",
        "cluster.groups.local.count=999999999",
        "parallel.global_batch_size=1000000007",
        "train.adam_eps=1e300",
        "train.lr=inf",
        "train.comm_timeout_s=99999999999999",
        "executor.meet_min=1e300",
        "data.weight=nan",
        f"model.layers={'9' * 4000}",
    ],
    ids=lambda override: override[:50],
)
def test_what_nobody_can_run_is_refused_before_it_costs_time_or_memory(override: str) -> None:
    key, _, _ = override.partition("=")
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}=.* must be "):
        compose(["experiment=demo", override])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 5
    assert after.ru_maxrss - before.ru_maxrss < 100 * 2**10


def test_more_ranks_than_a_plan_may_have_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"1024 \* 1024 \* 1 = 1048576 ranks; a plan has at most 131072"):
        compose(["parallel=single", "parallel.tensor=1024", "parallel.data=1024", "parallel.global_batch_size=2048"])


@pytest.mark.parametrize("option", ["partition", "gres", "mem", "account", "qos", "constraint"])
@pytest.mark.parametrize("value", ["a\ntouch /tmp/x", "a\rb", "a\x1b]52;c;eA==\x07", "", " "])
def test_an_option_of_slurm_is_one_line(option: str, value: str) -> None:
    cluster = compose(["experiment=seed_a10x8"]).cluster
    group = {**vars(cluster.groups["gpu2"]), option: value}
    with pytest.raises(ConfigError, match=rf"cluster.groups.gpu2.{option}=.* cannot be an option of Slurm"):
        experiment.Cluster(name="a", gpus=cluster.gpus, groups={"gpu2": experiment.NodeGroup(**group)})
