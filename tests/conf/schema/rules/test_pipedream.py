"""What does not go with a pipeline without a flush gets one message with the way out."""

from __future__ import annotations

import re

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Schedule
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.schedule.streams import Stream

PIPEDREAM = [
    *("model.untie_embeddings_and_output_weights=true", "parallel.schedule=pipedream", "parallel.global_batch_size=6"),
    *("parallel.micro_batch_size=2", "data.prefix=/x", "model.layers=4"),
    *("parallel.data=1", "parallel.pipeline=1", "parallel.partition=null"),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("parallel.semantics=latest parallel.schedule=gpipe", "parallel.semantics=latest works only with parallel"),
        ("parallel.update_every=2 parallel.schedule=gpipe", "parallel.update_every=2 works only with parallel"),
        (
            "parallel.schedule_file=own.json",
            "parallel.schedule_file=own.json cannot be combined with parallel.schedule=pip",
        ),
        ("parallel.global_batch_size=7", "is not divisible by parallel.micro_batch_size=2; the nearest that are: 6, 8"),
        (
            "parallel.data=2 parallel.shares=2-1",
            "parallel.shares=2-1 cannot be combined with parallel.schedule=pipedream",
        ),
        ("parallel.data=2 parallel.sharded_optimizer=true", "parallel.sharded_optimizer=true cannot be combined with"),
        ("parallel.chunks=2 parallel.pipeline=2", "parallel.chunks=2"),
        (
            "parallel.pipeline=2 parallel.tensor=2-1 parallel.replicas=1-2",
            "parallel.tensor=2-1 cannot be combined with",
        ),
        ("parallel.pipeline=2 parallel.depth=3", "parallel.depth=3 is for 1 stage, but parallel.pipeline=2"),
        ("parallel.pipeline=2 parallel.depth=a", "parallel.depth='a' is not a depth"),
        ("parallel.pipeline=3 parallel.depth=0-1-0", "would deadlock (deadlock: "),
        ("parallel.pipeline=4 parallel.semantics=two", "parallel.update_every=1 must be at least 3 with"),
        ("parallel.pipeline=3 parallel.partition=2-0-2", "use parallel.pipeline=2 parallel.partition=2-2"),
        (
            "parallel.pipeline=2 model.untie_embeddings_and_output_weights=false",
            "use model.untie_embeddings_and_output_weights=true, or a schedule with a flush",
        ),
    ],
)
def test_a_rule_that_is_broken_says_the_way_out(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose([*PIPEDREAM, *overrides.split()])


def test_a_stream_is_planned() -> None:
    experiment = compose(
        [
            *(*PIPEDREAM, "parallel.pipeline=3", "parallel.replicas=3-2-1", "parallel.semantics=vertical"),
            *("parallel.update_every=2", "parallel.depth=2-1-0"),
        ]
    )
    plan = make_plan(experiment, "test/run")
    content = plan.as_json()
    assert content["version"] == 2
    assert content["streaming"] == {"semantics": "vertical", "update_every": 2, "depth": [2, 1, 0]}
    read = Plan.parse(content, plan.folder)
    assert read.stream == experiment.parallel.stream == Stream((3, 2, 1), "vertical", 2, (2, 1, 0))
    assert read.as_json() == content


def test_fewer_micro_batches_than_replicas_are_no_fault() -> None:
    assert compose([*PIPEDREAM, "parallel.pipeline=2", "parallel.replicas=7-1"]).parallel.stream == Stream((7, 1))


def test_other_schedules_are_planned_as_before() -> None:
    plan = make_plan(compose([*PIPEDREAM, f"parallel.schedule={Schedule.one_f_one_b}"]), "test/run")
    assert plan.stream is None
    assert {"streaming", "semantics"}.isdisjoint(plan.as_json())
