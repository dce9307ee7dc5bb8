"""What does not go with a batch that adapts gets one message with the way out; what does is in the plan."""

from __future__ import annotations

import re

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.commands.launching.preflight import with_length
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault
from megatron_ext.contract.train_config import COSINE

ADAPTING = [
    *("parallel=single", "parallel.data=2", "parallel.micro_batch_size=4", "parallel.global_batch_size=16"),
    *("data.prefix=/x", "train.samples=4000", "train.iterations=null", "adapt.rule=noise", "adapt.upper=256"),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("adapt.upper=null", "adapt.rule=noise lets the global batch grow, so it needs a limit; give adapt.upper"),
        (
            "adapt.upper=8",
            "parallel.global_batch_size=16, with which the run starts, must lie between adapt.lower=16 an",
        ),
        (
            "adapt.lower=17",
            "parallel.global_batch_size=16, with which the run starts, must lie between adapt.lower=17 a",
        ),
        ("adapt.lower=1 adapt.upper=16 parallel.micro_batch_size=6 parallel.data=1", "not divisible by"),
        (
            "parallel.data=1 parallel.micro_batch_size=16",
            "is a single micro-batch of 16, but adapt.rule=noise compares",
        ),
        ("parallel.data=3 parallel.shares=2-1-1 adapt.upper=16", None),
        (
            "parallel.data=3 parallel.micro_batch_size=5 parallel.global_batch_size=15 adapt.upper=19",
            "adapt.upper=19 is",
        ),
        (
            "train.samples=null train.iterations=9",
            "train.iterations=9 cannot set the length of a training whose batch",
        ),
        ("adapt.rate=0.2", "adapt.rate=0.2 has no effect with adapt.rule=noise; use adapt.rule=similarity, or leave"),
        (
            "adapt.rule=goodput adapt.target=0.5",
            "has no effect with adapt.rule=goodput; use adapt.rule=similarity or noi",
        ),
        (
            "adapt.rule=none adapt.upper=null adapt.every=5",
            "adapt.every=5 has no effect with adapt.rule=none and adapt.",
        ),
        ("adapt.target=1", "adapt.target=1.0 must be above 0 and below 1"),
        ("adapt.rule=other", "adapt.rule"),
        (
            "parallel.pipeline=2 parallel.chunks=2 parallel.schedule=interleaved",
            "parallel.schedule=interleaved cannot be",
        ),
        (
            "parallel.schedule=pipedream model.untie_embeddings_and_output_weights=true",
            "parallel.schedule=pipedream cannot be",
        ),
        (
            "parallel.schedule_file=/f.json",
            "parallel.schedule_file=/f.json is for a fixed number of micro-batches, which a",
        ),
        (
            "parallel.pipeline=2 parallel.data=2 parallel.replicas=2-1",
            "parallel.replicas=2-1 cannot be combined with adapt.rul",
        ),
        ("parallel.pipeline=2 adapt.rule=goodput adapt.rebalance=true", None),
        ("parallel.data=1 adapt.rebalance=true adapt.micro_batch_sizes=[8]", None),
        (
            "adapt.micro_batch_sizes=[8]",
            "adapt.micro_batch_sizes=[8] need adapt.rebalance=true, which chooses them",
        ),
        (
            "adapt.rebalance=true adapt.micro_batch_sizes=[8,10]",
            "adapt.micro_batch_sizes=[8, 10]: 10 must be a larger multiple of parallel.micro_batch_size=4, so that "
            "micro-batches add up to every batch; use 12, or a smaller parallel.micro_batch_size",
        ),
        (
            "parallel.data=1 adapt.rebalance=true",
            "adapt.rebalance=true has nothing to share with parallel.data=1; use",
        ),
        ("parallel.streams=2", None),
        ("parallel.streams=2 adapt.rule=none adapt.upper=null adapt.rebalance=true", None),
        ("parallel.data=1 adapt.rebalance=true adapt.streams=[2]", None),
        (
            "adapt.streams=[2]",
            "adapt.streams=[2] need adapt.rebalance=true, which chooses them by measured times",
        ),
        ("adapt.rebalance=true adapt.streams=[2,65]", "adapt.streams=[2, 65]: 65 must be a number from 1 to 64"),
        (
            "parallel.pipeline=2 adapt.rebalance=true adapt.streams=[2]",
            "adapt.streams=[2] cannot be combined with parallel.pipeline=2: it works only in data parallel plans; use "
            "parallel.pip",
        ),
        (
            "adapt.rebalance=true adapt.streams=[2] train.compile=true",
            "adapt.streams=[2] cannot be combined with train.compile=true; use train.compile=false, or "
            "adapt.streams=[]",
        ),
        (
            "adapt.rebalance=true adapt.streams=[2] train.overlap_optimizer=true train.clip_grad=0",
            "train.overlap_optimizer=true cannot be combined with adapt.streams=[2]: the gradients of all streams must",
        ),
        ("executor.rehearse=virtual", "executor.rehearse=virtual computes no gradients, whose noise adapt.rule=noise"),
        ("executor.rehearse=virtual executor.noise=20", None),
        (
            "executor.noise=20",
            "executor.noise=20 applies only to a rehearsal with a batch that adapts; use",
        ),
    ],
)
def test_a_rule_that_is_broken_says_the_way_out(overrides: str, message: str | None) -> None:
    words = [*ADAPTING, *overrides.split()]
    if message is None:
        compose(words)
        return
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(words)


