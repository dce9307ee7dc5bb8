"""Elastic runs with the engine's own worker: nodes and ranks are lost, and training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands.launching.preflight import with_length
from launch.commands.report import main as report
from launch.control.follow import follow
from launch.control.submit import submit
from launch.judge.state import State
from launch.judge.verdict import judge
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support.launch import live
from tests.support.launch.live import ranks, wait_for
from tests.support.megatron_ext.textbook import textbook


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    random = np.random.default_rng(0)
    write_indexed(prefix, (random.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
    return prefix


def start(runs: Path, corpus: Path, *overrides: str, iterations: int = 100_000) -> RunDir:
    length = [] if any(word.startswith("train.samples") for word in overrides) else [f"train.iterations={iterations}"]
    settings = [f"runs_dir={runs}", f"data.prefix={corpus}", *length, "train.log_interval=1"]
    # With a rate ten times as high, sums of gradients in another order differ by more than 1e-5 of the loss.
    settings += ["train.lr=3e-4", "train.min_lr=3e-5", "train.lr_warmup_iterations=0", "train.lr_decay_iterations=100"]
    settings += [
        "model.sequence_length=32",
        "model.hidden_dropout=0.1",
        "parallel=single",
        "parallel.micro_batch_size=1",
    ]
    settings += ["parallel.global_batch_size=12", "train.save_interval=2", *overrides]
    return submit(with_length(compose(settings)), settings)


def elastic(nodes: int) -> list[str]:
    return [
        *("elastic.enabled=true", f"parallel.data={nodes}", "train.keep_checkpoints=2"),
        *(f"cluster.groups.local.count={nodes}", "cluster.groups.local.gpus_per_node=1"),
    ]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(run: RunDir) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in lines(run.metrics)}


def logged(run: RunDir, since_unix: float) -> int:
    return sum(line["unix"] > since_unix for line in lines(run.metrics))


def decided(run: RunDir) -> dict[str, dict[str, Any]]:
    """By start; the plan is there before its line is."""
    made = lines(run.decisions) if run.decisions.exists() else []
    return {line["start"]: line for line in made if "nodes" in line}


def wait_until_training(run: RunDir, start: str, nodes: int) -> None:
    """Until it has logged three iterations in a start."""
    wait_for(lambda: run.plan_of(start).exists())
    assert sum(bool(node["ranks"]) for node in run.read_json(run.plan_of(start))["nodes"]) == nodes
    wait_for(lambda: start in decided(run))
    begun = decided(run)[start]
    wait_for(lambda: logged(run, begun["unix"]) >= 3)


def agent(run: RunDir, node_rank: int) -> int:
    return run.read_json(run.node_state(f"local-{node_rank}"))["pid"]


def saved_and_ended(run: RunDir, start: str) -> None:
    run.write_json(run.save_request(start), {})
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.interrupted, "time-limit"), verdict


def assert_trained_as_one_process(run: RunDir, runs: Path, corpus: Path) -> None:
    last = max(losses(run))
    one = start(runs, corpus)
    wait_for(lambda: one.metrics.exists() and max(losses(one), default=0) >= last)
    saved_and_ended(one, "0.0")
    found, expected = losses(run), losses(one)
    assert found == pytest.approx({iteration: expected[iteration] for iteration in range(1, last + 1)}, rel=1e-5)


@pytest.mark.slow
def test_four_nodes_two_three_and_one_train_what_one_process_does(runs: Path, corpus: Path) -> None:
    """One agent is killed; another stands still between the decision and the start, and is taken in again when it is
    back. Then an agent is killed while another node regroups for a lost rank, and one between the decision and the
    start."""
    run = start(runs, corpus, *elastic(4))
    wait_for(lambda: run.latest_checkpoint.exists())
    os.kill(agent(run, 3), signal.SIGKILL)
    wait_for(lambda: run.plan_of("0.1").exists())
    halted = agent(run, 2)
    os.kill(halted, signal.SIGSTOP)
    wait_until_training(run, "0.2", 2)
    assert run.read_plan().node_names[2] == "local-2"
    assert run.read_plan().used == [0, 1]
    os.kill(halted, signal.SIGCONT)
    wait_until_training(run, "0.3", 3)
    assert decided(run)["0.3"]["reason"] == "1 node came back: local-2"
    os.kill(ranks(run)[1], signal.SIGKILL)
    wait_for(lambda: run.read_json(run.node_state("local-1"))["state"] == "regroups")
    os.kill(agent(run, 0), signal.SIGKILL)
    wait_for(lambda: run.plan_of("0.4").exists())
    os.kill(agent(run, 2), signal.SIGKILL)
    wait_until_training(run, "0.5", 1)
    assert run.read_plan().used == [1]
    saved_and_ended(run, "0.5")
    assert_trained_as_one_process(run, runs, corpus)
    assert report([str(run.path)]) == 0
    page = (run.report / "index.html").read_text()
    assert "4 → 3" in page
    assert "3 → 2" in page
    assert "2 → 3" in page


@pytest.mark.slow
def test_stages_on_several_nodes_are_cut_anew_for_the_nodes_that_are_left(runs: Path, corpus: Path) -> None:
    """Two stages of two replicas on four nodes; one of these is lost, then a rank, then two nodes at once."""
    cut = ["parallel.pipeline=2", "parallel.data=2", "parallel.partition=3-1"]
    run = start(runs, corpus, *elastic(4), *cut)
    wait_for(lambda: run.latest_checkpoint.exists())
    os.kill(agent(run, 3), signal.SIGKILL)
    used = wait_until_training_on(run, "0.1", {0, 1, 2})
    os.kill(ranks(run)[used[-1]], signal.SIGKILL)
    wait_until_training_on(run, "0.2", {0, 1, 2})
    for node_rank in (0, 2):
        os.kill(agent(run, node_rank), signal.SIGKILL)
    wait_until_training_on(run, "0.3", {1})
    saved_and_ended(run, "0.3")
    assert_trained_as_one_process(run, runs, corpus)
    assert report([str(run.path)]) == 0


def wait_until_training_on(run: RunDir, start: str, nodes: set[int]) -> list[int]:
    """Until it has logged three iterations in a start, on some of these nodes, which are returned."""
    wait_for(lambda: run.plan_of(start).exists())
    wait_for(lambda: start in decided(run))
    begun = decided(run)[start]
    used = [number for number, node in enumerate(run.read_json(run.plan_of(start))["nodes"]) if node["ranks"]]
    assert used
    assert {*used} <= nodes
    wait_for(lambda: logged(run, begun["unix"]) >= 3)
    return used


@pytest.mark.slow
def test_a_run_whose_first_node_is_lost_before_anything_was_saved_ends_well(runs: Path, corpus: Path) -> None:
    run = start(runs, corpus, *elastic(2), iterations=20)
    wait_for(lambda: (run.read_json(run.node_state("local-0")) or {}).get("state") == "running")
    os.kill(agent(run, 0), signal.SIGKILL)
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.succeeded, "finished"), verdict
    assert verdict.reason.startswith("1 rank exited with 0; iteration 20 of 20 logged")


@pytest.mark.slow
def test_a_run_whose_time_runs_out_while_it_has_no_plan_is_interrupted_as_any_other(runs: Path) -> None:
    """It is resumed from what was saved before."""
    layout = ["parallel=single", "parallel.global_batch_size=12", "parallel.micro_batch_size=1", *elastic(2)]
    run = live.start(runs, *live.FOREVER, "train.save_interval=2", *layout)
    live.wait_until_running(run)
    run.latest_checkpoint.write_text("iter_0000002")
    os.kill(agent(run, 0), signal.SIGKILL)
    os.kill(ranks(run)[1], signal.SIGKILL)
    wait_for(lambda: run.read_json(run.node_state("local-1"))["state"] == "regroups")
    os.kill(agent(run, 1), signal.SIGUSR2)
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.interrupted, "time-limit"), verdict
    assert not run.plan_of("0.1").exists()


@pytest.mark.slow
def test_nodes_that_are_chosen_after_an_epoch_train_on_and_waiting_ones_take_the_place_of_lost_ones(
    runs: Path, corpus: Path, tmp_path: Path
) -> None:
    """It starts on two of three nodes, and goes on with the one that costs least. When that is lost, the others train.
    The time limit comes when they have chosen again, and still save."""
    first = tmp_path / "2_node_config.json"
    first.write_text('{"0": 1, "1": 1}')
    choose = ["elastic.by=dollars", "elastic.epoch=120", "elastic.restart_s=0", f"elastic.start={first}"]
    run = start(runs, corpus, *elastic(3), *choose, "cluster.groups.local.price_per_hour=1")
    assert run.read_plan().used == [0, 1]
    wait_until_training(run, "0.1", 1)
    assert re.match(r"epoch \d+ ended: ", decided(run)["0.1"]["reason"])  # a fast machine trains several in a second
    os.kill(agent(run, 0), signal.SIGKILL)
    wait_until_training(run, "0.2", 2)
    wait_for(run.change_request("0.2").exists)
    for node_rank in (1, 2):
        os.kill(agent(run, node_rank), signal.SIGUSR2)
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.interrupted, "time-limit"), verdict
    last = max(losses(run))
    assert last >= 20  # two epochs
    one = start(runs, corpus)
    wait_for(lambda: one.metrics.exists() and max(losses(one), default=0) >= last)
    saved_and_ended(one, "0.0")
    found, expected = losses(run), losses(one)
    assert found == pytest.approx({iteration: expected[iteration] for iteration in range(1, last + 1)}, rel=1e-5)


def batches(run: RunDir) -> dict[int, float]:
    return {line["iteration"]: line["global_batch_size"] for line in lines(run.metrics)}


@pytest.mark.slow
def test_a_batch_that_grows_brings_in_a_node_and_stays_when_that_is_lost(
    runs: Path, corpus: Path, tmp_path: Path
) -> None:
    """One process measures the same halves, and so trains the same batches."""
    first = tmp_path / "1_node_config.json"
    first.write_text('{"0": 1}')
    adapt = [
        "adapt.rule=noise",
        "adapt.target=0.999",
        "adapt.smoothing=1",
        "adapt.every=2",
        "adapt.upper=48",
        "train.samples=1000000",
    ]
    choose = ["elastic.by=time", "elastic.epoch=240", "elastic.restart_s=0", f"elastic.start={first}"]
    run = start(runs, corpus, *elastic(2), *adapt, *choose)
    wait_until_training(run, "0.1", 2)
    assert re.match(r"epoch \d+ ended: ", decided(run)["0.1"]["reason"])
    assert decided(run)["0.1"]["iteration"] >= 4
    os.kill(agent(run, 0), signal.SIGKILL)
    wait_until_training(run, "0.2", 1)
    saved_and_ended(run, "0.2")
    last = max(losses(run))
    one = start(runs, corpus, *adapt)
    wait_for(lambda: one.metrics.exists() and max(losses(one), default=0) >= last)
    saved_and_ended(one, "0.0")
    found, expected = losses(run), losses(one)
    assert found == pytest.approx({iteration: expected[iteration] for iteration in range(1, last + 1)}, rel=1e-5)
    assert batches(run) == {iteration: batches(one)[iteration] for iteration in range(1, last + 1)}
    assert {*batches(run).values()} == {12, 24, 48}


@pytest.mark.slow
def test_micro_batches_and_streams_go_on_changing_with_the_nodes_that_are_left(runs: Path, corpus: Path) -> None:
    """The batch follows goodput, and so the times that this machine measures: one process is given the same batches."""
    adapt = [
        *("adapt.rule=goodput", "adapt.every=2", "adapt.smoothing=1", "adapt.upper=48", "adapt.rebalance=true"),
        *("adapt.micro_batch_sizes=[2,4]", "adapt.streams=[1,2]", "train.samples=1000000", "parallel.streams=2-1-1"),
        *("elastic.by=time", "elastic.epoch=100000", "parallel.shares=6-4-2", "train.save_interval=5"),
    ]
    run = start(runs, corpus, *elastic(3), *adapt)
    wait_for(lambda: run.latest_checkpoint.exists())
    measured = [line for line in lines(run.decisions) if line.get("micro_batch_ms")]
    os.kill(agent(run, 1), signal.SIGKILL)
    wait_until_training(run, "0.1", 2)
    plan = run.read_plan()
    assert plan.elastic is not None
    assert plan.elastic.times is not None
    for replica, times in enumerate(plan.elastic.times):  # or more, measured since
        ways = {(line["micro_batch_sizes_before"][replica], line["streams_before"][replica]) for line in measured}
        assert ways <= {(one.size, one.streams) for one in times}
    assert plan.streams == [2, 1]
    assert plan.adapt is not None
    assert plan.adapt.micro_batch_sizes == [[1, 2, 4]] * 2
    assert plan.adapt.streams == [[[1, 2]] * 3] * 2
    saved_and_ended(run, "0.1")
    found, sizes = losses(run), batches(run)
    assert [*sizes] == [*range(1, len(sizes) + 1)]
    last = [line for line in lines(run.decisions) if line.get("micro_batch_ms")][-1]
    assert last["start"] == "0.1"
    assert len(last["shares"]) == 2
    expected, _ = textbook(plan, corpus, [*sizes.values()])
    assert [*found.values()] == pytest.approx([*expected], rel=1e-5)


@pytest.mark.slow
def test_a_batch_by_goodput_goes_on_with_the_nodes_that_cost_least(runs: Path, corpus: Path) -> None:
    """What is measured before the change of nodes is known after it: a batch changes, and one process is given the same
    ones."""
    adapt = [
        *("adapt.rule=goodput", "adapt.every=2", "adapt.smoothing=2", "adapt.upper=48", "adapt.rebalance=true"),
        *("train.samples=1000000", "elastic.by=dollars", "elastic.epoch=240", "elastic.restart_s=0"),
        *("cluster.groups.local.price_per_hour=1", "train.save_interval=5"),
    ]
    run = start(runs, corpus, *elastic(3), *adapt)
    wait_for(lambda: "0.1" in decided(run))
    choice = decided(run)["0.1"]
    wait_until_training(run, "0.1", len(choice["nodes"]))
    assert choice["reason"].startswith("epoch ")
    assert "fewer dollars expected" in choice["reason"]
    assert len(choice["nodes"]) < len(choice["nodes_before"]) == 3
    saved_and_ended(run, "0.1")
    found, sizes = losses(run), batches(run)
    assert [*sizes] == [*range(1, len(sizes) + 1)]
    last = choice["iteration"]
    after = [
        line["global_batch_size"] for line in lines(run.decisions) if "nodes" not in line and line["iteration"] == last
    ]
    assert sizes[last + 1] == (after[-1] if after else sizes[last])  # until the next decision
    made = [line for line in lines(run.decisions) if "nodes" not in line and line["start"] == "0.1"]
    assert all(line["reason"] and line["noise_scale"] != 0 for line in made)
    expected, _ = textbook(run.read_plan(), corpus, [*sizes.values()])
    assert [*found.values()] == pytest.approx([*expected], rel=1e-5)
