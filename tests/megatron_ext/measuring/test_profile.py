"""What is measured is what was meant: times of work, bytes that autograd keeps, medians that are known."""

from __future__ import annotations

import math
import random
import statistics
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from fasop.costs.memory.activations import layer_activations
from fasop.costs.training import Training
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.measuring.laps import LEAST, Lap, Marks, median
from megatron_ext.measuring.passes import Parts, groups_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.profile import Trial

LAPS = ("embedding.forward", "layer.forward", "head.forward", "head.backward", "layer.backward", "embedding.backward")
"""Of a pass of GPT, in their order."""
CPU = torch.device("cpu")


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40))
def test_a_median_lies_within_its_interval(values: list[float]) -> None:
    found = median(values)
    assert found.value == pytest.approx(statistics.median(values))
    assert (found.spread == math.inf) == (len(values) < LEAST)
    assert found.spread == math.inf or found.spread <= (max(values) - min(values)) / 2


def test_the_interval_holds_the_true_median_in_19_of_20_cases() -> None:
    source = random.Random(1)
    held = 0
    for _ in range(1000):
        values = sorted(source.expovariate(1.0) for _ in range(40))
        found = median(values)
        low, high = values[13], values[26]  # the 14th and the 27th of 40: Conover 1999, table A3
        assert found.spread == pytest.approx((high - low) / 2)
        held += low <= math.log(2) <= high
    assert 930 <= held <= 985


def test_a_lap_is_the_time_in_which_a_thread_could_work_however_busy_the_machine() -> None:
    """Its processor time, in other words, but for what it waits for on purpose."""
    marks, before = Marks(CPU), time.thread_time()
    marks.set()
    while time.thread_time() - before < 0.1:
        pass
    marks.set()
    time.sleep(0.05)
    marks.set()
    marks.close()
    busy, asleep = marks.laps()
    assert busy.ms == pytest.approx(100, abs=8)
    assert 50 <= asleep.ms < 70


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    run = RunDir(tmp_path)
    one = compose(["model=tiny", "parallel=single", "parallel.global_batch_size=2", "parallel.micro_batch_size=2"])
    run.write_json(run.plan, make_plan(one, "test/run").as_json())
    plan = Plan.read(run.plan)
    return Parts(plan, plan.model, TensorGroup(), 2, CPU)


def test_a_layer_keeps_what_the_search_counts(parts: Parts) -> None:
    """All but the norms' statistics and the attention's, some percent of this small layer."""
    one = compose(["model=tiny", "parallel=single", "parallel.global_batch_size=2", "parallel.micro_batch_size=2"])
    counted = layer_activations(Training.of(one))
    assert counted < parts.kept_bytes()["layer"] < 1.05 * counted


def test_a_pass_times_every_part_apart_and_leaves_gradients(parts: Parts) -> None:
    parts.forward_and_backward(LEAST)
    found = parts.medians()
    assert tuple(found) == LAPS
    assert {len(laps) for laps in parts.laps.values()} == {LEAST}
    assert all(one.value > 0 for one in found.values())
    assert found["layer.backward"].value > found["layer.forward"].value
    assert parts.optimizer_ns(0.1).value > 0


@pytest.mark.parametrize(
    ("lap", "part", "known"),
    [
        ("head.forward", 0.01, True),
        ("head.forward", 0.1, False),
        ("layer.backward", 0.05, False),
        ("embedding.forward", 0.05, True),
    ],
    ids=["tight", "wide-head", "wide-layer", "an-embedding-that-hardly-counts"],
)
def test_times_are_known_once_what_counts_is(parts: Parts, lap: str, part: float, known: bool) -> None:
    """Of a pass of 1000 ms, in which the embedding takes 20 and each of four layers 100 each way."""
    ms = {"embedding": 10.0, "layer": 100.0, "head": 90.0}
    for name in LAPS:
        width = part if name == lap else 0.0
        usual = ms[name.split(".")[0]]
        parts.laps[name] = [Lap(usual * (1 + width * (-1) ** number), 0.0) for number in range(20)]
    assert parts.known() is known


def test_a_rank_out_of_memory_keeps_step_and_tells_why_and_other_failures_are_none_of_it(parts: Parts) -> None:
    def fail(words: str) -> None:
        raise RuntimeError(words)

    trial = Trial(seconds=1.0)
    trial.begin(parts)
    assert trial.wants_more()
    trial.attempt(partial(fail, "CUDA out of memory. Tried to allocate 2.00 GiB\nmore"))
    assert trial.too_large == "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert not trial.wants_more()
    trial.attempt(trial.round)  # nothing
    with pytest.raises(RuntimeError, match="shape mismatch"):
        trial.attempt(partial(fail, "shape mismatch"))


@pytest.mark.parametrize(
    ("size", "groups"),
    [(1, [[0], [1], [2], [3], [4]]), (2, [[0, 1], [3, 4]]), (3, [[0, 1, 2]])],
    ids=["alone", "one-left-over", "a-node-too-small"],
)
def test_tensor_groups_lie_inside_nodes(size: int, groups: list[list[int]]) -> None:
    assert groups_of([[0, 1, 2], [3, 4]], size) == groups
