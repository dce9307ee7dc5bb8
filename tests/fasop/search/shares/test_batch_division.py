"""The micro-batch size and the shares that a launch chooses, against all that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose, compose_unchecked
from conf.errors import ConfigError, TdppError
from conf.schema.experiment import Experiment
from conf.schema.values.partition import Shares
from fasop.search.inputs import read
from fasop.simulation.predict import predict
from launch.commands.launch import main as launch
from launch.commands.launching.resolve_auto import resolve_auto
from tests.support.launch.live import WORKER, no_data_needed

CLUSTER = """
name: unlike
gpus:
  a: {{name: A, memory_gib: 40, fp32_tflops: 19, fp16_tflops: 300, bf16_tflops: 300, memory_gb_per_s: 1500}}
  b: {{name: B, memory_gib: {memory}, fp32_tflops: 6, fp16_tflops: 80, bf16_tflops: 80, memory_gb_per_s: 400}}
groups:
  fast: {{gpu: a, count: {fast}, gpus_per_node: 2, intra_gbit_per_s: 128, intra_latency_us: 5, inter_gbit_per_s: 40,
          inter_latency_us: 20}}
  slow: {{gpu: b, count: {slow}, gpus_per_node: 2, intra_gbit_per_s: 64, intra_latency_us: 5, inter_gbit_per_s: 10,
          inter_latency_us: 20}}
