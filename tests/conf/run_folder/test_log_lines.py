"""The log line of an iteration is read whoever wrote it: tdpp, Megatron-LM of 2022, Megatron-LM of today."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.run_folder.log_lines import (
    WIDTH,
    IterationLine,
    for_people,
    is_evaluation_line,
    is_iteration_line,
    iteration_line,
    unlabelled,
)
from megatron_ext.engine.evaluation import Evaluation
from megatron_ext.engine.log import evaluation_line

OLD = (
    " iteration       10/      50 | consumed samples:          640 | elapsed time per iteration (ms): 4541.6 | "
    "learning rate: 7.031E-07 | global batch size:    64 | lm loss: 1.017721E+01 | loss scale: 1.0 | "
    "grad norm: 16.666 | number of skipped iterations:   1 | number of nan iterations:   0 |"
)
TODAY = (
    " [2026-11-21 10:20:30.123456] iteration       10/      50 | consumed samples:          640 | elapsed time per "
    "iteration (ms): 4541.6 | throughput per GPU (TFLOP/s/GPU): 31.5 | learning rate: 7.031250E-07 | global batch "
    "size:    64 | lm loss: 1.017721E+01 | loss scale: 1.0 | grad norm: 16.666 | number of skipped iterations:   1 | "
    "number of nan iterations:   0 |"
)
SAID = {
    "iteration": 10,
    "consumed_samples": 640,
    "elapsed_ms": 4541.6,
    "loss": 10.17721,
    "loss_scale": 1.0,
    "grad_norm": 16.666,
    "skipped": 1,
    "nan": 0,
    "energy_j_per_rank": None,
    "power_w_per_rank": None,
}
ENERGY = TODAY.replace("31.5 |", "31.5 | energy per GPU (J/iter/GPU): 1234.5 | power per GPU (W/GPU): 271.8 |")
LABELS = ["15: ", " 3: ", "0: ", "P1 03: ", "[default7]:", "[rank15]:", "15: [default7]:", "[my-trainer3]:"]
"""Of srun --label, whose numbers may be padded and follow that of a component of the job, and of torchrun."""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (OLD, {**SAID, "learning_rate": 7.031e-07, "tflops_per_rank": None}),
        (TODAY, {**SAID, "learning_rate": 7.03125e-07, "tflops_per_rank": 31.5}),
        (
            ENERGY,
            {
                **SAID,
                "learning_rate": 7.03125e-07,
                "tflops_per_rank": 31.5,
                "energy_j_per_rank": 1234.5,
                "power_w_per_rank": 271.8,
            },
        ),
    ],
    ids=["old", "today", "energy"],
)
def test_every_number_of_the_line_is_read(line: str, said: dict[str, float]) -> None:
    assert is_iteration_line(line)
    assert iteration_line(line) == IterationLine(**said)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("line", [OLD, TODAY], ids=["old", "today"])
def test_what_a_launcher_puts_before_a_line_changes_nothing(label: str, line: str) -> None:
    assert unlabelled(label + line) == line
    assert iteration_line(label + line) == iteration_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "     rank  0: 957.35",
        "  forward-compute:",
        "[Rank 0] (after 2 iterations) memory",
        "12:30: up",
        "DP_SIZE: 4",
        "0: 957.35",
        " 12: 3.10\n",
    ],
)
def test_what_is_no_label_stays(line: str) -> None:
    assert unlabelled(line) == line


def test_a_loss_that_is_left_out_is_not_a_number() -> None:
    line = iteration_line(
        TODAY.replace(" lm loss: 1.017721E+01 |", "").replace("nan iterations:   0", "nan iterations:   2")
    )
    assert line is not None
    assert math.isnan(line.loss)
    assert line.nan == 2


@pytest.mark.parametrize(
    "line",
    [
        "training ...",
        "    forward-compute ................................: (10.00, 12.00)",
        " validation loss at iteration 10 | lm loss value: 9.1 |",
        "",
    ],
    ids=["text", "timer", "validation", "empty"],
)
def test_another_line_is_none(line: str) -> None:
    assert not is_iteration_line(line)
    assert iteration_line(line) is None


@given(st.sampled_from([OLD, TODAY]), st.data())
def test_a_line_cut_short_never_gives_another_iteration(line: str, data: st.DataObject) -> None:
    cut = iteration_line(line[: data.draw(st.integers(0, len(line)))])
    assert cut is None or cut.iteration == 10


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    iteration_line(text)
    iteration_line(f"{TODAY[:60]}{text}")
    assert for_people(text) == text or text.startswith(" validation")
    for_people(f"{TODAY[:-4]}{text}")


ENGINE = (
    " iteration       20/     200 | consumed samples:          320 | elapsed time per iteration (ms): 1118.0 |"
    " learning rate: 2.961E-03 | global batch size:    16 | {} loss scale: {} | grad norm: 0.247 |"
    " number of skipped iterations:   {} | number of nan iterations:   0 |"
)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        pytest.param(
            ENGINE.format("lm loss: 3.305915E+00 |", 1.0, 0),
            "iteration  20/200  loss 3.306  1,118.0 ms  grad norm 0.2470  lr 0.002961  batch 16",
            id="tokens",
        ),
        pytest.param(
            ENGINE.format("loss: 3.305915E+00 | top-1: 8.000000E-01 |", 65536.0, 1),
            "iteration  20/200  loss 3.306  1,118.0 ms  skipped 1  top-1 0.8000  grad norm 0.2470  lr 0.002961  "
            "batch 16  scale 65536",
            id="own-metrics",
        ),
        pytest.param(
            ENGINE.format("loss: INF | " + " ".join(f"metric-{n}: 1.000000E-01 |" for n in range(9)), 1.0, 0),
            "iteration  20/200  loss INF  1,118.0 ms  metric-0 0.1000  metric-1 0.1000  metric-2 0.1000"
            "  metric-3 0.1000",
            id="no-room",
        ),
        pytest.param(
            evaluation_line(20, Evaluation({"loss": 3.2, "top-1": math.inf}, 1.25)),
            "evaluation after iteration 20  loss 3.200  top-1 INF  1.25 s",
            id="evaluation",
        ),
        pytest.param(
            evaluation_line(20, Evaluation({"loss": 3.2}, 0.0341)),
            "evaluation after iteration 20  loss 3.200  34.0 ms",
            id="evaluation-of-milliseconds",
        ),
        pytest.param(
            " validation at iteration 20 | loss: 3.200000E+00 | seconds: 0.0 |",
            "evaluation after iteration 20  loss 3.200",
            id="evaluation-without-a-time",
        ),
        pytest.param(
            " validation at iteration 20 | loss: 3.200000E+00 | seconds: x |",
            "evaluation after iteration 20  loss 3.200",
            id="evaluation-with-a-damaged-time",
        ),
        pytest.param(
            " iteration       20/     200 | consumed samp", " iteration       20/     200 | consumed samp", id="cut"
        ),
    ],
)
def test_a_line_that_people_read_fits_their_terminal(line: str, read: str) -> None:
    assert for_people(line) == read
    assert len(read) <= WIDTH


def test_the_engines_line_of_an_evaluation_is_known() -> None:
    line = evaluation_line(20, Evaluation({"loss": 3.2, "top-1": math.inf}, 1.25))
    assert is_evaluation_line(line)
    assert not is_iteration_line(line)
    assert line == " validation at iteration 20 | loss: 3.200000E+00 | top-1: INF | seconds: 1.250 |"
    assert not is_evaluation_line(" iteration       20/     200 | consumed samples:          320 |")
