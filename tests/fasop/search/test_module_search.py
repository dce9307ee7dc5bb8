"""Searches of a user's module: against every partition of random small ones, and what is not a profile of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest

from conf.errors import ConfigError, TdppError
from conf.schema.experiment import Recompute, Schedule
from fasop.costs.measured_module import LOSS
from fasop.costs.memory.allowance import MIB, PROCESS_MIB
from fasop.costs.memory.amounts import FRAGMENT_BYTES, GIB, WORKSPACE_BYTES
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile import LayerProfile
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import read
from fasop.search.run import best_plans
from fasop.simulation.predict import predict_plan
from fasop.simulation.ranks.replay import StageTimes, simulate
from megatron_ext.contract.schedule.iteration import as_json, schedule
from tests.support.cases import fewer
from tests.support.fasop.modules import random_profile, words, written
from tests.support.fasop.random_pipelines import all_partitions
from tests.support.fasop.replays import pipeline_time
from tests.support.fasop.seeds import seeds
from tests.support.megatron_ext.users_files import users_file

LATENCY_S, S_PER_BYTE = 100e-6, 8e-9
"""Of the cluster in these tests, in a node."""
STAGES, BATCH = 3, 8


def cluster(*more: str) -> list[str]:
    return [
        *(f"cluster.groups.local.gpus_per_node={STAGES}", f"parallel.global_batch_size={BATCH}"),
        *("cluster.groups.local.intra_latency_us=100", "cluster.groups.local.intra_gbit_per_s=1", *more),
    ]


def iteration_s(profile: LayerProfile, partition: list[int], name: str, size: int, again: bool) -> float:
    """Of one replica, from the profile's own numbers: a replay of the schedule with the sums of each stage's blocks."""
    module = profile.modules["module"]
    costs = next(one for one in profile.costs if one.micro_batch_size == size)
    assert costs.sequence is not None
    ends = [0, *accumulate(partition)]
    times, steps = [], []
    for number, (begin, end) in enumerate(pairwise(ends)):
        own = [costs.parts[block.kind] for block in module.blocks[begin:end]]
        forward = sum(one.forward for one in own) * 1e-3
        backward = sum(one.backward for one in own) * 1e-3 + (forward if again else 0.0)
        if number == len(partition) - 1:
            forward, backward = forward + costs.parts[LOSS].forward * 1e-3, backward + costs.parts[LOSS].backward * 1e-3
        to_next, to_before = (S_PER_BYTE * costs.sequence.crossing[at] for at in (end, begin))
        times.append(
            StageTimes(
                forward=[forward],
                backward=[backward],
                send_forward=LATENCY_S + to_next,
                send_backward=LATENCY_S + to_before,
                busy_forward=to_next,
                busy_backward=to_before,
            )
        )
        steps.append(sum(block.parameters for block in module.blocks[begin:end]) * 1e-9)
    lists = schedule(name, len(partition), 1, BATCH // size)
    return pipeline_time(simulate(as_json(lists, 1, BATCH // size), times, steps))


@pytest.mark.slow
@pytest.mark.parametrize("name", [Schedule.one_f_one_b, Schedule.gpipe], ids=str)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_search_finds_the_best_of_all_partitions_or_says_how_far_off_it_may_be(
    tmp_path: Path, name: Schedule, recompute: str
) -> None:
    exact = cases = 0
    for seed in seeds(fewer(2, 6)):
        rng = np.random.default_rng(seed)
        profile = random_profile(rng, tmp_path, int(rng.integers(2, 9)))
        size = int(rng.choice([1, 2]))
        given = [f"parallel.schedule={name}", f"parallel.recompute={recompute}", f"parallel.micro_batch_size={size}"]
        given += [f"parallel.pipeline={STAGES}", "parallel.sharded_optimizer=false"]
        inputs = read(words(tmp_path, *cluster(*given)), str(written(profile, tmp_path)))
        plan = best_plans(inputs, Arguments(top=1, leave_out=False, prove=True)).plans[0]
        blocks = len(profile.modules["module"].blocks)
        every = {
            tuple(split): iteration_s(profile, split, str(name), size, recompute == "full")
            for split in all_partitions(blocks, STAGES).T.tolist()
        }
        least = min(every.values())
        assert plan.total == pytest.approx(every[plan.partition.layers])
        assert predict_plan(plan).iteration_s == pytest.approx(plan.total)
        assert plan.bound <= least * (1 + 1e-9)
        assert least <= plan.total * (1 + 1e-9)
        exact += plan.total <= least * (1 + 1e-6)
        cases += 1
    assert exact >= 0.9 * cases


def test_a_stage_holds_its_blocks_and_what_enters_it(tmp_path: Path) -> None:
    """Weights, gradients and two moments in fp32; kept bytes of the micro-batches in flight; the loss at the end."""
    profile = random_profile(np.random.default_rng(3), tmp_path, 5)
    given = [f"parallel.pipeline={STAGES}", "parallel.micro_batch_size=2", "parallel.schedule=one_f_one_b"]
    given += ["parallel.sharded_optimizer=false"]
    inputs = read(words(tmp_path, *cluster(*given)), str(written(profile, tmp_path)))
    sequence = profile.costs[1].sequence
    assert sequence is not None
    longest = max(sequence.crossing)
    plans = best_plans(inputs, Arguments(top=1, leave_out=False)).plans
    (plan,) = plans
    for again in (False, True):
        recompute = Recompute.full if again else Recompute.none
        parallel = replace(plan.training.parallel, recompute=recompute)
        plan = replace(plan, training=replace(plan.training, parallel=parallel))
        ends = [0, *accumulate(plan.partition.layers)]
        for number, stage in enumerate(predict_plan(plan).stages):
            held = min(STAGES - number, BATCH // 2)
            own = slice(ends[number], ends[number + 1])
            parameters = sum(block.parameters for block in profile.modules["module"].blocks[own])
            kept = sum((sequence.given if again else sequence.kept)[own]) + 200 * (number == STAGES - 1)
            entering = longest * (number > 0)
            most = max(sequence.kept) - 200 * (number == STAGES - 1) if again else 0  # the loss is gone by then
            always = WORKSPACE_BYTES + FRAGMENT_BYTES + PROCESS_MIB * MIB
            expected = 16 * parameters + held * (kept + entering) + most + 4 * longest + always
            assert stage.memory_gib * GIB == pytest.approx(expected)


def test_what_does_not_fit_is_no_plan(tmp_path: Path) -> None:
    profile = random_profile(np.random.default_rng(3), tmp_path, 5)
    file = str(written(profile, tmp_path))
    with pytest.raises(SearchError, match=r"does not fit in the memory of cluster\.gpus"):
        inputs = read(words(tmp_path, *cluster("cluster.gpus.cpu.memory_gib=0.5")), file)
        best_plans(inputs, Arguments(top=1))


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({}, ["model.capture=true"], r"has its blocks only with model.capture=false; use that, or measure"),
        ({}, ["train.precision=bf16"], r"has its times in fp32, not in train.precision=bf16; measure that"),
        (
            {},
            ["model.layers=7"],
            r"model.layers=7: its profile has 4 blocks of model.code=.*net.py:Net; leave model.layers out",
        ),
        ({}, ["parallel.schedule=zb_h1"], r"parallel.schedule=zb_h1 cannot be searched with this engine, model"),
        (
            {},
            ["parallel.recompute=selective"],
            r"parallel.recompute=selective cannot be searched with this engine, model",
        ),
        ({}, ["parallel.tensor=2"], r"no plan for 3 GPUs has parallel.tensor=2; possible: tensor 1"),
        (
            {"code": "net.py:Other"},
            [],
            r"was measured with other code, net.py:Other; measure this one with 'tdpp profile model=",
        ),
        ({"digest": "0" * 64}, [], r"net.py has changed since profile '.*profile.yaml' was measured; measure it again"),
    ],
    ids=["capture", "precision", "layers", "schedule", "recompute", "tensor", "code", "digest"],
)
def test_what_is_no_profile_of_the_module_is_one_message(
    tmp_path: Path, changed: dict[str, str], more: list[str], message: str
) -> None:
    profile = random_profile(np.random.default_rng(1), tmp_path, 4)
    module = replace(profile.modules["module"], **changed)
    file = str(written(replace(profile, modules={"module": module}), tmp_path))
    with pytest.raises(TdppError, match=message) as caught:
        best_plans(read(words(tmp_path, *cluster(*more)), file), Arguments(top=1))
    assert len(str(caught.value).splitlines()) == 1


def test_blocks_that_the_module_no_longer_has_are_one_message(tmp_path: Path) -> None:
    """Though its own file is as it was: what it imports may have changed."""
    file = users_file(tmp_path, "convnet")
    profile = random_profile(np.random.default_rng(1), tmp_path, 4)
    module = replace(
        profile.modules["module"], code=f"{file.name}:convnet", digest=hashlib.sha256(file.read_bytes()).hexdigest()
    )
    path = str(written(replace(profile, modules={"module": module}), tmp_path))
    with pytest.raises(
        SearchError, match=r"its profile has 4 different blocks: the module now has 0 where the profile has b0; "
    ):
        read(["model=module", f"model.code={file}:convnet", *cluster()], path)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = random_profile(np.random.default_rng(5), tmp_path, 6, capture=True)
    assert read_profile(str(written(profile, tmp_path))) == profile


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("kept: [", "kept: [1, ", r"sequence.kept must be 4 numbers of bytes, for modules.module"),
        ('"loss()":', "other:", r"blocks has no times of kind loss\(\), which modules.module.blocks has"),
        ("tensor: 1", "tensor: 2", r"tensor must be 1 for a module"),
        ("name: b0,", "name: b0, held: middle,", r"blocks\[0\].held=middle must be one of first, last, next"),
        ("parameters: ", "parameters: -", r"blocks\[0\] must have parameters and fixed_bytes of at least 0"),
    ],
    ids=["length", "kind", "tensor", "held", "parameters"],
)
def test_a_profile_that_contradicts_itself_is_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = written(random_profile(np.random.default_rng(1), tmp_path, 4), tmp_path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        read_profile(str(path))