"""
BOTH = ("parallel.shares=auto", "parallel.micro_batch_size=auto")


def words(folder: Path, *more: str, fast: int = 1, slow: int = 1, memory: int = 24) -> list[str]:
    file = folder / "unlike.yaml"
    file.write_text(CLUSTER.format(fast=fast, slow=slow, memory=memory))
    plan = {"tensor": 1, "pipeline": 1, "data": 2 * (fast + slow), "global_batch_size": 12, "partition": "null"}
    return [
        *(f"cluster={file}", "model=xl", "model.layers=2", "train.precision=fp16", "executor=local", "container=none"),
        *(f"parallel.{key}={value}" for key, value in plan.items()),
        *("executor.rehearse=virtual", f"runs_dir={folder / 'runs'}", "train.iterations=50", *more),
    ]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in compositions(total - first, parts - 1))


def every_division(experiment: Experiment, sizes: Sequence[int]) -> Iterator[float]:
    """Seconds of an iteration with all shares of all sizes that fit into memory."""
    parallel = experiment.parallel
    for size in sizes:
        for counts in compositions(parallel.global_batch_size // size, parallel.data):
            divided = replace(parallel, micro_batch_size=size, shares=str(Shares(counts)))
            predicted = predict(replace(experiment, parallel=divided))
            if all(stage.memory_gib <= stage.limit_gib for stage in predicted.stages):
                yield predicted.iteration_s


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ((), (1, 2, 3)),
        (("parallel.global_batch_size=10",), (1, 2)),
        (("parallel.pipeline=2", "parallel.data=2", "parallel.node_order=fast+slow"), (1, 2, 3, 4, 6)),
        (("parallel.pipeline=2", "parallel.data=2", "parallel.schedule=zb_h1", "model.layers=3"), (1, 2, 3, 4, 6)),
        (("parallel.pipeline=2", "parallel.data=2", "parallel.schedule=interleaved", "parallel.chunks=2",
          "model.layers=4", "parallel.global_batch_size=8"), (1, 2, 4)),
        (("parallel.tensor=2", "parallel.data=2", "parallel.schedule=gpipe"), (1, 2, 3, 4, 6)),
    ],
    ids=["data", "a batch that replicas cannot take evenly", "pipeline", "zb_h1", "interleaved", "tensor"],
)  # fmt: skip
def test_no_division_of_the_batch_takes_less(tmp_path: Path, more: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    chosen, said = resolve_auto(compose_unchecked(words(tmp_path, *more, *BOTH)))
    seconds = predict(chosen).iteration_s
    assert seconds == pytest.approx(min(every_division(chosen, sizes)), rel=1e-6)
    assert f"{seconds * 1e3:.1f} ms per iteration; micro-batches of {', '.join(map(str, sizes))} were compared" in str(
        said
    )


def test_only_what_is_left_open_is_chosen(tmp_path: Path) -> None:
    shares, said = resolve_auto(compose_unchecked(words(tmp_path, BOTH[0], "parallel.micro_batch_size=2")))
    assert (shares.parallel.micro_batch_size, shares.parallel.shares) == (2, "2*2-1*2")
    assert str(said).startswith("parallel.shares=auto: parallel.shares=2*2-1*2 is predicted to be fastest, ")
    assert "equal shares would take" not in str(said)  # 6 micro-batches for 4 replicas
    size, said = resolve_auto(compose_unchecked(words(tmp_path, BOTH[1], "parallel.shares=2*2-1*2")))
    assert size.parallel.shares == "2*2-1*2"
    assert size.parallel.micro_batch_size in (1, 2)
    given = words(tmp_path, "parallel.micro_batch_size=3")
    assert resolve_auto(compose_unchecked(given)) == (compose(given), None)


def test_equal_replicas_have_no_shares(tmp_path: Path) -> None:
    alike = words(tmp_path, *BOTH, "cluster.groups.slow.gpu=a", "cluster.groups.slow.intra_gbit_per_s=128")
    chosen, said = resolve_auto(compose_unchecked(alike))
    assert chosen.parallel.shares is None
    assert "parallel.shares=null" in str(said)


def test_a_micro_batch_that_does_not_fit_is_not_chosen(tmp_path: Path) -> None:
    def largest(memory: int) -> int:
        given = words(tmp_path, *BOTH, "parallel.global_batch_size=256", memory=memory)
        chosen = resolve_auto(compose_unchecked(given))[0]
        assert all(stage.memory_gib <= stage.limit_gib for stage in predict(chosen).stages)
        return chosen.parallel.micro_batch_size

    assert (largest(5), largest(400)) == (4, 32)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("parallel.shares=auto", "parallel.micro_batch_size=5"),
         "batch_size=12 must be a whole number of micro-batches of 5 samples, at least one for each replica"),
        ((*BOTH, "parallel.global_batch_size=3"), "at least one for each replica; use a larger batch"),
        ((*BOTH, "model.layers=96"), "no micro-batch size fits in memory: with micro-batches of 1"),
        ((*BOTH, "parallel.schedule_file=x"), "parallel.micro_batch_size=auto cannot be combined with "
                                              "parallel.schedule_file"),
        (("parallel.shares=auto", "parallel.schedule=pipedream"), "parallel.shares=auto cannot be combined with"),
        (("parallel.shares=auto", "parallel.pipeline=2", "parallel.replicas=3-1"),
         "parallel.shares=auto cannot be combined with parallel.replicas=3-1"),
        ((*BOTH, "parallel.data=5"), "ranks, but the chosen nodes"),
        (("parallel.micro_batch_size=some",), "parallel.micro_batch_size=some must be a whole number or auto"),
    ],
)  # fmt: skip
def test_what_cannot_be_chosen_is_one_message(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(TdppError) as error:
        resolve_auto(compose_unchecked(words(tmp_path, *more)))
    assert message in str(error.value)


def test_a_search_leaves_the_same_open(tmp_path: Path) -> None:
    given = [word for word in words(tmp_path) if not word.startswith("parallel.part")]
    assert read([*given, *BOTH]) == read(given)


def test_whoever_does_not_choose_says_who_does(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.shares=auto: only 'tdpp launch' and 'tdpp doctor' choose the value"
    ):
        compose(words(tmp_path, "parallel.shares=auto"))


def test_a_launch_says_what_it_chose_and_the_run_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: Any = words(tmp_path, *BOTH, "parallel.global_batch_size=64")
    assert launch(given, preflight=no_data_needed, worker=WORKER) == 0
    said = capsys.readouterr().err
    assert "(parallel.micro_batch_size=auto parallel.shares=auto: parallel.micro_batch_size=" in said
    (config,) = (tmp_path / "runs").glob("xl/*/config.yaml")
    assert "shares: 7*2-1*2" in config.read_text()
    assert "auto" not in config.read_text().split("parallel:")[1].split("container:")[0]
