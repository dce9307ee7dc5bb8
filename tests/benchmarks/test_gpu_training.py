"""The benchmark for a GPU works where there is none, and its second half needs nothing but torch and numpy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import prepare, results
from benchmarks.gpu.contenders import PlainGpt
from benchmarks.gpu.prepare import AUGMENTED, Case, ProfileCase
from benchmarks.gpu.profiled import counts
from benchmarks.gpu.run import ITERATIONS, python
from benchmarks.gpu_training import CALLS, CONTENDERS, PROFILE, in_time
from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support import ROOT

WITHOUT_TDPP = """
import sys
for name in "conf fasop launch reports hydra omegaconf submitit pandas plotly sklearn".split():
    sys.modules[name] = None
"""
"""As sitecustomize.py: of all processes that have its folder in PYTHONPATH."""
SMALL = ("model.layers=1", "model.hidden=16", "model.heads=2", "model.sequence_length=16", "model.vocab_size=64")
CASES = {
    "tiny": Case("tiny", 2, 2, SMALL, "fp32"),
    "images": Case("resnet-tiny", 4, 2, (*AUGMENTED, "model.image_size=32", "model.channels=3"), "fp32"),
}
PROFILES = {"profile-tiny": ProfileCase("tiny", SMALL, ("tiny",), "fp32")}


def run(folder: Path, into: Path, tmp_path: Path, *words: str) -> str:
    """What the benchmark prints on a machine that has torch and numpy alone."""
    (tmp_path / "without").mkdir(exist_ok=True)
    (tmp_path / "without" / "sitecustomize.py").write_text(WITHOUT_TDPP)
    command = [sys.executable, "-m", "benchmarks.gpu_training", folder, *words, "--device", "cpu", "--results", into]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "without")}
    return subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.slow
def test_prepared_cases_train_with_torch_and_numpy_alone_and_tables_show_them(tmp_path: Path) -> None:
    prepare.prepare(tmp_path / "day", CASES, PROFILES)
    wanted = ["profile-tiny:profile", "tiny:ours", "tiny:ours-part-22", "tiny:plain"]
    wanted += ["images:ours", "images:ours-same-images"]
    printed = run(tmp_path / "day", tmp_path / "results", tmp_path, *wanted, "--peak-tflops", "1", "--minutes", "600")
    assert "failed" not in printed
    assert "no time" not in printed
    records = results.read([tmp_path / "results"])
    assert [f"{one['case']}:{one['contender']}" for one in records] == wanted
    found = dict(zip(wanted, records, strict=True))
    assert found["tiny:ours"]["furthest_from_the_cpu"] == found["tiny:ours-part-22"]["furthest_from_the_cpu"] == 0.0
    assert 0 < found["tiny:plain"]["losses"][-1] < 7
    assert found["images:ours"]["losses"][0] == found["images:ours-same-images"]["losses"][0]
    assert found["images:ours"]["losses"] != found["images:ours-same-images"]["losses"]
    assert all(one["samples_per_s"] > 0 for one in records[1:])
    lines = results.page(records, "gpu-cpu.json", PROFILES, CASES)
    assert f"| tiny | {ITERATIONS} | 0.0e+00 | yes |" in lines
    for case, contender in (one.split(":") for one in wanted[1:]):
        (line,) = (line for line in lines if line.startswith(f"| {case} | {contender} | "))
        assert line.split(" | ")[2].endswith(" images" if case == "images" else " tokens")
    (line,) = (line for line in lines if line.startswith("| tiny |") and line.count("|") == 9)
    predicted_ms, took_ms = map(float, line.split(" | ")[1:3])
    assert took_ms == pytest.approx(4e3 / found["tiny:ours"]["samples_per_s"], abs=0.06)
    assert predicted_ms > 0


def test_a_call_ends_in_its_minutes_keeps_what_it_has_and_knows_what_is_left() -> None:
    now = [0.0]

    def measure(case: str, contender: str, seconds: float) -> dict[str, object]:
        needs = {"quick": 100.0, "hangs": 10**6, "broken": 10.0}[case]
        now[0] += min(needs, seconds)
        if needs > seconds:
            raise TimeoutError(f"ended after {seconds:.0f} s")
        if case == "broken":
            raise RuntimeError("out of memory")
        return {"samples_per_s": 1.0}

    wanted = ["quick:ours", "hangs:ours", "broken:plain", "quick:plain", "quick:ours", "quick:ours"]
    found = [*in_time(wanted, 400.0, measure, lambda: now[0])]
    assert [(one["case"], one["contender"], one["took_s"], one.get("failed")) for one in found] == [
        ("quick", "ours", 100.0, None),
        ("hangs", "ours", 100.0, "ended after 100 s"),
        ("broken", "plain", 10.0, "RuntimeError: out of memory"),
        ("quick", "plain", 100.0, None),
    ]
    assert wanted == ["quick:ours", "quick:ours"]
    assert now == [400.0]


def test_a_measurement_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="ended after 0 s"):
        python(["-c", "import time; time.sleep(10**6)"], 0.1)
    code = "from subprocess import *; print(Popen(['sleep', '1000000'], stdout=DEVNULL, stderr=DEVNULL).pid)"
    stat = Path("/proc") / python(["-c", code]).strip() / "stat"
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_rates_are_compared_within_a_call_and_memory_outside_torch_is_shown() -> None:
    def record(call: str, contender: str, rate: float) -> dict[str, object]:
        counts = {"kernels": 500, "host_waits": 3, "idle": 0.25, "longest": [["a|b<int>", 7, 1.5]]}
        mib = {"max_allocated": 1000.0, "max_reserved": 1500.0}
        found = {"samples_per_s": rate, "tokens_per_s": 10 * rate, "mfu": 0.5, "counts": counts, "mib": mib}
        machine = {"device": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0"}
        return {"case": "one", "contender": contender, "call": call, "machine": machine, "used_mib": 2000, **found}

    slow = [record("2026-11-27 1", "ours", 50.0), record("2026-11-27 1", "plain-compiled", 100.0)]
    fast = [record("2026-11-28 2", "ours", 90.0), record("2026-11-28 2", "plain", 99.0)]
    failed = {
        **record("2026-11-28 2", "megatron-core", 1.0),
        "failed": "RuntimeError: no module\nnamed x",
        "took_s": 9.0,
    }
    del failed["samples_per_s"]
    lines = results.page([*slow, *fast, record("2026-11-28 2", "ours", 110.0), failed], "gpu-nvidia-h200.json", {}, {})
    assert lines[0] == "# NVIDIA H200"
    assert "2026-11-27, 2026-11-28" in lines[2]
    same = "50.0% | {} | 1,000 | 1,500 | 500 | 500 | 3 | 25.0% |"
    assert f"| one | plain-compiled | 1,000 tokens | {same.format('2.000')}" in lines
    assert f"| one | plain | 990 tokens | {same.format('0.990')}" in lines
    assert f"| one | ours | 1,100 tokens | {same.format('1.100')}" in lines
    assert lines.count("| one | ours | `a/b<int>` | 7 | 1.50 |") == 1
    assert "| one | megatron-core | 9.0 | `named x` |" in lines


def test_what_a_day_with_a_gpu_measures_is_prepared() -> None:
    for wanted in [one for call in CALLS.values() for one in call]:
        case, _, contender = wanted.partition(":")
        assert case in (prepare.PROFILES if contender == PROFILE else prepare.CASES)
        assert contender in CONTENDERS


def test_a_third_call_measures_what_its_profiles_predict() -> None:
    for name, of in prepare.PROFILES.items():
        assert f"{name}:{PROFILE}" in CALLS[3]
        assert {f"{case}:ours" for case in of.predicted} <= {*CALLS[3]}
        cases = [prepare.CASES[case] for case in of.predicted]
        assert [(case.model, case.overrides, case.precision) for case in cases] == [
            (of.model, of.overrides, of.precision)
        ] * len(cases)


@pytest.mark.parametrize("name", prepare.CASES)
def test_every_case_has_a_plan(name: str) -> None:
    plan = make_plan(prepare.experiment_of(prepare.CASES[name]), name)
    assert plan.device == "cuda"
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
    assert found.longest == [("gemm", 1, 0.01), ("add", 1, 0.01)]
    assert found.idle == pytest.approx(5 / 30)
    assert counts([]).idle is None