def test_a_plan_has_what_adapts_and_as_many_iterations_as_the_smallest_batch_makes() -> None:
    plan = make_plan(with_length(compose([*ADAPTING, "adapt.lower=8"])), "test/run")
    content = plan.as_json()
    assert content["version"] == 2
    assert content["adapt"] == {
        **{"rule": "noise", "target": 0.3, "lower": 8, "upper": 256, "every": 100, "rate": 0.1, "smoothing": 4},
        **{"lr_scaling": "sqrt", "rebalance": False},
    }
    assert plan.train.lr_policy == COSINE
    assert (plan.train.iterations, plan.train.lr_decay_iterations) == (500, 250)
    assert Plan.parse(content, plan.folder) == plan
    sized = make_plan(compose([*ADAPTING, "adapt.rebalance=true", "adapt.micro_batch_sizes=[16,8]"]), "test/run")
    assert sized.as_json()["adapt"]["micro_batch_sizes"] == [[4, 8, 16]] * 2
    both = ["adapt.rebalance=true", "adapt.micro_batch_sizes=[8]", "adapt.streams=[3,1]", "parallel.streams=2"]
    streaming = make_plan(with_length(compose([*ADAPTING, *both])), "test/run")
    assert streaming.as_json()["adapt"]["streams"] == [[[1, 2, 3]] * 2] * 2
    assert Plan.parse(streaming.as_json(), streaming.folder) == streaming
    rebalanced = make_plan(compose([*ADAPTING[:5], "train.iterations=9", "adapt.rebalance=true"]), "test/run").as_json()
    assert rebalanced["adapt"]["rule"] == "none"
    assert "adapt" not in make_plan(compose([*ADAPTING[:5], "train.iterations=9"]), "test/run").as_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt": {"rule": "some"}}, 'adapt.rule="some" must be one of none, similarity, noise, goodput'),
        ({"adapt": {"micro_batch_sizes": [[4], [4, 6]]}}, "must be lists of micro_batch_size=4 and multiples of it"),
        (
            {"adapt": {"rebalance": True, "streams": [[[1]], [[1], [2]]]}},
            "must be a list of numbers for each replica an",
        ),
        ({"adapt": {"streams": [[[1]], [[1]]]}}, "adapt.streams=[[[1]], [[1]]] must be null without adapt.rebalance"),
        ({"adapt": {"upper": 9}}, "adapt.upper=9 must be larger: no even number of micro-batches of 4 samples"),
        ({"schedule": "interleaved", "chunks": 2, "pipeline": 1}, "must be"),
        ({"micro_batch_size": 16, "data": 1}, "must be of at least two micro-batches with adapt.rule"),
        ({"train": {"samples": None}}, "train.samples=null must be given with adapt.rule"),
    ],
    ids=["rule", "sizes", "streams", "no rebalancing", "upper", "schedule", "micro-batches", "samples"],
)
def test_a_plan_that_cannot_adapt_is_refused_by_its_ranks(changes: dict, message: str) -> None:
    content = make_plan(with_length(compose(ADAPTING)), "test/run").as_json()
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    with pytest.raises(PlanFault, match=re.escape(message)):
        Plan.parse(content, make_plan(with_length(compose(ADAPTING)), "test/run").folder)
