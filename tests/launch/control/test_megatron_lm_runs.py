"""engine=megatron_lm: a script that trains as pretrain_gpt.py does, under tdpp's agent, worker and timers.

The script is tests/support/launch/megatron_lm/pretrain_gpt.py, on the megatron.core that is installed.

make test-megatron
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from launch.control.follow import follow
from launch.control.megatron_lm import script
from launch.control.stop import save_first, stop
from launch.control.submit import resume, submit
from launch.judge.state import State
from launch.judge.verdict import judge
from launch.machine import processes
from reports.readers.events import read_run
from tests.support import PATIENCE_S, ROOT
from tests.support.launch.live import TWO_NODES, agents, done, ranks, token, wait_for
from tests.support.launch.megatron_lm import pretrain_gpt

pytest.importorskip("megatron", reason="megatron-core is not installed")

CHECKOUT = Path(pretrain_gpt.__file__).parent
WORDS = (
    *("engine=megatron_lm", f"engine.checkout={CHECKOUT}", "model.layers=4", "model.hidden=32", "model.heads=4"),
    *("model.sequence_length=16", "model.vocab_size=64", "model.vocab_multiple=1", "train.iterations=6"),
    *("train.log_interval=1", "train.lr_warmup_iterations=0", "parallel.global_batch_size=16"),
)
EVEN = ("parallel.data=1", "parallel.pipeline=2", "parallel.partition=2-2")
INTERLEAVED = (*EVEN[:2], "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-1-1")
SLOW = ("train.iterations=400", "+cluster.environment.PACE_S='0.02'")


def start(runs: Path, *overrides: str) -> RunDir:
    settings = [f"runs_dir={runs}", *WORDS, *overrides]
    return submit(compose(settings), settings)


def trained(runs: Path, *overrides: str) -> RunDir:
    run = start(runs, *overrides)
    follow(run)
    assert judge(run).state == State.succeeded, "".join(path.read_text() for path in run.path.glob("nodes/*.err"))
    return run


def losses(run: RunDir) -> list[float]:
    return [line["loss"] for line in map(json.loads, run.metrics.read_text().splitlines())]


def by_itself(tmp_path: Path, *overrides: str) -> list[float]:
    """The losses that the script prints without tdpp, on one process."""
    own = [f"runs_dir={tmp_path}", *WORDS, "parallel=single", *overrides, "train.checkpoint=false"]
    words = script(compose(own), tmp_path)
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1].rpartition('/')[0]);"
        "from megatron_ext.core import on_cpu; on_cpu.begin_script(1); del sys.argv[0];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, **where, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return [float(line.split("lm loss: ")[1].split(" ")[0]) for line in found.stdout.splitlines() if "lm loss" in line]


def test_a_run_has_the_losses_of_the_script_alone_and_all_that_tdpp_writes(runs: Path, tmp_path: Path) -> None:
    run = trained(runs, "parallel=single")
    assert losses(run) == pytest.approx(by_itself(tmp_path), rel=1e-6)
    assert losses(run)[-1] < losses(run)[0]
    assert json.loads((run.path / "memory/rank-00000.json").read_text())["iteration"] == 6
    status = json.loads(done("status", str(run.path), "--json", cwd=tmp_path).stdout)
    assert (status["state"], status["iteration"], status["saved"]) == ("succeeded", 6, 6)
    assert done("report", str(run.path), cwd=tmp_path).returncode == 0
    page = (run.report / "index.html").read_text()
    assert "Megatron-LM trained it" in page
    assert "Missing" not in page


@pytest.mark.parametrize(("words", "chunks"), [(EVEN, 1), (INTERLEAVED, 2)], ids=["1f1b", "interleaved"])
def test_every_pass_and_message_is_an_event(runs: Path, words: tuple[str, ...], chunks: int) -> None:
    run = trained(runs, *words, "train.iterations=3")
    table = read_run({rank: run.events / f"rank-{rank:05d}.bin" for rank in range(2)}).events
    micro_batches = run.read_plan().micro_batch_numbers
    passes = {(chunk, number) for chunk in range(chunks) for number in range(micro_batches)}
    hops = micro_batches * (2 * chunks - 1)
    for iteration in (1, 2, 3):
        own = table[table.iteration == iteration]
        for name in ("forward-compute", "backward-compute"):
            for rank in range(2):
                found = own[(own.name == name) & (own["rank"] == rank)]
                assert sorted(zip(found.chunk, found.micro_batch, strict=True)) == sorted(passes)
        count = Counter(own.name)
        for name in ("forward-send", "forward-recv", "backward-send", "backward-recv"):
            assert count[name] == hops
        assert count["optimizer"] == 2
    moved = table[table.name == "forward-recv"]
    assert set(zip(moved["rank"], moved.peer, strict=True)) <= {(0, 1), (1, 0)}


def test_replicas_sum_their_gradients(runs: Path) -> None:
    run = trained(runs, "parallel=single", "parallel.data=2")
    table = read_run({rank: run.events / f"rank-{rank:05d}.bin" for rank in range(2)}).events
    assert Counter(table.name)["grads-all-reduce"] == 12
    assert np.isfinite(losses(run)).all()


def test_two_nodes_meet_at_tdpps_store(runs: Path) -> None:
    run = trained(runs, *EVEN, *TWO_NODES, "cluster.groups.local.gpus_per_node=1")
    assert set(run.read_json(run.address)) == {"start", "host", "port"}


def test_a_failed_rank_is_the_cause(runs: Path) -> None:
    run = start(runs, *EVEN, "+cluster.environment.FAIL_RANK='1'")
    follow(run)
    verdict = judge(run)
    assert (verdict.state, verdict.rule) == (State.failed, "rank-failed")
    assert "rank 1" in verdict.reason
    assert "RuntimeError: out of luck" in verdict.reason


def test_a_killed_rank_is_the_cause_and_the_run_goes_on_from_its_checkpoint(runs: Path) -> None:
    run = start(runs, *EVEN, *SLOW, "train.save_interval=4", "train.iterations=40")
    wait_for(lambda: run.latest_checkpoint.exists(), PATIENCE_S)
    os.kill(ranks(run)[0], signal.SIGKILL)
    follow(run)
    verdict = judge(run)
    assert verdict.state == State.failed
    assert "rank 0" in verdict.reason
    assert "killed by SIGKILL" in verdict.reason
    resume(run)
    follow(run)
    assert judge(run).state == State.succeeded
    assert run.latest_checkpoint.read_text() == "iter_0000040"
    found = [line["iteration"] for line in map(json.loads, run.metrics.read_text().splitlines())]
    assert found == list(range(1, 41))


def test_a_run_that_is_asked_to_saves_and_goes_on_where_it_was(runs: Path, tmp_path: Path) -> None:
    run = start(runs, *EVEN, *SLOW, "train.iterations=30")
    wait_for(lambda: run.metrics.exists() and len(losses(run)) > 2, PATIENCE_S)
    assert save_first(run)
    follow(run)
    saved = int(run.latest_checkpoint.read_text().removeprefix("iter_"))
    assert 2 < saved < 30
    resume(run)
    follow(run)
    assert judge(run).state == State.succeeded
    whole = trained(tmp_path / "whole", *EVEN, "train.iterations=30")
    assert losses(run) == pytest.approx(losses(whole), rel=1e-5)


def test_a_run_that_is_stopped_leaves_nothing(runs: Path) -> None:
    run = start(runs, *EVEN, *SLOW)
    wait_for(lambda: run.metrics.exists(), PATIENCE_S)
    assert stop(run) != "no process was left"
    assert judge(run).state == State.stopped
    assert processes.find(token(run)) == set()


def test_ranks_end_with_a_killed_agent(runs: Path) -> None:
    run = start(runs, *EVEN, *SLOW)
    wait_for(lambda: run.metrics.exists(), PATIENCE_S)
    os.kill(agents(run)[0], signal.SIGKILL)
    wait_for(lambda: not processes.find(token(run)), PATIENCE_S)
    assert judge(run).state == State.lost


def test_an_option_that_it_does_not_know_is_said(runs: Path) -> None:
    run = start(runs, *EVEN, "engine.arguments=[--no-such-option]")
    follow(run)
    verdict = judge(run)
    assert verdict.state == State.failed
    assert "pretrain_gpt.py ended itself with 2" in verdict.reason
    assert "--no-such-option" in run.node_err("local-0").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("import no_such_module", "pretrain_gpt.py needs the module no_such_module, which "),
        ("", "pretrain_gpt.py ended before its first iteration; what it printed says why"),
    ],
    ids=["needs-more", "empty"],
)
def test_a_script_that_trains_nothing_is_said(runs: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(content)
    (tmp_path / "megatron").symlink_to(CHECKOUT / "megatron")
    run = start(runs, "parallel=single", f"engine.checkout={tmp_path}")
    follow(run)
    verdict = judge(run)
    assert verdict.state == State.failed
    assert message in verdict.reason
