"""Which hosts the records of runs call slow or failing, and which not: emulated histories."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from launch.history.hosts import Health, Host, hosts_of
from launch.history.record import HostRecord, RunRecord
from launch.judge.state import State

HOSTS = [f"gpu2-{number:03d}" for number in range(1, 9)]
HOUR = 3600.0


def history(
    seed: int,
    runs: int = 30,
    slow: Mapping[str, float] | None = None,
    failed: Mapping[str, Sequence[int]] | None = None,
    *,
    rule: str = "node-failed",
    noise: float = 0.03,
    far: Mapping[str, float] | None = None,
    nodes: int = 4,
    hosts: Sequence[str] = HOSTS,
) -> list[RunRecord]:
    """Runs of three models on some of the hosts each, in any order of stages, with noisy times. `far` has hosts, or
    links as `host host`, whose messages take so many times as long."""
    draw = random.Random(seed)
    made = []
    for number in range(runs):
        chosen, model = draw.sample(list(hosts), nodes), draw.choice("abc")
        bad = next((host for host in (failed or {}) if number in (failed or {})[host]), None)
        if bad is not None and bad not in chosen:
            chosen[0] = bad
        records = []
        for stage, host in enumerate(chosen):
            took = (5.0 + stage) * (slow or {}).get(host, 1.0) * draw.gauss(1.0, noise)
            records.append(
                HostRecord(
                    host=host,
                    node=f"gpu2-{stage}",
                    gpu="a10",
                    rank_hours=1.0,
                    work={f"{model}{stage}": took},
                    links=messages(chosen, stage, model, draw, far or {}),
                    rule=rule if host == bad else "",
                    reason=f"node gpu2-{stage} is gone without a result" if host == bad else "",
                )
            )
        state = State.succeeded if bad is None else State.failed
        began = number * HOUR
        made.append(
            RunRecord(run=f"r/{number}", state=state, began_unix=began, ended_unix=began + HOUR, hosts=tuple(records))
        )
    return made


def messages(
    chosen: Sequence[str], stage: int, model: str, draw: random.Random, far: Mapping[str, float]
) -> dict[str, float]:
    """From a stage to the next one, whose messages have another size with each model."""
    ends = sorted(chosen[stage : stage + 2])
    if len(ends) < 2:
        return {}
    slower = max(far.get(name, 1.0) for name in (*ends, " ".join(ends)))
    took = ("abc".index(model) + 1) * slower * draw.gauss(1.0, 0.1)
    return {f"{model} {chosen[stage + 1]}": took}


def flagged(records: Sequence[RunRecord]) -> dict[str, Health]:
    return {host.name: host.health for host in hosts_of(records) if host.health is not Health.healthy}


@pytest.mark.parametrize("seed", range(20))
def test_one_slow_and_one_failing_host_are_found_and_no_other(seed: int) -> None:
    records = history(seed, slow={"gpu2-003": 1.1}, failed={"gpu2-006": (11, 23)})
    assert flagged(records) == {"gpu2-003": Health.slow, "gpu2-006": Health.failing}


@pytest.mark.parametrize("seed", range(20))
def test_a_host_with_a_slow_network_is_found_beside_a_slow_and_a_failing_one(seed: int) -> None:
    records = history(seed, slow={"gpu2-003": 1.1}, failed={"gpu2-006": (11, 23)}, far={"gpu2-002": 2.0})
    found = {"gpu2-002": Health.slow, "gpu2-003": Health.slow, "gpu2-006": Health.failing}
    assert flagged(records) == found
    assert of(records, "gpu2-002").why.startswith("its messages to and from ")
    assert not [host.name for host in hosts_of(records) if host.links]


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_link_is_named_and_neither_of_its_hosts(seed: int) -> None:
    records = history(seed, runs=90, far={"gpu2-002 gpu2-005": 2.0})
    assert flagged(records) == {}
    assert [(host.name, *host.links) for host in hosts_of(records) if host.links] == [("gpu2-002", "gpu2-005")]
    assert of(records, "gpu2-002").slow_links[0].startswith("gpu2-002 - gpu2-005: messages take ")


@pytest.mark.parametrize("far", ["gpu2-002 gpu2-003", "gpu2-002", "gpu2-003"])
def test_of_two_hosts_that_always_exchange_messages_neither_is_blamed_for_their_link(far: str) -> None:
    """Two others do the same work beside them."""
    pairs = [
        history(seed, hosts=hosts, nodes=2, far={far: 3.0}) for seed, hosts in enumerate((HOSTS[1:3], HOSTS[3:5]), 1)
    ]
    records = sorted([*pairs[0], *pairs[1]], key=lambda record: record.began_unix)
    assert flagged(records) == {}
    assert [host.slow_links[0][:19] for host in hosts_of(records) if host.links] == ["gpu2-002 - gpu2-003"]


def test_a_slow_network_of_one_of_three_hosts_is_found() -> None:
    assert flagged(history(1, hosts=HOSTS[:3], nodes=3, far={"gpu2-001": 3.0})) == {"gpu2-001": Health.slow}


@pytest.mark.parametrize("seed", range(50))
def test_hosts_of_quiet_runs_are_healthy(seed: int) -> None:
    assert flagged(history(seed)) == {}
    assert not [host.name for host in hosts_of(history(seed)) if host.links]


@pytest.mark.parametrize("seed", range(20))
def test_errors_of_programs_flag_no_host(seed: int) -> None:
    draw = random.Random(seed)
    numbers = draw.sample(range(30), 6)
    failed = {host: [number] for host, number in zip(HOSTS, numbers, strict=False)}
    assert flagged(history(seed, failed=failed, rule="rank-failed")) == {}


def test_a_program_that_always_fails_on_the_only_host_of_its_kind_flags_it_not() -> None:
    records = history(1, hosts=["hgx"], nodes=1, failed={"hgx": (2, 5, 9)}, rule="rank-failed")
    assert flagged(records) == {}


def test_a_program_that_begins_to_fail_on_the_only_host_of_its_kind_flags_it_not() -> None:
    """Compared are runs of the same time: the many good ones before them say nothing of other hosts."""
    records = history(1, runs=300, hosts=["hgx"], nodes=1, failed={"hgx": (290, 294, 299)}, rule="rank-failed")
    assert flagged(records) == {}


def test_thousands_of_failures_are_counted() -> None:
    failed = {host: range(number, 3000, 2) for number, host in enumerate(HOSTS[:2])}
    assert flagged(history(2, runs=3000, nodes=2, hosts=HOSTS[:2], failed=failed, rule="rank-failed")) == {}


def test_a_host_where_programs_fail_far_more_often_than_elsewhere_is_failing() -> None:
    records = history(3, failed={"gpu2-002": (25, 27, 28, 29)}, rule="rank-failed")
    assert flagged(records) == {"gpu2-002": Health.failing}


def test_a_host_that_was_repaired_is_healthy_again() -> None:
    records = history(4, runs=90, failed={"gpu2-006": (1, 3)})
    assert flagged(records) == {}


def test_it_is_said_since_when_a_host_is_slow() -> None:
    before = history(5, runs=40)
    after = [
        replace(record, run=f"late/{number}", began_unix=record.began_unix + 1000 * HOUR)
        for number, record in enumerate(history(6, runs=40, slow={"gpu2-005": 1.3}))
    ]
    found = next(host for host in hosts_of([*before, *after]) if host.name == "gpu2-005")
    first = next(run.run.run for run in found.runs if run.run.run.startswith("late/"))
    assert found.health is Health.slow
    assert found.why.endswith(f"since {first}")


def test_a_driver_that_changed_where_a_host_became_slow_is_named() -> None:
    def with_driver(records: Sequence[RunRecord], driver: str, run: str) -> list[RunRecord]:
        return [
            replace(
                record,
                run=f"{run}/{number}",
                began_unix=record.began_unix + (1000 * HOUR if run == "late" else 0),
                hosts=tuple(replace(host, driver=driver) for host in record.hosts),
            )
            for number, record in enumerate(records)
        ]

    before = with_driver(history(5, runs=40), "535.1", "early")
    after = with_driver(history(6, runs=40, slow={"gpu2-005": 1.3}), "550.2", "late")
    found = of([*before, *after], "gpu2-005")
    assert found.why.endswith(", the first with driver 550.2 after 535.1")
    assert found.driver == ("550.2", found.runs[-1].run.run)


def of(records: Sequence[RunRecord], name: str) -> Host:
    return next(host for host in hosts_of(records) if host.name == name)


def test_a_machine_that_comes_back_under_another_name_is_known_by_its_gpus() -> None:
    def named(record: RunRecord, number: int) -> RunRecord:
        hosts = []
        for host in record.hosts:
            name = "gpu2-103" if host.host == "gpu2-003" and number >= 15 else host.host
            hosts.append(replace(host, host=name, uuids=(f"GPU-{host.host}",)))
        return replace(record, hosts=tuple(hosts))

    records = [named(record, number) for number, record in enumerate(history(7, slow={"gpu2-003": 1.1}))]
    found = of(records, "gpu2-103")
    assert found.before == ("gpu2-003",)
    assert flagged(records) == {"gpu2-103": Health.slow}
    assert "gpu2-003" not in {host.name for host in hosts_of(records)}


def test_gpus_that_are_hot_in_most_readings_are_named() -> None:
    records = [
        replace(
            record,
            hosts=tuple(
                replace(host, readings=100, throttled={"heat (hardware)": 60} if host.host == "gpu2-004" else {})
                for host in record.hosts
            ),
        )
        for record in history(8)
    ]
    assert flagged(records) == {"gpu2-004": Health.throttled}
    assert of(records, "gpu2-004").why == "its GPUs were slowed down by heat (hardware) in 60% of readings"
