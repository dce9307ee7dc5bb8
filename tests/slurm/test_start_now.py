"""`start=now` on a real cluster whose A100 node is busy for half an hour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conf.run_folder.rundir import RunDir
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from launch.commands import search
from launch.commands.launch import main
from launch.commands.searching.queue import rank_by_end
from launch.commands.stop import main as stop
from tests.support.launch.live import WORKER, no_data_needed
from tests.support.slurm.cluster import Cluster
from tests.support.slurm.seed import NODES, wait_for

WORDS = [*NODES, "model=tiny", "parallel.global_batch_size=16", "parallel.micro_batch_size=1"]
WORDS += ["parallel.schedule=one_f_one_b", "parallel.tensor=1"]
LIMITS = ["cluster.groups.hgx.time_min=60", "cluster.groups.gpu2.time_min=60"]
MINUTE = 60.0


@pytest.mark.parametrize("het", ["jobs", "hetjob"])
def test_a_short_training_goes_to_idle_nodes_and_a_long_one_waits(
    slurm: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], het: str
) -> None:
    words = [*WORDS, *LIMITS, f"executor.het={het}"]
    busy = slurm.run(
        *("sbatch", "--parsable", "--partition=hgx", "--exclusive", "--time=30", "-o", "/dev/null"),
        *("--wrap", "sleep infinity"),
    ).stdout.strip()
    try:
        wait_for(lambda: "RUNNING" in [job.state for job in slurm.jobs() if job.id == busy])
        (alone, both) = rank_by_end(
            read([*words, "train.iterations=1000"]), Arguments(overrides=(*words, "train.iterations=1000"))
        )
        assert "hgx" not in str(alone.plan.parallel.node_order)
        assert "hgx" in str(both.plan.parallel.node_order)
        assert alone.waits_s == 0
        assert 25 * MINUTE < both.waits_s < 35 * MINUTE
        short = round(20 * MINUTE / alone.plan.total)
        long = round(600 * MINUTE / alone.plan.total)
        assert search.main([*words, f"train.iterations={short}", "start=now"]) == 0
        assert "hgx" not in capsys.readouterr().out.splitlines()[1]
        assert search.main([*words, f"train.iterations={long}", "start=now"]) == 0
        told = capsys.readouterr().out.splitlines()[1]
        assert "hgx" in told
        assert re.search(r" (2[5-9]|3[0-5]) min ", told)
        launched = [*words, f"train.iterations={short}", "start=now", f"runs_dir={tmp_path}"]
        main(launched, preflight=no_data_needed, worker=WORKER)
        run = RunDir.find(tmp_path, None)
        assert {node.group for node in run.read_plan().nodes} == {"gpu2"}
        wait_for(run.metrics.exists)  # it did not wait
        assert stop([str(run.path)]) == 0
    finally:
        slurm.run("scancel", busy)
        wait_for(lambda: busy not in [job.id for job in slurm.jobs()])
