"""Options of sbatch that a configuration gives as they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.executors.sbatch import Component, component

MIXED = "experiment=seed_a100x1_a10x7"


def options(*overrides: str, group: str = "gpu2") -> dict[str, str]:
    found: Component = component(group, compose([MIXED, *overrides]).cluster)
    return dict(found.sbatch)


def test_a_groups_options_come_before_those_of_all_groups() -> None:
    given = [
        "+cluster.sbatch={reservation: summer, licenses: 'matlab:1', begin: 12:30}",
        "+cluster.groups.gpu2.sbatch={reservation: null, nice: 0100, exclusive: ''}",
    ]
    assert options(*given) == {"licenses": "matlab:1", "begin": "12:30", "nice": "0100", "exclusive": ""}
    assert options(*given, group="hgx")["reservation"] == "summer"


@pytest.mark.parametrize(
    ("given", "excluded"),
    [
        (["cluster.exclude=[gpu07,'gpu[03-05]']"], "gpu07,gpu[03-05]"),
        (["cluster.exclude=[a]", "+cluster.groups.gpu2.sbatch={exclude: 'b,c'}"], "b,c,a"),
        (["+cluster.groups.gpu2.sbatch={exclude: b}"], "b"),
        ([], None),
    ],
    ids=["all groups", "both", "one group", "none"],
)
def test_nodes_that_are_excluded_are_one_list(given: Sequence[str], excluded: str | None) -> None:
    assert options(*given).get("exclude") == excluded


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("+cluster.sbatch={nodes: 2}", "cluster.sbatch.nodes: tdpp decides on --nodes itself: the plan says"),
        ("+cluster.sbatch={ntasks-per-gpu: 2}", "cluster.sbatch.ntasks-per-gpu: tdpp decides on"),
        ("+cluster.groups.hgx.sbatch={signal: TERM}", "cluster.groups.hgx.sbatch.signal: tdpp decides on"),
        ("+cluster.sbatch={dependency: 'after:7'}", "executor.after=RUN waits for another run"),
        ("+cluster.sbatch={export: ALL}", "cluster.environment and cluster.environment_from give"),
        ("+cluster.groups.hgx.sbatch={qos: high}", "this option has a key of its own: cluster.groups.NAME.qos"),
        ("+cluster.sbatch={time: '10'}", "this option has a key of its own: cluster.groups.NAME.time_min"),
        ("+cluster.sbatch={depend: x}", "cluster.sbatch: 'depend' is not the long name of an option"),
        ("+cluster.sbatch={A: x}", "'A' is not the long name of an option"),
        ("+cluster.sbatch={reservation: ' '}", "cluster.sbatch.reservation=' ' cannot be an option of Slurm"),
        ("+cluster.sbatch={quiet: ''}", "cluster.sbatch.quiet: tdpp decides on --quiet itself: tdpp finds the run's"),
        ("cluster.exclude=['a b']", "cluster.exclude: 'a b' is not a node"),
        ("cluster.exclude=['gpu[,]']", "cluster.exclude: 'gpu[,]' is not a node"),
        ("cluster.exclude=['gpu[1-2-3]']", "cluster.exclude: 'gpu[1-2-3]' is not a node"),
        ("executor.after=tiny", "executor.after=tiny: only Slurm's queue waits for another run"),
    ],
    ids=str,
)
def test_what_tdpp_gives_itself_is_refused_with_the_reason(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([MIXED, "executor=local", given])
    assert message in str(caught.value)


def test_a_host_that_is_excluded_is_not_started_on() -> None:
    with pytest.raises(ConfigError, match=r"executor\.hosts names b, which cluster\.exclude leaves out"):
        compose(["experiment=demo", "cluster.exclude=[b]", "executor=hosts", "executor.hosts=[a:2,b:2]"])
