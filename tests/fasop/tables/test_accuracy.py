"""Predictions beside runs: which term is off is told, and taking it into account makes the next prediction right."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from conf.compose import compose, config_text
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import Experiment
from fasop.costs.calibration import Calibration, read_calibration
from fasop.costs.hardware import Factors
from fasop.errors import SearchError
from fasop.simulation.predict import Prediction, predict
from fasop.tables.accuracy import TERMS, Measured, MeasuredStage, calibration, compare
from fasop.tables.accuracy_tables import runs, shared, together, verdict
from launch.cli import main
from launch.commands import search
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from tests.support.fasop.plans import MEGATRON, experiment, mixed
from tests.support.megatron_ext.engine_run import EngineRun

REHEARSED = ("executor=local", "container=none", "executor.rehearse=virtual", "train.iterations=4")
SMALL = ("parallel.data=2", "parallel.pipeline=4", "parallel.node_order=gpu2*2", "parallel.global_batch_size=12")
UNEVEN = ("cluster=a10x8", *SMALL, "parallel.partition=0-20-8-20", "train.precision=fp16", *REHEARSED)


def as_measured(prediction: Prediction, **factors: float) -> Measured:
    """A run in which all is as predicted, but for these factors."""
    of = {name: factors.get(name, 1.0) for name in TERMS}
    stages = [
        MeasuredStage(
            forward=[of["forward"] * seconds for seconds in times.forward],
            backward=[of["backward"] * seconds for seconds in times.backward],
            send_forward=of["messages"] * times.send_forward,
            send_backward=of["messages"] * times.send_backward,
            gradients=of["gradients"] * prediction.durations.gradients[number],
            optimizer=of["optimizer"] * prediction.durations.optimizer[number],
        )
        for number, times in enumerate(prediction.durations.times)
    ]
    return Measured(
        run="a/b",
        iteration_s=prediction.iteration_s,
        iterations=3,
        stages=stages,
        embedding=of["embedding"] * prediction.durations.embedding,
        emulated=False,
    )


@pytest.mark.parametrize("term", TERMS)
def test_the_term_that_is_off_is_told_and_mended(term: str) -> None:
    one = mixed(*MEGATRON)  # which hides no gradients, so that its terms are in proportion to their factors
    prediction = predict(one)
    found = compare(as_measured(prediction, **{term: 4.0}), prediction)
    assert found.worst is not None
    assert found.worst.name == term
    assert found.replayed_s == pytest.approx(found.worst.iteration_s)
    assert next(iter(verdict(found))).startswith(f"largest error: {term} (-75.0%)")
    mended = calibration([found])
    assert set(mended.groups) == {"hgx", "gpu2"}
    for factors in mended.groups.values():
        assert asdict(factors) == pytest.approx(asdict(Factors(**{term: 4.0})))
    assert predict(one, calibration=mended).iteration_s == pytest.approx(found.replayed_s)


def test_what_is_as_predicted_needs_no_calibration() -> None:
    prediction = predict(mixed())
    found = compare(as_measured(prediction), prediction)
    assert list(verdict(found)) == ["no term changes the prediction by more than 1%"]
    for factors in calibration([found]).groups.values():
        assert asdict(factors) == pytest.approx(asdict(Factors()))


def test_a_term_that_is_right_in_all_but_not_by_stage_is_told_so() -> None:
    prediction = predict(experiment(*MEGATRON))
    measured = as_measured(prediction)
    first, *middle, last = measured.stages
    moved = replace(first, optimizer=first.optimizer + 0.5), *middle, replace(last, optimizer=last.optimizer - 0.5)
    found = compare(replace(measured, stages=moved), prediction)
    assert next(iter(verdict(found))).startswith("largest error: optimizer (total right, stages not)")


def test_what_no_term_explains_is_told_apart() -> None:
    prediction = predict(mixed())
    found = compare(replace(as_measured(prediction), iteration_s=1.25 * prediction.iteration_s), prediction)
    assert list(verdict(found))[1].startswith("with all terms as measured, an error of -20.0% remains")


def test_a_run_without_events_is_compared_in_all() -> None:
    prediction = predict(experiment(*MEGATRON))
    measured = replace(as_measured(prediction), stages=(), iteration_s=1.40)
    found = compare(measured, prediction)
    assert abs(found.error) < 0.05
    assert runs([found])[1][0][3] == f"{found.error:+.1%}"
    other = compare(replace(measured, iteration_s=2 * prediction.iteration_s), prediction)
    assert together([found, other]).endswith(", worst 50.0%")
    with pytest.raises(SearchError, match="the runs have no times by stage to calibrate with"):
        calibration([found])


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Experiment]:
    """Rehearses XL on A10 nodes, where passes and messages take so many times what the profile says."""

    def go(forward: float = 1.0, messages: float = 1.0) -> Experiment:
        run = RunDir(tmp_path / "runs" / "xl" / "one")
        for folder in (run.nodes, run.events, run.errors):
            folder.mkdir(parents=True)
        one = experiment(*UNEVEN)
        plan = make_plan(one, "xl/one").as_json()
        for rank in plan["rehearsal"]["ranks"]:
            rank["forward_ns"] = [round(forward * ns) for ns in rank["forward_ns"]]
            for key in ("send_forward_ns", "send_backward_ns"):
                rank[key] = round(messages * rank[key])
        run.write_json(run.plan, plan)
        run.config.write_text(config_text(one))
        engine = EngineRun(run, Plan.read(run.plan))
        assert engine.go() == 0
        return one

    return go


@pytest.mark.slow
def test_a_run_says_which_term_is_off_and_calibrates_the_next_search(
    tmp_path: Path, run: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(forward=1.5, messages=3.0)
    file, words = tmp_path / "found.yaml", ["search", "validate=one", f"runs_dir={tmp_path / 'runs'}"]
    assert main([*words, f"calibrate={file}"]) == 0
    told = capsys.readouterr().out
    assert "largest error: forward (-33.3%)" in told
    assert "with all terms as measured" not in told
    factors = read_calibration(file).groups["gpu2"]
    assert asdict(factors) == pytest.approx(asdict(Factors(forward=1.5, messages=3.0)), rel=1e-3)
    assert main([*words, f"calibration={file}"]) == 0
    told = capsys.readouterr()
    assert "no term changes the prediction by more than 1%" in told.out  # type: ignore[attr-defined]
    assert "(calibrated: node groups gpu2, by xl/one)" in told.err  # type: ignore[attr-defined]
    searched = ["search", "cluster=a10x8", "cluster.groups.gpu2.count=1", "model=xl", "train.precision=fp16"]
    searched += ["parallel=single", "parallel.global_batch_size=8", "top=1"]
    assert main([*searched, f"calibration={file}"]) == 0
    told = capsys.readouterr()
    assert "(calibrated: node groups gpu2, by xl/one)" in told.err  # type: ignore[attr-defined]
    assert main(searched) == 0
    times = [float(out.split(" ms")[0].split()[-1]) for out in (told.out, capsys.readouterr().out)]  # type: ignore[attr-defined]
    assert times[0] > 1.1 * times[1]
    assert one.parallel.pipeline == 4


def test_ranks_that_took_turns_on_this_machine_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "runs" / "tiny" / "one")
    run.path.mkdir(parents=True)
    run.write_json(run.provenance, {"host": socket.gethostname()})
    sizes = ("parallel.pipeline=4", "parallel.data=1", "parallel.partition=1-1-1-1", "parallel.global_batch_size=4")
    four = compose(["model=tiny", *sizes])
    for cores, told in ((4, None), (3, (4, 3))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert search.cores_shared(run, four) == told
    assert "tiny/one: 4 ranks took turns on the 3 cores of this machine" in shared(run.name, 4, 3)
    assert search.cores_shared(run, experiment(*UNEVEN)) is None
    run.write_json(run.provenance, {"host": "elsewhere"})
    assert search.cores_shared(run, four) is None


def test_a_calibration_is_for_the_nodes_that_it_was_made_on() -> None:
    other = Calibration(runs=["a/b"], groups={"elsewhere": Factors()})
    with pytest.raises(SearchError, match=r"for the node groups elsewhere, but cluster\.groups has gpu2; make one"):
        predict(experiment(), calibration=other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[1]", "is not a calibration: the file has no keys"),
        ("3", "is not a calibration: the file has no keys"),
        ("runs: a: b", "is not a calibration: not YAML: mapping values are not allowed here"),
        (b"\xff", "is not a calibration: not a text file: byte 0 is not UTF-8"),
        ("runs: [a]", "groups is not set"),
        ("runs: [a]\ngroups: {gpu2: {speed: 2}}", "is not a calibration: groups.gpu2.speed: Key 'speed'"),
        ("runs: [a]\ngroups: {gpu2: {forwrd: 2}}", "did you mean forward?"),
        ("runs: [a]\ngroups: {gpu2: {forward: -1}}", "a factor for forward must be from 0.01 to 100, not -1"),
    ],
    ids=["absent", "a-list", "a-number", "no-yaml", "bytes", "no-groups", "unknown-term", "misspelt", "negative"],
)
def test_what_is_no_calibration_is_one_message(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SearchError, match="'tdpp search validate=RUN calibrate=FILE' makes one") as caught:
        read_calibration(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["calibrate=a.yaml"], "calibrate=a.yaml needs runs to calibrate with: add validate=RUN"),
        (["validate=one,"], "validate=one, must be runs separated by commas"),
        (["validate=one", "model=xl"], "it does not take model, only"),
        (["validate=one", "calibrate=a", "calibration=b"], "give only one of the two"),
    ],
    ids=["no-run", "comma", "other-keys", "both"],
)
def test_what_cannot_be_validated_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *words]) == 1
    assert message in capsys.readouterr().err
