"""Which ranks mark an iteration for Nsight Systems."""

from __future__ import annotations

import pytest
import torch

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.timeline.recorder import traced


def test_the_first_rank_of_each_node_marks_the_iteration_that_nsys_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: done.append(name))
    experiment = compose(["experiment=seed_a10x8", "profile.nsys=true", "profile.trace_iteration=3"])
    plan = make_plan(experiment, "a/b")
    for place in plan.ranks[:8]:
        for iteration in (2, 3, 4):
            done.clear()
            with traced(plan, place, iteration):
                done.append("iteration")
            marks = iteration == 3 and place.local_rank == 0
            around = ["synchronize", "start", "iteration", "synchronize", "stop"]
            assert done == (around if marks else ["iteration"])
