"""The events of a run are the actions of its schedule, in their order: what, which micro-batch and chunk, with whom."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from conf.rundir import RunDir
from megatron_ext.schedule import Kind, as_json
from reports.events import read_rank
from tests.megatron_ext.engine_run import EngineRun
from tests.megatron_ext.test_executor_soak import random_schedule

KINDS = {kind.value for kind in Kind}
OTHERS = ["grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad", "optimizer"]


def test_each_action_leaves_its_event(engine_run: Callable[..., EngineRun]) -> None:
    """In nobody's order, with actions of every kind."""
    lists = random_schedule(Random(7), 2, 2, 4)
    assert {action.kind for actions in lists for action in actions} == set(Kind)
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
