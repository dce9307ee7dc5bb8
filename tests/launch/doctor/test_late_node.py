"""A node of `tdpp doctor` that starts when another one has failed already."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from conf.compose import compose
from launch.commands.doctor import WORKER
from launch.control.executors import local
from launch.control.planning.plan import make_plan
from launch.control.submit import run_environment
from launch.machine import processes
from launch.node.settings import NodeSettings
from launch.node.worker_command import ModuleWorker
from launch.observe.look import observe
from tests.support import PATIENCE_S
from tests.support.launch.live import TWO_NODES, wait_for
from tests.support.launch.run_folders import Case, ended
from tests.support.megatron_ext.engine_run import make_corpus


def test_it_is_examined_all_the_same(runs: Path) -> None:
    runs.mkdir()
    overrides = [*TWO_NODES, f"data.prefix={make_corpus(runs)}"]
    run = Case([ended(1), None]).make(runs / "tiny" / "1-1")
    experiment = compose(overrides)
    plan = make_plan(experiment, run.name)
    run.write_json(run.plan, plan.as_json())
    run.submitit.mkdir()
    token = secrets.token_hex()
    run.write_json(run.jobs, {"token": token, "executor": "local", "submission": 0, "jobs": []})
    agent = NodeSettings(
        run=run,
        model="tiny",
        environment=run_environment(experiment, plan, token, os.environ),
        worker=ModuleWorker(WORKER, sys.executable),
        container=None,
        nodes=(1,),
        het_groups=(None,),
        submission=0,
        resumable=False,
        meet_s=60,
        save_s=10,
        max_requeues=0,
        for_itself=True,
    )
    local.start(agent, token, experiment.executor.time_min)
    wait_for(lambda: observe(run).nodes[1].ended, 60)
    assert not processes.wait_until_gone(token, PATIENCE_S)
    told = run.read_json(run.doctor_node("local-1"))
    assert all("bytes" in found for found in told["files"].values())
    assert (told["problem"], told["unreached"], set(told["exit_codes"])) == (None, {}, {"2", "3"})
    assert all(run.read_json(run.doctor_rank(rank))["torch"] for rank in (2, 3))
    assert observe(run).nodes[1].reason == "ended because node local-0 failed"
