"""How the nodes of an elastic run agree on their next plan."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.planning.plan import make_plan
from launch.errors import LaunchError
from launch.files.records import Start
from launch.files.run_files import Faults
from launch.node.elastic.peer_status import DOUBTED_S, PARKED, REGROUPS, SILENCE_S
from launch.node.elastic.regroup import MOST_IN_VAIN, TOGETHER_S, Company, newest
from launch.node.elastic.replan import replanned
from launch.node.peers import LOOK_S, Finding
from launch.node.rank_failures import read_doings
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.worker import SAVED
from tests.launch.node.elastic.test_replan import ELASTIC
from tests.launch.node.test_peers import Clock

FIRST = Start(0, 0)
MEET_S = 600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made.monotonic)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for folder in (run.nodes, run.checkpoints):
        folder.mkdir()
    run.write_json(run.plan, plan(run).as_json())
    return run


def plan(run: RunDir) -> Plan:
    made = make_plan(compose([*ELASTIC, "elastic.min_nodes=2"]), "run").as_json()
    return Plan.parse(made, run.path)


def tell(run: RunDir, node_rank: int, state: str, **changes: Any) -> None:
    content = {"state": state, "start": str(FIRST), "exit_code": None, "stopped": None, "reason": None, "pid": 1}
    content |= {"job": None, "started_unix": 0.0, "ended_unix": None, "out_begin": 0, "err_begin": 0}
    run.write_json(run.node_state(f"local-{node_rank}"), {**content, "beat_unix": time.monotonic(), **changes})


def company(run: RunDir, node_rank: int) -> Company:
    start, of = newest(run, 0)
    return Company(run, node_rank, start, of, MEET_S)


def wait(clock: Clock, run: RunDir, seconds: float, look: Company, **beating: str) -> None:
    """Looks on, as an agent does, while other nodes go on giving signs of life."""
    for _ in range(int(seconds / LOOK_S) + 1):
        clock.now += LOOK_S
        for node_rank, state in beating.items():
            tell(run, int(node_rank[1:]), state)
        look.look()


def decided(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.decisions.read_text().splitlines()]


def test_nobody_plans_before_all_others_wait(run: RunDir, clock: Clock) -> None:
    tell(run, 1, REGROUPS)
    tell(run, 2, "running")
    assert company(run, 0).next_plan() is None
    assert company(run, 2).look() is not None  # it is to end its ranks
    assert not run.plan_of("0.1").exists()


def test_the_first_plans_and_all_follow(run: RunDir, clock: Clock) -> None:
    for node_rank in range(3):
        tell(run, node_rank, REGROUPS)
    nodes = [company(run, node_rank) for node_rank in range(3)]
    assert nodes[1].next_plan() is None
    made = nodes[0].next_plan()
    assert made == (Start(0, 1), plan(run))
    assert nodes[1].next_plan() == nodes[2].next_plan() == made == newest(run, 0)
    assert run.read_plan() == made[1]
    (line,) = decided(run)
    assert (line["start"], line["nodes"], line["reason"]) == (
        "0.1",
        ["local-0", "local-1", "local-2"],
        "a rank was lost",
    )


def test_a_node_of_the_own_job_that_does_not_begin_is_gone_on_without_sooner_than_one_of_another_job(
    run: RunDir, clock: Clock
) -> None:
    tell(run, 0, "running")
    tell(run, 1, "running")
    start, of = newest(run, 0)
    apart, together = (Company(run, 0, start, of, MEET_S, together=nodes) for nodes in ([0], [0, 1, 2]))
    for each in (apart, together):
        wait(clock, run, TOGETHER_S + LOOK_S, each, n1="running")
    assert apart.look() is None
    assert together.look() == Finding("node local-2 was lost", again=True)
    tell(run, 2, "running")
    wait(clock, run, LOOK_S, together, n1="running", n2="running")
    assert together.look() is None


def test_a_node_that_never_began_is_not_waited_for_again_by_the_start_without_it(run: RunDir, clock: Clock) -> None:
    tell(run, 0, REGROUPS)
    tell(run, 1, REGROUPS)
    start, of = newest(run, 0)
    first = Company(run, 0, start, of, MEET_S, together=[0, 1, 2])
    wait(clock, run, TOGETHER_S + LOOK_S, first, n1=REGROUPS)
    assert first.next_plan() is not None
    second = company(run, 0)
    clock.now += LOOK_S
    assert second.lost == [2]


def test_two_that_plan_at_once_follow_one_plan(run: RunDir, clock: Clock) -> None:
    """The second thinks that the first one is gone."""
    for node_rank in range(3):
        tell(run, node_rank, REGROUPS)
    first, second = company(run, 0), company(run, 1)
    wait(clock, run, DOUBTED_S, second, n2=REGROUPS)
    made = first.next_plan()
    again = second.next_plan() or second.next_plan()
    assert again == made
    assert made is not None
    assert made[1].used == [0, 1, 2]
    assert len(decided(run)) == 1


def test_one_that_is_silent_is_gone_on_without(run: RunDir, clock: Clock) -> None:
    for node_rank in range(3):
        tell(run, node_rank, "running")
    node = company(run, 2)
    wait(clock, run, SILENCE_S - 2 * LOOK_S, node, n1="running")
    assert node.look() is None
    wait(clock, run, 3 * LOOK_S, node, n1="running")
    found = node.look()
    assert found is not None
    assert (found.reason, found.again) == ("node local-0 was lost", True)
    tell(run, 1, REGROUPS)
    clock.now += LOOK_S
    assert node.next_plan() is None  # node 1 is to write it
    made = company(run, 1)
    wait(clock, run, SILENCE_S, made, n2=REGROUPS)
    found_plan = made.next_plan()
    assert found_plan is not None
    assert found_plan[1].used == [1, 2]
    assert decided(run)[-1]["reason"] == "node local-0 was lost"


def test_two_that_are_lost_at_once_are_gone_on_without_together(run: RunDir, clock: Clock) -> None:
    """One of them while it waits for a plan, with the other one's silence as its reason."""
    content = plan(run).as_json()
    content["elastic"]["min_nodes"] = 1
    of = Plan.parse(content, run.path)
    tell(run, 0, REGROUPS)
    tell(run, 1, "running")
    left = Company(run, 2, FIRST, of, MEET_S)
    assert left.next_plan() is None
    for _ in range(int(DOUBTED_S / LOOK_S) + 2):
        clock.now += LOOK_S
        found = left.next_plan()
    assert found is not None
    assert found[1].used == [2]
    assert decided(run)[-1]["reason"] == "node local-0 was lost; node local-1 was lost"


