"""A run on GPUs is judged by what its nodes tell of them, too; one on CPUs is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.run_folder.gpu_lines import GpuReading, GpuSample, GpuTrouble, entry_text
from conf.run_folder.rundir import RunDir
from launch.judge.findings import Findings
from launch.judge.state import State
from launch.judge.status_text import as_json, as_text
from launch.judge.verdict import decide, judge
from launch.observe.look import observe
from tests.launch.judge.test_gpu_health import REST, SPIN, WORK
from tests.support.launch.run_folders import NOW, Case, ended


def gpu_run(path: Path, case: Case, *gpus: GpuSample, device: str = "cuda") -> RunDir:
    """A run of two nodes with two ranks each; on each node are these GPUs."""
    run = case.make(path / "run")
    run.write_json(run.plan, run.read_json(run.plan) | {"device": device})
    for node in ("local-0", "local-1"):
        placed = tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
        readings = [
            GpuReading(unix=int(NOW) - 10 * back, host="there", number=500 - back, interval_s=10, gpus=placed)
            for back in reversed(range(200))
        ]
        run.node_gpu(node).write_text("".join(map(entry_text, readings)))
    return run


def test_a_run_whose_gpus_only_wait_hangs(tmp_path: Path) -> None:
    verdict = judge(gpu_run(tmp_path, Case(last=20, age=40), SPIN, SPIN), NOW)
    assert (verdict.state, verdict.rule, verdict.exit_code) == (State.hung, "gpu-spin", 9)
    assert verdict.reason.startswith("4 of 4 GPUs only wait (")


CASES = {
    "it has just logged": (Case(last=20, age=5), State.running),
    "its last iteration is logged": (Case(last=50, age=500), State.running),
    "a node has not started": (Case([None, None], submitted=NOW - 2), State.starting),
    "it has failed": (Case([ended(1), ended(143, "SIGTERM")], last=20, age=40), State.failed),
}


@pytest.mark.parametrize(("case", "state"), CASES.values(), ids=CASES.keys())
def test_the_same_gpus_do_not_make_it_hang_when(tmp_path: Path, case: Case, state: State) -> None:
    assert judge(gpu_run(tmp_path, case, SPIN, SPIN), NOW).state == state


def test_a_run_that_is_late_for_another_reason_is_stalled(tmp_path: Path) -> None:
    assert judge(gpu_run(tmp_path, Case(last=20, age=40), WORK, SPIN), NOW).state == State.stalled


def test_a_run_that_never_logged_anything_hangs_too(tmp_path: Path) -> None:
    verdict = judge(gpu_run(tmp_path, Case(), SPIN, replace(REST, processes=())), NOW)
    assert (verdict.state, verdict.rule) == (State.hung, "gpu-idle")


def test_each_node_at_work_has_a_line_of_evidence(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, Case(last=20), WORK, WORK)
    run.node_gpu("local-1").write_text(entry_text(GpuTrouble(unix=int(NOW), text="no GPU on there: neither nor")))
    seen = observe(run, NOW)
    found = Findings(run=run, seen=seen, verdict=decide(seen))
    text = as_text(found)
    assert "  GPUs of local-0: 2 of 2 busy, 97 % mean, fullest 11.2/22.2 GiB\n" in text
    assert text.endswith("\n  GPUs of local-1: no GPU on there: neither nor")
    told = json.loads(json.dumps(as_json(found)))["gpus"]
    assert told["local-0"]["gpus"][1]["power_w"] == 140
    assert told["local-1"]["text"] == "no GPU on there: neither nor"


def test_a_run_on_cpus_has_no_line_of_gpus(tmp_path: Path) -> None:
    seen = observe(gpu_run(tmp_path, Case(last=20, age=40), SPIN, SPIN, device="cpu"), NOW)
    assert seen.gpus == ()
    assert decide(seen).state == State.stalled
    assert "GPU" not in "".join(decide(seen).evidence)


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    run = gpu_run(tmp_path, Case(last=20), *[WORK] * 16)
    (node, _) = observe(run, NOW).gpus
    assert [reading.number for reading in node.readings] == [498, 499, 500]
