"""Layouts of up to five ranks, with all options, learn over gloo what one process learns with delays.

Ranks go through many plans one after another: to start them takes longer than what they learn here.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from itertools import chain
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conf.compose import compose
from launch.control.planning.plan import make_plan
from megatron_ext.contract.layout import Layout
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.streams import SEMANTICS
from megatron_ext.data.samples import Samples
from megatron_ext.engine import engine
from megatron_ext.engine.engine import Engine
from megatron_ext.engine.streams.streaming import make_engine
from megatron_ext.families.tasks import task_of
from megatron_ext.learning.delayed import DelayedTraining
from megatron_ext.parallel.groups import Groups
from megatron_ext.timeline.recorder import Recorder
from tests.megatron_ext.contract.schedule.test_streams import compositions
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, FULL, SGD, Case
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT
from tests.support import cases
from tests.support.fasop.seeds import fresh
from tests.support.megatron_ext.engine_run import TINY, make_corpus

SMALL = ("model.hidden=16", "model.sequence_length=8", "train.lr_decay_iterations=4")
BATCHES = ((1, 7, 2), (2, 11, 1))
"""Rounds between updates, micro-batches of an iteration, iterations: hardly any number of replicas divides them."""
HANGS_AFTER_S = 30.0
"""A case, on a machine that does much else."""
State = dict[tuple[str, str, str], Tensor]
AXES = (SEMANTICS, (SGD, ADAM), ((), tuple(DROPOUT)), ((), (FULL,)), BATCHES)


def cases_of(ranks: int) -> list[Case]:
    """Any two options meet, and each of them every layout; of more than three ranks some of these are drawn."""
    pairs = cases.pairwise([*compositions(ranks)], *AXES)
    return [case_of(*options) for options in cases.drawn(pairs, 20 if ranks < 4 else 10)]


def case_of(replicas: tuple[int, ...], semantics: str, *others: tuple[Any, ...]) -> Case:
    *options, (interval, window, iterations) = others
    return Case(replicas, semantics, (*chain(*options), f"train.iterations={iterations}"), interval, window)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(1, 6))
def test_every_layout_learns_with_all_options_what_one_process_does(tmp_path: Path, ranks: int) -> None:
    learn(cases_of(ranks), tmp_path)


def test_some_layouts_of_four_ranks_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others each time but in CI, with gradients that are summed during the backward pass; a failure names them."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 2048)  # the ranks are forked from this process
    random, replicas = Random(fresh() or 0), [*compositions(4)]
    learn([case_of(random.choice(replicas), *map(random.choice, AXES)) for _ in range(8)], tmp_path)


def learn(tried: Sequence[Case], folder: Path) -> None:
    """Fails where a pipeline of one of these, which have the same number of ranks, learns something else."""
    ranks = sum(tried[0].replicas)
    prefix = make_corpus(folder)
    plans = [plan_of(case, prefix) for case in tried]
    samples = {size: samples_of(plan) for size, plan in {plan.global_batch_size: plan for plan in plans}.items()}
    context = multiprocessing.get_context("fork")
    progress = [context.Value("i", -1) for _ in range(ranks)]
    processes = [
        context.Process(target=take_part, args=(plans, samples, folder, rank, progress[rank])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + HANGS_AFTER_S * (10 + len(tried))
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        said = "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.txt")))
        reached = [str(tried[value.value]) for value in progress]
        assert [process.exitcode for process in processes] == [0] * ranks, f"ranks had come to {reached}\n{said}"
    finally:
        for process in processes:
            process.kill()
            process.join()


def plan_of(case: Case, prefix: Path) -> Plan:
    content = make_plan(compose([*TINY, f"data.prefix={prefix}", *case.overrides(), *SMALL]), "test/run").as_json()
    return Plan.parse(content, prefix.parent)


def samples_of(plan: Plan) -> Samples:
    return task_of(plan).samples("train", plan.train.iterations * plan.global_batch_size)


def take_part(
    plans: Sequence[Plan], samples: dict[int, Samples], folder: Path, rank: int, progress: Synchronized
) -> None:
    """As a rank of all plans, one after another, in one process; what goes wrong is left in a file."""
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        ranks, timeout = plans[0].world_size, timedelta(seconds=60)
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)

        @cache
        def groups_of(layout: Layout) -> Groups:
            return Groups.make(layout, 1, (), timeout)

        for number, plan in enumerate(plans):
            progress.value = number
            own = samples[plan.global_batch_size]
            made = make_engine(plan, task_of(plan), plan.ranks[rank], groups_of(plan.layout), own, Recorder(None))
            losses = [made.step(iteration).loss for iteration in range(1, plan.train.iterations + 1)]
            judge = number % ranks
            every = [None] * ranks if rank == judge else None
            dist.gather_object((state_of(made), losses), every, judge)
            if every is not None:
                compare(plan, own, [state for state, _ in every], every[-1][1])
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (told in full, and the exit code says it)
        (folder / f"rank-{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def state_of(made: Engine) -> State:
    state = made.optimizer.state()
    return {
        (kind, *place): made.flat.view(name, values).detach()
        for kind, values in state.items()
        for name, place in made.places.items()
    }


def compare(plan: Plan, samples: Samples, states: Sequence[State], losses: Sequence[float]) -> None:
    """To 1e-5, of all replicas."""
    training = DelayedTraining(plan, task_of(plan), samples)
    np.testing.assert_allclose(losses, training.stream(1, plan.train.iterations), rtol=1e-5)
    expected = training.state()
    assert set(expected) == set().union(*states)
    for state in states:
        for name, value in state.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
