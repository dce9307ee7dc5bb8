"""Streams that a launch chooses from the project's own measurements, against all divisions and streams there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest

from conf.compose import compose_unchecked
from conf.errors import ConfigError
from conf.schema.experiment import Experiment, Precision
from conf.schema.values.partition import Shares
from fasop.costs.parallelism import Parallelism
from fasop.costs.profiles.files import read_profile
from fasop.costs.profiles.profile_text import profile_text
from fasop.costs.profiles.steps import Steps, StepTimes
from fasop.simulation.predict import planned, predict, predict_plan
from launch.cli import main
from launch.commands.launching.resolve_auto import resolve_auto
from tests.fasop.search.shares.test_batch_division import CLUSTER, compositions

RATES = {"a": {1: 1.0, 2: 1.5, 3: 1.8}, "b": {1: 1.0, 2: 1.02}}
"""Of streams, by GPU: the fast one is idle half of the time."""
ALL = ("parallel.shares=auto", "parallel.micro_batch_size=auto", "parallel.streams=auto")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    tmp_path = tmp_path_factory.mktemp("measured")
    cluster = CLUSTER.format(fast=1, slow=1, memory=24).replace("gpus_per_node: 2", "gpus_per_node: 1")
    for gpu, rates in RATES.items():
        cpu = read_profile("cpu")
        steps = [
            Steps(
                model="tiny",
                precision=Precision.fp32,
                host="n",
                micro_batch_size=size,
                most_workers=max(rates),
                memory_bytes=1 << 30,
                times=[
                    StepTimes(
                        workers=v, data=0.0, forward=v / rate, backward=2 * v / rate, update=1.0, copy=0.1 * (v - 1)
                    )
                    for v, rate in rates.items()
                ],
            )
            for size in (2, 4)
        ]
        (tmp_path / f"{gpu}.yaml").write_text(profile_text(replace(cpu, steps=steps), "constructed"))
        cluster = cluster.replace(f"  {gpu}: {{", f"  {gpu}: {{profile: {tmp_path / gpu}.yaml, ")
    (tmp_path / "unlike.yaml").write_text(cluster)
    plan = {"tensor": 1, "pipeline": 1, "data": 2, "global_batch_size": 12, "partition": "null"}
    return [
        *(f"cluster={tmp_path / 'unlike.yaml'}", "model=tiny", "executor=local", "container=none"),
        *(f"parallel.{key}={value}" for key, value in plan.items()),
        *("executor.rehearse=none", f"runs_dir={tmp_path / 'runs'}"),
    ]


def every_way(experiment: Experiment, sizes: Sequence[int]) -> Iterator[float]:
    parallel, placed = experiment.parallel, planned(experiment)
    for size in sizes:
        for counts in compositions(parallel.global_batch_size // size, parallel.data):
            for streams in product(*RATES.values()):
                if any(v > 1 for v in streams) and size not in (2, 4):  # not measured
                    continue
                try:
                    way = replace(
                        parallel, micro_batch_size=size, shares=str(Shares(counts)), streams="-".join(map(str, streams))
                    )
                    replace(experiment, parallel=way)
                except ConfigError:  # streams that cannot share so many micro-batches
                    continue
                training = replace(placed.training, parallel=Parallelism.of(way), in_streams=max(streams) > 1)
                yield predict_plan(replace(placed, training=training)).iteration_s


def test_no_streams_and_shares_take_less(words: list[str]) -> None:
    chosen, said = resolve_auto(compose_unchecked([*words, *ALL]))
    assert predict(chosen).iteration_s == pytest.approx(min(every_way(chosen, (1, 2, 3, 4, 6))), rel=1e-6)
    assert chosen.parallel.streams_of[0] > 1
    assert "one stream per GPU would take" in str(said)


def test_shares_of_given_streams_take_least_of_those_that_the_rule_allows(words: list[str]) -> None:
    given = (*ALL[:1], "parallel.micro_batch_size=2", "parallel.global_batch_size=28", "parallel.streams=3-2")
    chosen, _ = resolve_auto(compose_unchecked([*words, *given]))
    assert chosen.parallel.micro_batches_of in {(6, 8), (12, 2)}
    others = [replace(chosen, parallel=replace(chosen.parallel, shares=shares)) for shares in ("6-8", "12-2")]
    assert predict(chosen).iteration_s == pytest.approx(min(predict(one).iteration_s for one in others))
    both, _ = resolve_auto(compose_unchecked([*words, *ALL[:2], "parallel.global_batch_size=28", "parallel.streams=2"]))
    assert all(count % 2 == 0 for count in both.parallel.micro_batches_of)
    with pytest.raises(ConfigError, match=r"parallel\.streams=2 must divide"):
        resolve_auto(compose_unchecked([*words, *ALL[:1], "parallel.micro_batch_size=4", "parallel.streams=2"]))


def test_streams_of_given_shares(words: list[str]) -> None:
    given = (*ALL[2:], "parallel.shares=3-1", "parallel.micro_batch_size=4", "parallel.global_batch_size=16")
    chosen, _ = resolve_auto(compose_unchecked([*words, *given]))
    assert (chosen.parallel.streams, chosen.parallel.shares) == ("3-1", "3-1")


def test_where_none_were_measured_there_is_one(words: list[str]) -> None:
    chosen, said = resolve_auto(compose_unchecked([*words, *ALL[::2], "parallel.micro_batch_size=1"]))
    assert chosen.parallel.streams is None
    assert str(said).endswith("streams gain nothing by the measurements")


def test_further_streams_take_memory_for_gradients_and_activations(words: list[str]) -> None:
    def memory(streams: str) -> dict[str, float]:
        even = ("parallel.micro_batch_size=2", "parallel.global_batch_size=24", f"parallel.streams={streams}")
        experiment, _ = resolve_auto(compose_unchecked([*words, *even]))
        (stage,) = predict(experiment).stages
        return {name: amount.of(sum(stage.layers)) for name, amount in stage.memory.by_term().items()}

    one, three = memory("null"), memory("3")
    assert three["gradients"] == pytest.approx(3 * one["gradients"])
    assert three["activations"] == pytest.approx(3 * one["activations"])
    assert (three["weights"], three["optimizer"]) == (one["weights"], one["optimizer"])


def test_a_search_says_what_streams_would_gain(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    of_plan = (*(f"parallel.{key}=" for key in ("tensor", "pipeline", "data", "partition")), "executor", "runs_dir")
    assert main(["search", *(word for word in words if not word.startswith(of_plan)), "top=20"]) == 0
    assert "with several streams per GPU, from the measurements: " in capsys.readouterr().err
