"""Runs on hosts that ssh reaches: a real sshd on machines of their own (see conftest)."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.commands import logs as logs_command
from launch.commands import status as status_command
from launch.commands import stop as stop_command
from launch.commands.doctor import main as doctor_command
from launch.commands.launch import main as launch_command
from launch.control.follow import follow
from launch.control.submit import submit
from launch.errors import LaunchError
from launch.judge.state import State
from launch.judge.verdict import Verdict, judge
from launch.machine.provenance import PROJECT
from megatron_ext.data.indexed_dataset import write_indexed
from tests.support import ROOT
from tests.support.hosts.fleet import CHANGED, LOCKED, OFF, STRANGER, Fleet
from tests.support.launch.live import FOREVER, ranks, start, tdpp, wait_for, wait_until_running

TWO = ("executor=hosts", "executor.hosts=[a:2,b:2]")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    random = np.random.default_rng(0)
    write_indexed(prefix, (random.integers(0, 257, 200, dtype=np.uint16) for _ in range(200)), np.dtype(np.uint16))
    return prefix


def trained(runs: Path, corpus: Path, *overrides: str) -> RunDir:
    settings = [f"runs_dir={runs}", f"data.prefix={corpus}", "train.iterations=3", "train.log_interval=1"]
    settings += ["train.lr_warmup_iterations=0", "parallel.global_batch_size=4", "model.sequence_length=32", *overrides]
    run = submit(compose(settings), settings)
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    return run


def losses(run: RunDir) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def verdict_of(run: RunDir) -> Verdict:
    wait_for(lambda: judge(run).state not in (State.starting, State.running, State.failing))
    return judge(run)


def test_two_hosts_train_as_this_machine_does(fleet: Fleet, runs: Path, corpus: Path) -> None:
    run = trained(runs, corpus, *TWO)
    assert losses(run) == losses(trained(runs / "here", corpus))
    assert [run.read_json(run.node_state(name))["host"] for name in "ab"] == ["a", "b"]


def test_hosts_may_run_unlike_numbers_of_ranks(fleet: Fleet, runs: Path) -> None:
    run = start(runs, "executor=hosts", "executor.hosts=[c:1,a:gpu0+3+1]")
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    assert [len(node.ranks) for node in run.read_plan().nodes] == [1, 3]
    assert run.read_plan().nodes[1].environment == {"CUDA_VISIBLE_DEVICES": "0,3,1"}


def test_a_secret_of_the_shell_reaches_the_ranks_and_no_file(
    fleet: Fleet, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = secrets.token_hex()
    monkeypatch.setenv("WANDB_API_KEY", secret)
    own = ("+cluster.environment.SHOW=1", "cluster.environment_from=[WANDB_API_KEY]")
    run = start(runs, *TWO, *own)
    follow(run)
    assert judge(run).state is State.succeeded, judge(run)
    shown = {run.node_out(name) for name in ("a", "b")}  # where this test's ranks print all that they have
    assert all(f"WANDB_API_KEY={secret}\n" in path.read_text() for path in shown)
    files = [path for path in run.path.rglob("*") if path.is_file() and path not in shown]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_the_doctor_examines_both_hosts(
    fleet: Fleet, runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (f"runs_dir={runs}", f"data.prefix={corpus}", "model.sequence_length=32")
    assert doctor_command([*TWO, *own, "--json"]) == 0
    found = {(one["where"], one["what"]): one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert found["here", "hosts"]["text"].startswith("a, b: reached by ssh")
    assert found["local", "nodes"]["text"] == "a, b"
    assert found["all nodes", "all-reduce"]["level"] == "ok"


def test_the_doctor_names_a_host_that_nobody_reaches(
    fleet: Fleet, runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (f"runs_dir={runs}", f"data.prefix={corpus}", "model.sequence_length=32", "executor=hosts")
    assert doctor_command([*own, f"executor.hosts=[a:2,{STRANGER}:2]"]) == 1
    assert "stranger has a host key that ssh does not know" in capsys.readouterr().out
    assert not runs.exists()


def test_a_killed_rank_is_named_with_its_host(fleet: Fleet, runs: Path) -> None:
    run = start(runs, *TWO, *FOREVER)
    wait_until_running(run)
    fleet.call("b", "kill", "-KILL", str(ranks(run)[2]))
    verdict = verdict_of(run)
    assert (verdict.state, verdict.rule) == (State.failed, "rank-failed"), verdict
    assert verdict.reason.startswith("rank 2 (stage 1, dp 0, tp 0, node b) was killed by SIGKILL")
    wait_for(lambda: not fleet.processes())


def test_a_host_that_dies_is_named_and_nothing_is_left_on_the_other(fleet: Fleet, runs: Path) -> None:
    run = start(runs, *TWO, *FOREVER)
    wait_until_running(run)
    fleet.kill("b")
    verdict = verdict_of(run)
    assert (verdict.state, verdict.rule) == (State.lost, "agent-lost"), verdict
    assert "node b " in verdict.reason
    wait_for(lambda: not fleet.processes())


@pytest.mark.slow
def test_an_elastic_run_goes_on_without_a_host_that_dies(fleet: Fleet, runs: Path) -> None:
    """And with one that has lost a rank."""
    layout = ["parallel=single", "parallel.data=3", "parallel.global_batch_size=12", "parallel.micro_batch_size=1"]
    hosts = ["executor=hosts", "executor.hosts=[a:1,b:1,c:1]", "elastic.enabled=true", "train.save_interval=2"]
    run = start(runs, *hosts, *layout, *FOREVER)
    wait_until_running(run)
    fleet.kill("b")
    wait_for(run.plan_of("0.1").exists)
    wait_for(lambda: run.read_plan().used == [0, 2])  # plan.json is written after the plan of the start
    wait_for(lambda: {run.read_json(run.node_state(name))["state"] for name in "ac"} == {"running"})
    wait_for(lambda: run.read_json(run.node_ranks("c"))[0]["rank"] == 1)
    fleet.call("c", "kill", "-KILL", str(run.read_json(run.node_ranks("c"))[0]["pid"]))
    wait_for(run.plan_of("0.2").exists)
    assert run.read_plan().used == [0, 2]
    wait_for(lambda: {run.read_json(run.node_state(name))["start"] for name in "ac"} == {"0.2"})
    begun = len(run.metrics.read_text().splitlines())
    wait_for(lambda: len(run.metrics.read_text().splitlines()) > begun + 3)
    assert stop_command.main([str(run.path)]) == 0
    assert judge(run).state is State.stopped
    wait_for(lambda: not fleet.processes())


def test_stop_ends_everything_on_all_hosts(fleet: Fleet, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start(runs, *TWO, *FOREVER)
    wait_until_running(run)
    assert status_command.main([str(run.path)]) == 0
    assert stop_command.main([str(run.path)]) == 0
    assert judge(run).state is State.stopped
    assert "no process is left on a, b" in capsys.readouterr().out
    assert not fleet.processes()
    assert logs_command.main([str(run.path), "--agent"]) == 0


def test_stop_ends_what_its_agent_does_not(fleet: Fleet, runs: Path) -> None:
    run = start(runs, *TWO, *FOREVER)
    wait_until_running(run)
    for name in ("a", "b"):
        agent = run.read_json(run.node_state(name))["pid"]
        fleet.call(name, "kill", "-STOP", str(agent))
    assert stop_command.main([str(run.path)]) == 0
    assert not fleet.processes()


def test_a_run_goes_on_without_its_launcher_and_is_resumed_after_a_stop(
    fleet: Fleet, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    """As the lab's nohup did."""
    own = (f"runs_dir={runs}", f"data.prefix={corpus}", "model.sequence_length=32", "train.lr_warmup_iterations=0")
    own += ("train.log_interval=1", "train.iterations=100", "train.save_interval=5", "parallel.global_batch_size=4")
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "launch", *own, *TWO],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: [*runs.glob("*/*/metrics.jsonl")])
    process.kill()
    process.wait()
    run = RunDir.find(runs, None)
    before = len(losses(run))
    wait_for(lambda: len(losses(run)) > before + 2)
    assert stop_command.main([str(run.path)]) == 0
    saved = len(losses(run))
    assert launch_command([f"resume={run.path}"]) == 0
    assert judge(run).state is State.succeeded, judge(run)
    assert len(losses(run)) == 100 > saved


