"""Pipelines without a flush learn what delayed gradient descent in one process learns, whatever their layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.events import NAMES
from megatron_ext.contract.schedule.streams import SEMANTICS
from megatron_ext.data.samples import BEGINNING
from megatron_ext.engine import engine
from megatron_ext.engine.streams.executor import last_of_stream
from megatron_ext.families.tasks import task_of
from megatron_ext.learning.delayed import DelayedTraining
from tests.megatron_ext.contract.schedule.test_streams import compositions, stream_of
from tests.megatron_ext.engine.test_layouts_agree import DROPOUT
from tests.megatron_ext.engine.test_rehearsal import events
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun

LAYERS = 5
UNTIED = [
    *("model.untie_embeddings_and_output_weights=true", "parallel.schedule=pipedream", "parallel.data=1"),
    *(f"model.layers={LAYERS}", "parallel.micro_batch_size=1"),
]
SGD = ("train.optimizer=sgd", "train.lr=0.1", "train.weight_decay=0.01")
ADAM = ("train.optimizer=adamw",)
FULL = "parallel.recompute=full"


class Case(NamedTuple):
    replicas: tuple[int, ...]
    semantics: str
    others: tuple[str, ...] = ()
    update_every: int = 1
    window: int = 7
    """Micro-batches of an iteration."""

    def __str__(self) -> str:
        others = "".join(f"-{one.rpartition('=')[2]}" for one in self.others)
        return f"{'-'.join(map(str, self.replicas))}-{self.semantics}-every{self.update_every}-{self.window}{others}"

    def overrides(self) -> list[str]:
        stages = len(self.replicas)
        share, rest = divmod(LAYERS, stages)
        return [
            *(*UNTIED, *self.others, f"parallel.pipeline={stages}", f"parallel.semantics={self.semantics}"),
            f"parallel.replicas={'-'.join(map(str, self.replicas))}",
            f"parallel.partition={'-'.join(str(share + (stage < rest)) for stage in range(stages))}",
            f"parallel.update_every={stream_of(self.replicas, self.semantics, self.update_every).update_every}",
            f"parallel.global_batch_size={self.window}",
        ]


def covering() -> Iterator[Case]:
    """Layouts of up to 5 ranks, with the other options in turn."""
    options = cycle(
        [
            SGD,
            (*ADAM, *DROPOUT),
            (*SGD, *DROPOUT, FULL),
            (*ADAM, FULL),
        ]
    )
    for number, replicas in enumerate(r for ranks in range(1, 6) for r in compositions(ranks)):
        yield Case(replicas, SEMANTICS[number % 4], next(options), 1 + number % 3 // 2, (7, 6, 1)[number % 3])


def stream_words(replicas: str, partition: str, semantics: str) -> tuple[str, ...]:
    """For a model of any family, whose iterations have seven micro-batches of a sample each."""
    return (
        *("parallel.schedule=pipedream", "parallel.data=1", "parallel.micro_batch_size=1"),
        *(f"parallel.pipeline={len(replicas.split('-'))}", f"parallel.replicas={replicas}"),
        *(f"parallel.partition={partition}", f"parallel.semantics={semantics}", "parallel.global_batch_size=7"),
    )


def assert_as_delayed(run: EngineRun, tolerance: float = 1e-5) -> None:
    """Losses, but for iterations whose updates were left out, weights, optimizer's state."""
    plan = run.plan
    task = task_of(plan)
    found = DelayedTraining(plan, task, task.samples("train", plan.train.iterations * plan.global_batch_size))
    losses: list[float] = []
    iteration = BEGINNING.iteration
    while iteration < plan.train.iterations:
        until = last_of_stream(plan.train, iteration + 1)
        losses += found.stream(iteration + 1, until)
        iteration = until
    logged = ~np.isnan(run.losses())
    assert logged.tolist() == [not line["skipped"] for line in run.metrics()]
    np.testing.assert_allclose(run.losses()[logged], np.array(losses)[logged], rtol=tolerance)
    state = run.state()
    expected = {f"{kind}/{part_name(block)}.{name}": value for (kind, block, name), value in found.state().items()}
    assert set(expected) == {name for name in state if not name.startswith("optimizer/")}
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def options(case: Case) -> set[object]:
    """Stages of as many and of other numbers of replicas, and everything else."""
    steps = {(b > a) - (b < a) for a, b in pairwise(case.replicas)}
    return {len(case.replicas), *(("step", one) for one in steps), case.semantics, case.window, case.update_every} | {
        (case.semantics, other) for other in case.others
    }


@pytest.mark.parametrize("case", cases.covering(covering(), options), ids=str)
def test_every_layout_learns_as_one_process_with_delays(engine_run: Callable[..., EngineRun], case: Case) -> None:
    run = engine_run(*case.overrides())
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 1), "stashing", (*ADAM, "train.precision=bf16")),
        Case((2, 2), "latest", SGD, 3, 8),
        Case((4,), "vertical", (*SGD, *DROPOUT, FULL), 2, 6),
    ],
    ids=str,
)
def test_gradients_are_summed_during_the_backward_pass(
    engine_run: Callable[..., EngineRun], monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """In buckets, but where the last rounds are not whole."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)  # the ranks are forked from this process
    run = engine_run(*case.overrides())
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run, 1e-2 if "train.precision=bf16" in case.others else 1e-5)
    records = np.concatenate([events(run, 0, iteration) for iteration in range(1, run.plan.train.iterations + 1)])
    found = Counter(NAMES[name] for name in records["name"])
    stream = run.plan.stream
    assert stream is not None
    whole = run.plan.train.iterations * case.window // (case.replicas[0] * stream.update_every)
    assert found["overlapped-grads-all-reduce"] >= 3 * whole > 0
    assert found["overlapped-grads-all-reduce"] % whole == 0


@pytest.mark.parametrize("semantics", ["vertical", "latest", "two"])
def test_the_weights_that_micro_batches_meet_make_a_difference(
    engine_run: Callable[..., EngineRun], semantics: str
) -> None:
    case = Case((1, 1, 1), "stashing", SGD)
    run = engine_run(*case.overrides())
    assert run.go() == 0, run.stderr()
    other = engine_run(*case._replace(semantics=semantics).overrides(), name=semantics)
    with pytest.raises(AssertionError):
        assert_as_delayed(EngineRun(run.run, other.plan))
