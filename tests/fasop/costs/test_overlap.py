"""What the backward pass hides of the gradients' all-reduce, against the buckets that the engine really makes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from conf.compose import compose
from conf.schema.experiment import Experiment
from fasop.costs.network.links import Link
from fasop.costs.overlap import SUM_BYTES
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Shape
from fasop.costs.sizes import layer_parameters
from fasop.simulation.iteration import Durations
from fasop.simulation.predict import planned
from fasop.simulation.ranks.replicas import Replicas
from launch.control.planning.plan import make_plan
from megatron_ext.contract.parallel_config import BUCKET_BYTES
from megatron_ext.contract.plan import Plan
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support.cases import each
from tests.support.fasop.plans import MEGATRON, built, column, experiment

BACKWARD_S = 1.0


def three_stages(hidden: int) -> Experiment:
    sizes = (f"model.hidden={hidden}", "model.layers=7", "parallel.pipeline=3", "parallel.partition=1-5-1")
    return compose(["model=tiny", *sizes, "parallel.data=2", "parallel.global_batch_size=4"])


def replayed(plan: Plan, stage: int, link: Link[float], s_per_update: float = 0.0) -> float:
    """Seconds after the backward pass until all weights are updated, bucket by bucket.

    Every bucket waits for its gradients, and for the one before it.

    A layer's gradients are complete one after another, in proportion to their size.
    """
    with torch.device("meta"):
        named = stage_of(plan, stage, TensorGroup(1, 0, None, False)).parameters_by_name()
    flat = FlatWeights(named, torch.float32, torch.device("meta"), bucket_bytes=BUCKET_BYTES)
    sizes = [here.stop - here.start for here in flat.slices.values()]
    in_layers = [size if ".layers." in f".{name}" else 0 for size, name in zip(sizes, flat.slices, strict=True)]
    seconds = BACKWARD_S / layer_parameters_of(plan)
    ready = dict(zip(flat.slices, (done * seconds for done in accumulate(in_layers)), strict=True))
    free, updated = 0.0, max(ready.values())
    for here, names in flat.buckets:
        free = max(free, ready[names[-1]]) + link.takes(float(SUM_BYTES * (here.stop - here.start)))
        updated = max(updated, free) + s_per_update * (here.stop - here.start)
    return updated - max(ready.values())


def predicted(one: Experiment, ring: Link[float], s_per_update: float = 1e-9) -> Durations:
    """Where a layer goes backward in BACKWARD_S, and a whole all-reduce takes `ring`."""
    plan = planned(one)
    training, (kind,) = plan.training, plan.kinds
    unit = Cost(forward=1, backward=1)
    costs = ModelCosts(
        model="m",
        tensor=1,
        micro_batch_size=training.parallel.micro_batch_size,
        precision=training.precision,
        embedding=unit,
        layer=Cost(forward=1, backward=BACKWARD_S * 1e3),
        head=unit,
    )
    profile = LayerProfile(gpu="G", source="test", models={"m": Shape.of(one.model)}, costs=[costs])
    profile = replace(profile, optimizer_ns_per_parameter={training.precision: s_per_update * 1e9})
    latency_us, gbit_per_s = ring.latency_s / 2 * 1e6, 8e-9 / ring.s_per_byte  # of two ranks
    group = replace(kind.group, intra_latency_us=latency_us, intra_gbit_per_s=gbit_per_s)
    node = replace(kind, profile=profile, group=group)
    placed = replace(plan, nodes=[node] * len(plan.nodes))
    return Replicas(placed).whole(placed.partition.layers)


def layer_parameters_of(plan: Plan) -> int:
    return 12 * plan.model.hidden**2 + 13 * plan.model.hidden


@pytest.mark.parametrize(
    ("hidden", "stage", "share"), each([64, 512, 1024, 1600, 2560], [0, 1], [0.2, 0.9, 1.1, 4.0], always=[(64, 1, 4.0)])
)
def test_what_is_left_is_what_a_replay_of_the_buckets_leaves(
    tmp_path: Path, hidden: int, stage: int, share: float
) -> None:
    """To a fourth of what a layer takes; `share` is how long summing a layer takes, of its backward pass."""
    one = three_stages(hidden)
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(one, "a/b").as_json()))
    plan = Plan.read(tmp_path / "plan.json")
    layer = layer_parameters(one.model, 1)
    link = Link(latency_s=0.01 * share, s_per_byte=0.99 * share * BACKWARD_S / (SUM_BYTES * layer))
    mine = predicted(one, link).gradients[stage]
    assert mine == pytest.approx(replayed(plan, stage, link), abs=0.25 * max(share, BACKWARD_S))


@pytest.mark.parametrize("update", [0.1, 0.9, 3.0])
@pytest.mark.parametrize("share", [0.9, 1.1, 4.0])
def test_updates_of_buckets_hide_what_a_replay_of_them_hides(tmp_path: Path, share: float, update: float) -> None:
    """`update` is how long updating a layer takes, of its backward pass."""
    sizes = ("model.hidden=1024", "model.layers=7", "parallel.data=2", "parallel.global_batch_size=4")
    one = compose(["model=tiny", *sizes, "parallel.pipeline=1", "parallel.partition=null", "train.clip_grad=0"])
    (tmp_path / "plan.json").write_text(json.dumps(make_plan(one, "a/b").as_json()))
    plan = Plan.read(tmp_path / "plan.json")
    layer = layer_parameters(one.model, 1)
    link = Link(latency_s=0.01 * share, s_per_byte=0.99 * share * BACKWARD_S / (SUM_BYTES * layer))
    apart = replace(one, train=replace(one.train, overlap_optimizer=False))
    expected = replayed(plan, 0, link, update * BACKWARD_S / layer)
    mine, without = (predicted(way, link, update * BACKWARD_S / layer) for way in (one, apart))
    assert mine.gradients[0] + mine.optimizer[0] == pytest.approx(expected, abs=0.4 * max(share, update, BACKWARD_S))
    assert mine.optimizer == without.optimizer
    assert mine.gradients[0] < without.gradients[0]


def test_megatron_lm_overlaps_only_when_told() -> None:
    layers = column(0, 11, 8, 8, 8, 8, 5, 0)
    plain = built(experiment(*MEGATRON), [0] * 8)
    told = built(experiment(*MEGATRON, "engine.arguments=[--overlap-grad-reduce]"), [0] * 8)
    assert plain.exposed(layers).tolist() == plain.sums.of(layers).tolist()
    assert told.exposed(layers)[1] < 0.9 * plain.exposed(layers)[1]


def test_split_backward_passes_hide_with_their_second_half() -> None:
    """Of which a layer's gradients of weights are."""
    layers = column(0, 11, 8, 8, 8, 8, 5, 0)
    whole, split = (built(experiment(f"parallel.schedule={name}"), [0] * 8) for name in ("one_f_one_b", "zb_h1"))
    hidden = [(one.sums.of(layers) - one.exposed(layers))[1:7] for one in (whole, split)]
    assert hidden[1] == pytest.approx(hidden[0] / 2)
