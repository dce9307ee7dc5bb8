"""The events of a run are the actions of its schedule, in their order: what, which micro-batch and chunk, with whom."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from random import Random

import numpy as np
import pytest

from conf.run_folder.rundir import RunDir
from megatron_ext.contract.schedule.iteration import as_json
from megatron_ext.contract.schedule.schedules import Kind
from megatron_ext.engine import engine as engine_module
from reports.readers.events import read_rank
from tests.megatron_ext.engine.executor.test_executor_soak import random_schedule
from tests.support.megatron_ext.engine_run import EngineRun
from tests.support.megatron_ext.pretended_gpus import pretended_gpus

WITH_FLUSH = {*Kind} - {Kind.UPDATE}
KINDS = {kind.value for kind in WITH_FLUSH}
OTHERS = [
    "grads-all-reduce",
    "embedding-grads-all-reduce",
    "grad-norm-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
]
ONE = ("parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=4")
TENSOR = (*ONE, "parallel.tensor=2", "train.iterations=2", "train.checkpoint=false")
TENSOR_LAYOUTS = {
    # By what a micro-batch's forward pass, loss and backward pass each have: the embedding and two ends of each layer's
    # two regions; largest logits and two sums; the head's and two of each layer. Recomputing a layer repeats its first
    # message, and stops where nothing more is needed.
    "plain": ("", {"tensor-all-reduce": (1 + 3 * 2, 2, 1 + 3 * 2)}),
    "recompute": ("parallel.recompute=full", {"tensor-all-reduce": (1 + 3 * 2, 2, 1 + 3 * 3)}),
    "sequence-parallel": (
        "parallel.sequence_parallel=true",
        {
            "tensor-all-reduce": (0, 2, 0),
            "tensor-all-gather": (1 + 3 * 2, 0, 1 + 3 * 2),
            "tensor-reduce-scatter": (1 + 3 * 2, 0, 1 + 3 * 2),
        },
    ),
}
GPU = "cluster.gpus.cpu.name=GPU"


def test_each_action_leaves_its_event(engine_run: Callable[..., EngineRun]) -> None:
    """In nobody's order, with actions of every kind that a schedule with a flush has."""
    lists = random_schedule(Random(7), 2, 2, 4)
    assert {action.kind for actions in lists for action in actions} == WITH_FLUSH
    own = ("parallel.schedule_file=own.json", "parallel.chunks=2", "parallel.partition=1-0-2-0", "train.iterations=2")
    run = engine_run("parallel.data=2", "parallel.pipeline=2", "parallel.micro_batch_size=1", *own)
    run.run.schedule.write_text(json.dumps(as_json(lists, 2, 4)))
    assert run.go() == 0, run.stderr()
    for place in run.plan.ranks:
        other = place.rank + 2 if place.stage == 0 else place.rank - 2
        expected = [
            (kind.value, m, chunk, other if kind.value.endswith(("send", "recv")) else -1)
            for kind, m, chunk in lists[place.stage]
        ]
        for iteration in (1, 2):
            found = events(run.run, place.rank, iteration)
            assert [event for event in found if event[0] in KINDS] == expected
            assert [name for name, *_ in found if name in OTHERS] == OTHERS
            ends = [name for name, *_ in found if name in ("batch-generator", "loss-compute")]
            assert ends == ["batch-generator"] + ["loss-compute"] * (4 * place.stage)


def events(run: RunDir, rank: int, iteration: int) -> list[tuple[str, int, int, int]]:
    """Name, micro-batch, chunk and peer, in the order in which they were written."""
    read = read_rank(run.rank_events(rank))
    records = read.records[read.records["iteration"] == iteration]
    names = [read.names[number] for number in records["name"]]
    return list(zip(names, *(records[key].tolist() for key in ("micro_batch", "chunk", "peer")), strict=True))


@pytest.mark.parametrize(
    ("layout", "device"),
    [
        ("plain", "cpu"),
        ("plain", "gpu"),
        ("recompute", "cpu"),
        ("sequence-parallel", "cpu"),
        ("sequence-parallel", "gpu"),
    ],
)
def test_each_message_of_a_tensor_group_lies_in_its_pass(
    engine_run: Callable[..., EngineRun],
    layout: str,
    device: str,
) -> None:
    gpu = device == "gpu"
    override, counts = TENSOR_LAYOUTS[layout]
    run = engine_run(*TENSOR, *override.split(), *([GPU] if gpu else []))
    assert run.go(pretended_gpus() if gpu else nullcontext()) == 0, run.stderr()
    for rank in (0, 1):
        read = read_rank(run.run.rank_events(rank))
        assert set(read.records["iteration"]) == {1, 2}, "what warms up is not an event"
        inside = Counter[tuple[str, str]]()
        for record in read.records:
            name = read.names[record["name"]]
            if name.startswith("tensor-"):
                assert record["peer"] == -1
                inside[name, read.names[_around(read.records, record, read.names)["name"]]] += 1
        passes = ("forward-compute", "loss-compute", "backward-compute")
        micro_batches = 2 * run.plan.micro_batches[0]  # of both iterations
        assert inside == {
            (name, one): micro_batches * count
            for name, of_passes in counts.items()
            for one, count in zip(passes, of_passes, strict=True)
            if count
        }


def _around(records: np.ndarray, inner: np.void, names: Sequence[str]) -> np.void:
    """The pass that holds an event, and is of its iteration, micro-batch and chunk."""
    (found,) = [
        record
        for record in records
        if names[record["name"]].endswith("-compute")
        and record["start_ns"] <= inner["start_ns"] <= inner["end_ns"] <= record["end_ns"]
    ]
    assert all(found[key] == inner[key] for key in ("iteration", "micro_batch", "chunk"))
    return found


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_is_summed_while_a_backward_pass_goes_on_leaves_events_of_its_own(
    engine_run: Callable[..., EngineRun], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "BUCKET_BYTES", 2**14)
    gpu = device == "gpu"
    layout = ("parallel.data=2", *ONE[1:], "parallel.sharded_optimizer=true", "train.precision=bf16")
    run = engine_run(*layout, "train.iterations=2", "train.checkpoint=false", *([GPU] if gpu else []))
    assert run.go(pretended_gpus() if gpu else nullcontext()) == 0, run.stderr()
    for rank in (0, 1):
        read = read_rank(run.run.rank_events(rank))
        for iteration in (1, 2):
            of = {name: [] for name in read.names}
            for record in read.records[read.records["iteration"] == iteration]:
                of[read.names[record["name"]]].append((int(record["start_ns"]), int(record["end_ns"])))
            ((_, passed),), ((left, summed),) = of["backward-compute"], of["grads-all-reduce"]
            overlapped = of["overlapped-grads-all-reduce"]
            assert len(overlapped) > 2
            assert sum(start < passed for start, _ in overlapped) >= len(overlapped) - 1
            assert all(start < end <= summed for start, end in overlapped)
            if gpu:  # where the computation takes the sums: nothing there tells when they came
                assert all(left <= end for _, end in overlapped)
            ((step, stepped),), ((clip, clipped),) = of["optimizer"], of["optimizer-clip-main-grad"]
            ((gather, gathered),) = of["params-all-gather"]
            assert step <= clip <= clipped <= gather <= gathered <= stepped
            ((norm, normed),) = of["grad-norm-all-reduce"]  # of the replicas' shares
            assert clip <= norm <= normed <= clipped
