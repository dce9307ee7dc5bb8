"""The benchmark for a GPU works where there is none, and its second half needs nothing but torch and numpy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import prepare
from benchmarks.gpu.contenders import PlainGpt
from benchmarks.gpu.profiled import counts
from benchmarks.gpu_training import CALLS, CONTENDERS
from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.families import stage_of
from tests.support import ROOT

WITHOUT_TDPP = """
import sys
class Refused:
    def find_spec(self, name, *_):
        if name.split(".")[0] in "conf fasop launch reports hydra omegaconf submitit pandas plotly".split():
            raise ImportError(f"{name} is not on the GPU's machine")
sys.meta_path.insert(0, Refused())
from benchmarks.gpu_training import main
main()
"""


@pytest.mark.slow
def test_a_prepared_case_trains_with_torch_and_numpy_alone_to_the_losses_that_go_with_it(tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "day", ["tiny", "llama-1b"])
    results = tmp_path / "results"
    command = [sys.executable, "-c", WITHOUT_TDPP, str(tmp_path / "day"), "tiny:ours-part-22", "tiny:plain"]
    command += ["--device", "cpu", "--results", str(results)]
    subprocess.run(command, cwd=ROOT, check=True)
    ours, plain = map(json.loads, results.read_text().splitlines())
    assert "failed" not in ours
    assert "failed" not in plain
    assert ours["furthest_from_the_cpu"] == 0.0
    assert 0 < plain["loss"] < 7


def test_what_a_day_with_a_gpu_measures_is_prepared() -> None:
    for wanted in [one for call in CALLS.values() for one in call]:
        case, _, contender = wanted.partition(":")
        assert case in prepare.CASES
        assert contender in CONTENDERS


@pytest.mark.parametrize("name", prepare.CASES)
def test_every_case_has_a_plan(name: str, tmp_path: Path) -> None:
    plan = prepare.plan_of(name, tmp_path / "tokens")
    assert plan.global_batch_size == prepare.CASES[name].micro * prepare.CASES[name].micro_batches


@pytest.mark.parametrize("model", ["tiny", "llama-tiny"])
def test_the_plain_loops_model_is_as_large_as_ours(model: str) -> None:
    plan: Plan = make_plan(compose(["parallel=single", f"model={model}", "data.prefix=x"]), "x")
    ours = sum(parameter.numel() for _, parameter in stage_of(plan, 0, TensorGroup()).parameters_by_name())
    assert sum(parameter.numel() for parameter in PlainGpt(plan.model).parameters()) == ours


def test_kernels_waits_and_idle_time_are_those_of_the_trace() -> None:
    def event(kind: str, name: str, start: float, length: float) -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": start, "dur": length}

    found = counts(
        [
            event("kernel", "gemm", 10, 10),
            event("kernel", "add", 15, 10),  # on another stream, partly at once
            event("gpu_memcpy", "Memcpy HtoD", 30, 10),
            event("cuda_runtime", "cudaStreamSynchronize", 0, 5),
            event("cuda_runtime", "cudaLaunchKernel", 0, 5),
            event("gpu_user_annotation", "step", 0, 100),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert (found.kernels, found.host_waits) == (2, 1)
    assert found.idle == pytest.approx(5 / 30)
    assert counts([]).idle is None
