"""What the public FASOP artifact (HPDC 2024) gets wrong, and the tests that would catch each of it here.

`CAUGHT_BY` is the list; the tests in this file are those that are about nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fasop.costs.network.links import between
from fasop.costs.sizes import word_parameters
from fasop.partition.baselines import even
from fasop.partition.local_search import improved
from fasop.simulation.linear import Linear
from launch.cli import main
from tests.support import ROOT
from tests.support.fasop.plans import MEGATRON, built, column, experiment, kinds, training

CAUGHT_BY = {
    "the largest stage is minimised, not the iteration": "test_partition.test_the_largest_stage_is_not_what_decides",
    "its local search misses the smallest largest stage": "test_partition.test_the_balance_is_the_best_there_is",
    "its partition loses to others when simulated": "test_search.test_no_plan_is_worse_than_the_public_heuristics",
    "no stage has the embedding alone": "test_public_faults.test_a_stage_may_have_the_embedding_alone",
    "messages are charged on the first and the last hop": "test_pipelines.test_every_hop_is_charged_in_both_directions",
    "such messages change the best plan": "test_partition.test_hops_change_the_best_partition",
    "all have the first stage's gradients": "test_pipelines.test_each_stage_sums_its_own_gradients_over_its_own_links",
    "a ring has a share of dp x tp of a link": "test_pipelines.test_a_ring_of_replicas_leaves_each_node_once",
    "messages have such a share, too": "test_pipelines.test_as_many_ranks_share_a_link_as_send_over_it",
    "a tensor group has all of the embedding": "test_public_faults.test_a_tensor_group_shares_the_embeddings_gradient",
    "everything has 16 bit": "test_public_faults.test_a_number_format_decides_the_size_of_messages",
    "gradients have 16 bit": "test_costs.test_each_engine_sums_gradients_in_its_own_way",
    "nothing has a latency": "test_costs.test_latency_counts",
    "there is no optimizer": "test_public_faults.test_an_iteration_has_an_optimizer_step",
    "backward takes twice forward": "test_public_faults.test_a_backward_pass_is_measured",
    "there is no sharded optimizer": "test_memory.test_a_parameter_takes_what_its_engine_keeps",
    "there is no recomputation": "test_memory.test_recomputation_trades_memory",
    "recomputing takes no time": "test_costs.test_recomputation_adds_what_is_done_again",
    "there is no interleaved schedule": "test_predict.test_chunks_have_their_own_times",
    "a parameter takes 18 bytes": "test_memory.test_a_parameter_takes_what_its_engine_keeps",
    "every stage holds as many micro-batches": "test_memory.test_later_stages_hold_fewer_micro_batches",
    "the last node of a stage is skipped": "test_pipelines.test_every_node_of_a_stage_counts",
    "memory is filtered afterwards, without a margin": "test_pipelines.test_a_stages_memory_is_its_own_gpus",
    "orders are rotations": "test_orders.test_every_order_comes_once",
    "larger micro-batches are guessed, silently": "test_costs.test_a_micro_batch_that_was_not_measured_says_so",
    "files of the user are deleted": "test_public_faults.test_a_search_leaves_all_files_alone",
    "the measured run is 10 % off": "test_predict.test_the_seeds_measured_run_is_predicted_within_5_percent",
}
"""By fault: the test in this folder."""


@pytest.mark.parametrize("test", CAUGHT_BY.values(), ids=CAUGHT_BY)
def test_every_fault_has_its_test(test: str) -> None:
    module, name = test.split(".")
    (file,) = (ROOT / "tests" / "fasop").rglob(f"{module}.py")
    assert f"def {name}(" in file.read_text()


def test_a_stage_may_have_the_embedding_alone() -> None:
    """Where it takes longer than the layers of any other."""
    one = built(experiment(), [0] * 8)
    slow = one.forward.fixed.copy()
    slow[0] += 20 * one.forward.layer[0]
    found, _ = improved(replace(one, forward=Linear(fixed=slow, layer=one.forward.layer)), even(one, 48))
    assert found[0, 0] == 0
    assert found.sum() == 48


def test_a_tensor_group_shares_the_embeddings_gradient() -> None:
    """Each of its ranks sums a fourth of the words, all four over the node's link at once."""
    one = built(experiment(), [0] * 8, tensor=4, data=1)
    size = 4 * word_parameters(training().model, 4)
    assert size == pytest.approx(4 * word_parameters(training().model, 1) / 4, rel=0.01)
    link = between(kinds(experiment())[0].group, 4).all_reduce(2)
    assert one.embedding[0] == pytest.approx(link.takes(float(size)))


def test_a_number_format_decides_the_size_of_messages() -> None:
    whole, half = (built(experiment(f"train.precision={name}"), [0] * 8).hop[0, 0] for name in ("fp32", "fp16"))
    latency = 20e-6
    assert half - latency == pytest.approx((whole - latency) / 2)


def test_an_iteration_has_an_optimizer_step() -> None:
    one = built(experiment(*MEGATRON), [0] * 8)
    layers = column(0, 11, 8, 8, 8, 8, 5, 0)
    free = replace(one, optimizer=Linear(fixed=0 * one.hop, layer=0 * one.hop))
    assert 0.02 < (one.iteration(layers) - free.iteration(layers))[0] < one.optimizer.of(layers).max()


def test_a_backward_pass_is_measured() -> None:
    a100, a10 = (built(experiment(*MEGATRON, f"cluster={name}"), [0] * 8) for name in ("a100x1_a10x7", "a10x8"))
    ratios = [(one.backward.layer / one.forward.layer)[1, 0] for one in (a100, a10)]
    assert ratios == pytest.approx([1.1, 1.6], rel=0.01)


def test_a_search_leaves_all_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "tmp" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    for name in ("HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path / "tmp")
    assert main(["search", "experiment=seed_a10x8", "top=1"]) == 0
    kept = tmp_path / ".cache" / "tdpp" / "composed"
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != kept] == [mine]
    assert mine.read_text() == "mine"
