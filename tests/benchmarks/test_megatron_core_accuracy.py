"""The plans of `benchmarks.megatron_core_accuracy` are what its page says they are."""

from __future__ import annotations

from benchmarks.megatron_core_accuracy import EXPERTS, SLEEP, _slowed, drawn
from conf.schema.engine import EngineKind
from fasop.costs.profiles.files import read_profile


def test_plans_are_drawn_that_differ_and_some_have_experts_or_context() -> None:
    plans = [case.overrides for case in drawn(8, 3)]
    assert len({*plans}) == 13
    assert [EXPERTS[0] in plan for plan in plans] == [False] * 8 + [True] * 2 + [False] * 3
    assert [case.experiment.parallel.context > 1 for case in drawn(8, 3)] == [False] * 10 + [True] * 3
    kinds = {case.experiment.engine.kind for case in drawn(1, 3)}
    assert kinds == {EngineKind.megatron_core}


def test_a_prediction_knows_how_long_layers_sleep_and_the_rest_stays() -> None:
    before = read_profile("cpu")
    for one, slower in zip(before.costs, _slowed(before, 2.0).costs, strict=True):
        assert one.layer is not None and slower.layer is not None
        slept = 1e3 * SLEEP.forward * (2 * one.micro_batch_size - 1)  # they slept once while they were profiled
        assert abs(slower.layer.forward - one.layer.forward - slept) < 1e-9
        assert slower.layer.backward > one.layer.backward + 1
        assert (slower.head, slower.embedding) == (one.head, one.embedding)
