"""What the doctor finds on a node: links between all neighbours, and an end whatever its ranks do."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.parallel.links import steps
from tests.support import PATIENCE_S, ROOT
from tests.support.ordinary_user import NOBODY, run_by

QUICK = """
import os, sys, time
import torch.distributed as dist
from megatron_ext.rank_processes import Ranks
from megatron_ext.doctor import __main__ as doctor, rank as doctor_rank

if "HANG_RANK" in os.environ:
    doctor.TOGETHER_S, doctor_rank.WAIT_S = 12.0, 10
all_reduce = dist.all_reduce

def hangs_on_one_rank(*arguments, **options):
    if str(dist.get_rank()) == os.environ.get("HANG_RANK"):
        time.sleep(300)
    return all_reduce(*arguments, **options)

def fails(ranks):
    raise KeyError(340)

dist.all_reduce = hangs_on_one_rank
if "FAIL_START" in os.environ:
    Ranks.start = fails
sys.exit(doctor.main(sys.argv[1:]))
"""
"""The doctor with ranks that may hang, for which it has less patience, or a worker that cannot start any."""
LEAVES_A_CHILD = ("sh", "-c", 'sleep 0.01 & exec "$@"', "sh")
"""As pyxis does before it runs a command in a container."""
TWO_NODES = ("cluster.groups.local.count=2", "cluster.groups.local.gpus_per_node=2")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([[0]], []),
        ([[0, 1, 2]], [[(0, 1)], [(1, 2)]]),
        ([[0], [1]], [[(0, 1)]]),
        ([[0], [1], [2]], [[(0, 1)], [(1, 2)], [(2, 0)]]),
        ([[0], [1], [2], [3]], [[(0, 1), (2, 3)], [(1, 2)], [(3, 0)]]),
        ([[0, 1], [2, 3]], [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]),
        ([[0, 1, 2, 3], [4]], [[(0, 1)], [(1, 2)], [(2, 3)], [(0, 4)]]),
    ],
    ids=["one-rank", "one-node", "two-nodes", "odd-ring", "even-ring", "both", "uneven"],
)
def test_all_neighbours_measure_and_none_is_in_two_pairs_at_once(
    nodes: list[list[int]], expected: list[list[tuple[int, int]]]
) -> None:
    found = steps(nodes)
    assert found == expected
    for step in found:
        ranks = [rank for pair in step for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_every_pair_of_node_groups_is_measured_once() -> None:
    """Of groups a a b c b: neighbours are a-a, a-b, b-c, c-b and b-a around; a-c and b-b are left."""
    nodes = [[2 * node, 2 * node + 1] for node in range(5)]
    plain = steps(nodes)
    assert steps(nodes, ["a"] * 5) == plain
    assert steps(nodes, [*"aabcb"]) == [*plain, [(0, 6), (1, 7)], [(4, 8), (5, 9)]]


def start(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    """The doctor of the first node of a plan for the CPU."""
    plan = make_plan(compose(["parallel=single", "parallel.global_batch_size=24", *overrides]), "x/y").as_json()
    (folder / "plan.json").write_text(json.dumps(plan))
    for name in ("nodes", "errors"):
        (folder / name).mkdir()
    return subprocess.Popen(
        [*LEAVES_A_CHILD, sys.executable, "-c", QUICK, str(folder / "plan.json"), "0"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        text=True,
    )


def told(folder: Path, name: str) -> dict[str, Any]:
    """What a node or rank has written so far."""
    path = folder / "doctor" / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def test_ranks_measure_what_lies_between_them(tmp_path: Path) -> None:
    assert start(tmp_path, "parallel.data=3").wait(PATIENCE_S) == 0
    ranks = [told(tmp_path, f"rank-{rank:05d}") for rank in range(3)]
    assert [rank["stage"] for rank in ranks] == ["done"] * 3
    assert [[link["to"] for link in rank["links"]] for rank in ranks] == [[1], [2], []]
    assert all(value > 0 for rank in ranks for link in rank["links"] for value in link.values())
    node = told(tmp_path, "local-0")
    assert node["exit_codes"] == {"0": 0, "1": 0, "2": 0}
    assert node["problem"] is None


@pytest.mark.slow
def test_ranks_that_hang_are_ended_and_how_far_they_came_is_kept(tmp_path: Path) -> None:
    assert start(tmp_path, "parallel.data=3", HANG_RANK="1").wait(PATIENCE_S) == 0
    assert told(tmp_path, "local-0")["exit_codes"]["1"] == -signal.SIGKILL
    assert told(tmp_path, "rank-00001")["stage"] == "all-reduce"
    assert "failed" not in told(tmp_path, "rank-00001")
    assert told(tmp_path, "rank-00000")["symptom"] is True


def test_a_worker_that_cannot_start_its_ranks_does_not_look_well(tmp_path: Path) -> None:
    """What starts them and waits for them is what does so in a run."""
    assert start(tmp_path, "parallel.data=2", FAIL_START="1").wait(PATIENCE_S) == 1


def test_a_node_is_reached_on_the_address_of_the_ranks_interface_alone(tmp_path: Path) -> None:
    process = start(tmp_path, "parallel.data=4", *TWO_NODES, GLOO_SOCKET_IFNAME="lo")
    try:
        until = time.monotonic() + PATIENCE_S
        while "address" not in (found := told(tmp_path, "local-0")) and time.monotonic() < until:
            time.sleep(0.01)
        host, port = found["address"]
        assert (host, found["interface"]) == ("127.0.0.1", "lo")
        socket.create_connection((host, port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def test_an_interface_that_is_not_there_is_a_problem_of_the_node_and_hides_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, "parallel.data=4", *TWO_NODES, GLOO_SOCKET_IFNAME="ib7")
    until = time.monotonic() + PATIENCE_S
    while not told(tmp_path, "local-0").get("ready") and time.monotonic() < until:
        time.sleep(0.01)
    process.terminate()
    process.wait(PATIENCE_S)
    assert told(tmp_path, "local-0")["problem"].startswith("GLOO_SOCKET_IFNAME=ib7: ")
    assert told(tmp_path, "rank-00001")["torch"]


def test_told_to_stop_it_first_finishes_what_its_node_can_tell_alone(tmp_path: Path) -> None:
    process = start(tmp_path, "parallel.data=4", *TWO_NODES)
    until = time.monotonic() + PATIENCE_S
    while not told(tmp_path, "local-0") and time.monotonic() < until:
        time.sleep(0.01)
    process.terminate()
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert told(tmp_path, "local-0")["exit_codes"] == {"0": -signal.SIGKILL, "1": -signal.SIGKILL}
    assert told(tmp_path, "rank-00001")["torch"]


def test_where_the_index_maps_of_data_that_may_only_be_read_would_go_is_noted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o555)
    run = tmp_path / "run"
    run.mkdir()
    overrides = [f"data.prefix={tmp_path}/data/text", "parallel.data=1"]
    for cache, folder in (([], f"{tmp_path}/cache/tdpp"), ([f"data.cache={tmp_path}/own"], f"{tmp_path}/own")):
        code = "import json, sys; from pathlib import Path; from megatron_ext.contract import plan\n"
        code += "from megatron_ext.doctor import __main__ as doctor\n"
        code += "print(json.dumps(dict(doctor._maps(plan.Plan.read(Path(sys.argv[1]))))))"
        plan = make_plan(
            compose(["parallel=single", "parallel.global_batch_size=24", *overrides, *cache]), "x/y"
        ).as_json()
        (run / "plan.json").write_text(json.dumps(plan))
        words = [sys.executable, "-c", code, str(run / "plan.json")]
        if os.getuid() == 0:
            words = [*run_by(NOBODY), *words]
            tmp_path.chmod(0o777)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{tmp_path}/cache"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {f"{tmp_path}/data/text": {"folder": folder}}
