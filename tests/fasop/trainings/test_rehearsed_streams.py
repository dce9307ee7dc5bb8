"""A training in streams that is simulated is the virtual rehearsal of it, while streams change, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.compose import compose
from fasop.simulation.predict import predict
from tests.fasop.shares.test_own_streams import words
from tests.fasop.trainings.test_rehearsed import played
from tests.support.megatron_ext.engine_run import make_run

__all__ = ["words"]
PLAN = ("executor.rehearse=virtual", "parallel.micro_batch_size=2", "train.log_interval=1", "profile.timeline=false")
CASES = {
    "given": (
        *("parallel.streams=3-2", "parallel.shares=6-8", "parallel.global_batch_size=28", "train.samples=2000"),
        *("adapt.rule=noise", "adapt.upper=112", "adapt.every=5", "executor.noise='10,200'"),
    ),
    "changing": (
        *("parallel.shares=6-8", "parallel.global_batch_size=112", "train.iterations=60"),
        *("adapt.rebalance=true", "adapt.every=2", "adapt.streams=[1,2,3]", "adapt.micro_batch_sizes=[4]"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_training_in_streams_ends_with_its_rehearsal(tmp_path: Path, words: list[str], case: str) -> None:
    """Last rounds have fewer micro-batches than there are streams."""
    own = [word for word in words if not word.startswith(("executor.rehearse", "runs_dir"))]
    given = (*own, *PLAN, *CASES[case])
    run = make_run(tmp_path / "run", tmp_path / "none", *given, base=())
    assert run.go() == 0, run.stderr()
    stretches, adapt = played(run.plan, *given), run.plan.adapt
    assert adapt is not None
    assert max(max(one.division.copies) for one in stretches) > 1
    if case == "changing":
        assert len({one.division.copies for one in stretches}) > 1
    else:
        assert any(n % v for one in stretches for n, v in zip(one.division.shares, one.division.copies, strict=True))
    every = [one for one in stretches for _ in range(one.iterations)]
    simulated = [
        one.measured_s if adapt.measures and adapt.due(number) else one.seconds for number, one in enumerate(every, 1)
    ]
    ran = [line["elapsed_ms"] / 1e3 for line in run.metrics()]
    assert ran[1:] == pytest.approx(simulated[1:], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_an_iteration_in_given_streams_takes_what_is_predicted(tmp_path: Path, words: list[str]) -> None:
    own = [word for word in words if not word.startswith(("executor.rehearse", "runs_dir"))]
    given = (*own, *PLAN, *CASES["given"][:3], "train.iterations=6")
    run = make_run(tmp_path / "run", tmp_path / "none", *given, base=())
    assert run.go() == 0, run.stderr()
    ran = [line["elapsed_ms"] / 1e3 for line in run.metrics()]
    assert ran[1:] == pytest.approx([predict(compose(given)).iteration_s] * 5, rel=1e-5)
