"""Plans whose stages have unlike numbers of replicas, or tensor groups of unlike sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.compose import compose
from fasop.simulation.iteration import iteration, replay_together
from fasop.simulation.predict import planned, predict
from fasop.simulation.ranks.heterogeneous_stages import actions_of, in_flight
from fasop.simulation.ranks.rank_durations import by_rank
from fasop.simulation.ranks.replicas import Replicas
from launch.cli import main
from megatron_ext.contract.schedule.schedules import Kind
from tests.support.cases import drawn

WORDS = (
    *("cluster=a100x1_a10x7", "model=xl", "model.layers=12", "train.precision=fp16", "executor=local"),
    *("container=none", "parallel.micro_batch_size=1", "parallel.node_order=null", "parallel.recompute=none"),
)
CASES = {
    "shares-3-1": (
        *(1, "6-6", "parallel.data=2", "parallel.tensor=2", "parallel.shares=3-1", "parallel.global_batch_size=16"),
    ),
    "replicas-4-8": (2, "6-6", "parallel.replicas=4-8", "parallel.global_batch_size=16"),
    "replicas-4-1-3-zb-h1": (
        *(1, "6-2-4", "parallel.replicas=4-1-3", "parallel.schedule=zb_h1", "parallel.global_batch_size=13"),
    ),
    "both": (
        *(1, "6-6", "parallel.replicas=1-2", "parallel.tensor=4-2", "parallel.schedule=gpipe"),
        "parallel.global_batch_size=13",
    ),
    "tensor-4-1-4": (
        *(2, "6-2-4", "parallel.replicas=1-4-1", "parallel.tensor=4-1-4", "parallel.sharded_optimizer=true"),
        "parallel.global_batch_size=12",
    ),
    "tensor-4-1-4-sequence": (
        *(2, "6-2-4", "parallel.replicas=1-4-1", "parallel.tensor=4-1-4", "parallel.sequence_parallel=true"),
        "parallel.global_batch_size=12",
    ),
    "tensor-2-4-shares-chunks": (
        *(2, "3-3-3-3", "parallel.tensor=2-4", "parallel.data=2", "parallel.shares=2-1"),
        *("parallel.schedule=interleaved", "parallel.chunks=2", "parallel.global_batch_size=12"),
    ),
}


def words_of(nodes: int, partition: str, *own: str) -> list[str]:
    stages = 2 if "interleaved" in "".join(own) else partition.count("-") + 1
    sizes = [f"cluster.groups.gpu2.count={nodes}", f"parallel.pipeline={stages}", f"parallel.partition={partition}"]
    return [*WORDS, *sizes, *own]


MOST_OF_IT = ("both", "replicas-4-1-3-zb-h1", "tensor-4-1-4", "tensor-2-4-shares-chunks")


@pytest.mark.slow
@pytest.mark.parametrize("name", drawn(CASES, 0, always=MOST_OF_IT))
def test_a_rehearsal_takes_what_is_predicted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And `validate` says so."""
    words = words_of(*CASES[name])
    predicted = predict(compose(words))
    asked = [*words, "executor.rehearse=virtual", "executor.wait=true", "train.iterations=3", "train.log_interval=1"]
    assert main(["launch", *asked, "train.lr_warmup_iterations=1", f"runs_dir={tmp_path}", "name=x"]) == 0
    (metrics,) = tmp_path.glob("x/*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])["elapsed_ms"]
    assert predicted.iteration_s * 1e3 == pytest.approx(last, rel=1e-6)
    assert main(["search", "validate=x", f"runs_dir={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert " 0.0%" in shown.replace("+0.0%", " 0.0%").replace("-0.0%", " 0.0%")
    assert "has unequal shares of the batch, so only its total is compared" in shown
    for stage in predicted.stages:
        assert sum(stage.terms.by_name().values()) == pytest.approx(predicted.iteration_s)


def test_a_sequence_that_is_shared_crosses_a_cut_whole_where_tensor_sizes_differ() -> None:
    """Between groups of 4 and of 2 ranks; between two groups of 2 each rank hands on its share of it."""
    words = words_of(1, "4-4-4", "parallel.replicas=1-1-1", "parallel.tensor=4-2-2", "parallel.global_batch_size=12")
    plain, shared = (
        [stage.times for stage in predict(compose([*words, f"parallel.sequence_parallel={one}"])).stages]
        for one in ("false", "true")
    )
    assert shared[0].send_forward == plain[0].send_forward
    assert shared[1].sends("backward-send") == plain[1].sends("backward-send")
    whole, half = (stages[1].busy_forward or 0.0 for stages in (plain, shared))
    assert half == pytest.approx(whole / 2)
    assert half > 0
    assert shared[2].sends("backward-send")[1] == pytest.approx(plain[2].sends("backward-send")[1] / 2)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
@pytest.mark.parametrize("shares", ["null", "3-1"])
def test_ranks_of_an_even_plan_take_what_its_pipelines_do(schedule: str, shares: str) -> None:
    own = [f"parallel.schedule={schedule}", f"parallel.shares={shares}", "parallel.global_batch_size=16"]
    chunks = 2 if schedule == "interleaved" else 1
    partition = "-".join(["2"] * 6) if chunks == 2 else "4-4-4"
    sizes = ["parallel.tensor=2", "parallel.data=2", "parallel.pipeline=3", f"parallel.chunks={chunks}"]
    few = ["cluster.groups.gpu2.count=2", f"parallel.partition={partition}"]
    plan = planned(compose([*WORDS, *few, *sizes, *own]))
    parallel = plan.training.parallel
    found = iteration(parallel.layout, actions_of(parallel), by_rank(plan))
    assert found.seconds == pytest.approx(replay_together(Replicas(plan).pipelines(plan.partition.layers))[0])


def test_sizes_of_stages_that_are_all_alike_are_those_of_an_even_plan() -> None:
    few = ["cluster.groups.gpu2.count=1", "parallel.pipeline=2", "parallel.partition=7-5"]
    few += ["parallel.global_batch_size=12"]
    even = predict(compose([*WORDS, *few, "parallel.tensor=2", "parallel.data=2"]))
    written = predict(compose([*WORDS, *few, "parallel.tensor=2-2", "parallel.replicas=2*2"]))
    assert written.iteration_s == even.iteration_s


@pytest.mark.parametrize("replicas", ["1-2-1", "3-1-2", "4-4-1"])
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zb_h1"])
def test_memory_counts_what_the_schedule_holds_at_most(schedule: str, replicas: str) -> None:
    gpus = sum(map(int, replicas.split("-")))
    sizes = ["cluster=a10x8", "cluster.groups.gpu2.count=1", f"cluster.groups.gpu2.gpus_per_node={gpus}"]
    sizes += ["model=xl", "model.layers=12", "parallel.pipeline=3", "parallel.partition=4-4-4"]
    own = [f"parallel.replicas={replicas}", f"parallel.schedule={schedule}", "parallel.global_batch_size=32"]
    parallel = planned(compose([*WORDS[3:], *sizes, *own])).training.parallel
    ends = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    for stage, of_stage in enumerate(actions_of(parallel)):
        most = 0
        for actions in of_stage:
            held = 0
            for action in actions:
                held += (action.kind is Kind.FORWARD) - (action.kind in ends)
                most = max(most, held)
        assert in_flight(parallel, stage) == most