def test_an_interrupted_launcher_ends_the_run(fleet: Fleet, runs: Path, tmp_path: Path) -> None:
    process = tdpp("launch", f"runs_dir={runs}", *TWO, *FOREVER, "train.log_interval=1", cwd=tmp_path)
    wait_for(lambda: [*runs.glob("*/*/metrics.jsonl")])
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert judge(RunDir.find(runs, None)).state is State.stopped
    assert not fleet.processes()


def test_a_launcher_that_is_killed_between_two_hosts_leaves_what_stop_ends(
    fleet: Fleet, runs: Path, tmp_path: Path
) -> None:
    """b's shell is slow: meanwhile the launcher is gone."""
    slow = tmp_path / "ssh"
    hold = f"echo $$ > {tmp_path}/pid; exec sleep 600"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *" b "*start*) {hold};; esac\nexec {fleet.bin}/ssh "$@"\n')
    slow.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.launch.tdpp_stand_in", "launch", f"runs_dir={runs}", *TWO, *FOREVER],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: [*runs.glob("*/*/nodes/a.json")])
    process.kill()
    process.wait()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    run = RunDir.find(runs, None)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.lost, "launch-cut-off"), verdict
    assert stop_command.main([str(run.path)]) == 0
    assert not fleet.processes()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (STRANGER, "stranger has a host key that ssh does not know"),
        (CHANGED, "changed presents another host key than the known one"),
        (LOCKED, "locked asks for a password"),
        (OFF, "off cannot be reached by ssh"),
        ("nowhere.invalid", "nowhere.invalid cannot be reached by ssh"),
    ],
    ids=["unknown key", "changed key", "no key of ours", "off", "no such host"],
)
def test_a_host_that_cannot_be_reached_is_one_message(fleet: Fleet, runs: Path, host: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"executor.hosts: {re.escape(message)}"):
        start(runs, "executor=hosts", f"executor.hosts=[a:2,{host}:2]")
    assert not [*runs.glob("*/*")]


def test_a_host_without_the_shared_folder_is_one_message(fleet: Fleet, runs: Path) -> None:
    runs.mkdir(parents=True)
    fleet.hide("b", runs)
    with pytest.raises(LaunchError, match=r"executor.hosts: b: cannot see the run's folder .* choose a runs_dir that"):
        start(runs, *TWO)


@pytest.mark.parametrize("what", ["project", "python"])
def test_a_host_without_tdpp_or_its_python_is_one_message(fleet: Fleet, runs: Path, what: str) -> None:
    fleet.hide("b", PROJECT if what == "project" else Path(sys.executable).parent)
    with pytest.raises(LaunchError, match=f"executor.hosts: b has no {'tdpp in' if what == 'project' else 'Python'} "):
        start(runs, *TWO)


def test_a_port_that_is_taken_is_one_message(fleet: Fleet, runs: Path) -> None:
    refused = pytest.raises(
        LaunchError, match=r"executor\.hosts: a: executor\.master_port=22022 is not available on a "
    )
    with fleet.listening("a", 22022), refused:
        start(runs, *TWO, "executor.master_port=22022")