def test_one_that_takes_no_part_is_taken_in_again(run: RunDir, clock: Clock) -> None:
    tell(run, 0, REGROUPS)
    tell(run, 1, PARKED)
    tell(run, 2, "ended", exit_code=143, stopped="SIGTERM")
    made = company(run, 0).next_plan()
    assert made is not None
    assert made[1].used == [0, 1]


def test_an_error_of_a_rank_ends_all(run: RunDir, clock: Clock) -> None:
    tell(run, 1, "ended", exit_code=1)
    tell(run, 2, "running")
    found = company(run, 2).look()
    assert found is not None
    assert not found.again
    with pytest.raises(LaunchError, match="node local-1 failed"):
        company(run, 0).next_plan()


def test_one_whose_time_ran_out_is_not_gone_on_without(run: RunDir, clock: Clock) -> None:
    """The others' has, too, and they are to go on together when the run is resumed."""
    tell(run, 1, "ended", exit_code=SAVED, stopped="SIGUSR2")
    tell(run, 2, PARKED)
    node = company(run, 0)
    assert node.out_of_time
    assert company(run, 2).out_of_time


def test_too_few_nodes_end(run: RunDir, clock: Clock) -> None:
    for node_rank in (1, 2):
        tell(run, node_rank, "ended", exit_code=143, stopped="SIGTERM")
    with pytest.raises(LaunchError, match=r"elastic\.min_nodes=2"):
        company(run, 0).next_plan()


def test_what_fails_again_and_again_ends(run: RunDir, clock: Clock) -> None:
    """With the same nodes, and from the same checkpoint."""
    for number in range(MOST_IN_VAIN):
        for node_rank in range(3):
            tell(run, node_rank, REGROUPS, start=f"0.{number}")
        assert company(run, 0).next_plan() is not None
    for node_rank in range(3):
        tell(run, node_rank, REGROUPS, start=f"0.{MOST_IN_VAIN}")
    with pytest.raises(LaunchError, match="without saving anything"):
        company(run, 0).next_plan()
    run.latest_checkpoint.write_text("iter_0000005")
    assert company(run, 0).next_plan() is not None


def test_ranks_of_an_earlier_plan_are_no_fault(run: RunDir) -> None:
    """They stand in their node's file until the ranks of the next plan have begun."""
    one = {"rank": 2, "pid": 1, "exit_code": -15, "ended_unix": 1.0, "doing": None}
    run.write_json(run.node_ranks("local-2"), [one])
    faults = Faults()
    assert read_doings(run, replanned(plan(run), {0, 2}), {"local-2": 0.0}, faults) == ()
    assert not [*faults]


def test_whoever_looks_sees_the_newest_plan_though_its_maker_died(run: RunDir, clock: Clock) -> None:
    """Between making it and writing plan.json."""
    tell(run, 0, REGROUPS)
    tell(run, 1, REGROUPS)
    tell(run, 2, "ended", exit_code=143, stopped="SIGTERM")
    made = company(run, 0).next_plan()
    assert made is not None
    run.write_json(run.plan, plan(run).as_json())
    second = Company(run, 1, FIRST, plan(run), MEET_S)
    assert second.next_plan() == made
    assert run.read_plan() == made[1]
    assert list(run.plan_of("0.1").parent.iterdir()) == [run.plan_of("0.1")]
