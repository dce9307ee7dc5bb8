"""What ranks send while they train is counted to the byte: equal to what follows from the model and the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from megatron_ext.contract.events import ACTIVATIONS, ALL_REDUCE, GRADIENTS, ISLANDS, TENSOR, TRAFFIC, WEIGHTS
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.engine import engine
from tests.support.megatron_ext.engine_run import EngineRun

Engine = Callable[..., EngineRun]
EVALUATED = ["train.eval_interval=2", "train.eval_iterations=1"]
"""Whose messages do not count."""
UNTIED = "model.untie_embeddings_and_output_weights=true"
FP32 = 4


def sent(run: EngineRun) -> list[dict[str, float]]:
    """By rank."""
    assert run.go() == 0, run.stderr()
    files = sorted((run.run.path / "traffic").iterdir())
    read = [json.loads(file.read_text()) for file in files]
    train, plan = run.plan.train, run.plan
    assert [one["rank"] for one in read] == list(range(plan.world_size))
    assert [one["stage"] for one in read] == [rank.stage for rank in plan.ranks]
    assert {(one["iteration"], one["samples"]) for one in read} == {
        (train.iterations, train.iterations * plan.global_batch_size)
    }
    return [one["bytes"] for one in read]


def only(**kinds: float) -> dict[str, float]:
    return dict.fromkeys(TRAFFIC, 0) | kinds


def samples(run: EngineRun) -> int:
    return run.plan.train.iterations * run.plan.global_batch_size


def activations(run: EngineRun) -> int:
    """Bytes over a cut, for a sample."""
    return run.plan.model.sequence_length * run.plan.model.hidden * FP32


@pytest.mark.parametrize("bucket_bytes", [None, 1e4], ids=["one-bucket", "overlapped"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_data_parallelism_sends_its_gradients_around_a_ring(
    engine_run: Engine, replicas: int, bucket_bytes: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bucket_bytes is not None:
        monkeypatch.setattr(engine, "BUCKET_BYTES", bucket_bytes)
    run = engine_run(f"parallel.data={replicas}", "parallel.pipeline=1", *EVALUATED)
    of_a_rank = run.plan.train.iterations * 2 * (replicas - 1) * parameter_count(run.plan.model) * FP32 // replicas
    assert sent(run) == [only(all_reduce=of_a_rank)] * replicas


def test_a_pipeline_sends_activations_one_way_and_their_gradients_the_other(engine_run: Engine) -> None:
    run = engine_run("parallel.data=1", "parallel.pipeline=3", "parallel.partition=1-1-1", *EVALUATED, UNTIED)
    message = samples(run) * activations(run)
    assert sent(run) == [
        only(activations=message), only(activations=message, gradients=message), only(gradients=message)
    ]  # fmt: skip


def test_a_tied_embedding_is_summed_over_first_and_last_stage(engine_run: Engine) -> None:
    run = engine_run("parallel.data=1", "parallel.pipeline=2", "parallel.partition=1-2")
    message, model = samples(run) * activations(run), run.plan.model
    embedding = run.plan.train.iterations * model.padded_vocab_size * model.hidden * FP32
    first, last = sent(run)
    assert first == only(activations=message, all_reduce=embedding)
    assert last == only(gradients=message, all_reduce=embedding)


@pytest.mark.parametrize("iterations", [4, 5])
def test_three_replicas_and_one_without_a_flush_send_what_the_formula_says(engine_run: Engine, iterations: int) -> None:
    """Rounds of the first stage that its replicas do not fill are summed as well."""
    run = engine_run(
        "parallel.schedule=pipedream", "parallel.data=1", "parallel.pipeline=2", "parallel.replicas=3-1",
        "parallel.partition=2-1", f"train.iterations={iterations}", *EVALUATED, UNTIED,
    )  # fmt: skip
    size, ranks = run.plan.micro_batch_size, 3
    micro_batches = samples(run) // size
    streams = [2 * run.plan.global_batch_size // size] * (iterations // 2)  # it drains to be evaluated
    streams += [run.plan.global_batch_size // size] * (iterations % 2)
    rounds = sum(-(-count // ranks) for count in streams)
    of_stage = (parameter_count(run.plan.model) - parameters_of_last_stage(run)) * FP32
    found = sent(run)
    message = size * activations(run)
    assert sum(one[ACTIVATIONS] for one in found[:3]) == micro_batches * message == found[3][GRADIENTS]
    assert [one[ACTIVATIONS] % message for one in found] == [0] * 4
    assert [one[ALL_REDUCE] for one in found] == [pytest.approx(rounds * 4 / 3 * of_stage, rel=1e-15)] * 3 + [0]
    assert sum(one[TENSOR] + one[WEIGHTS] for one in found) == 0


def parameters_of_last_stage(run: EngineRun, layers: int = 1) -> int:
    """Layers, the last norm and the head."""
    model = run.plan.model
    wide = model.hidden
    layer = 12 * wide * wide + 13 * wide
    return layers * layer + 2 * wide + model.padded_vocab_size * wide


@pytest.mark.parametrize("bucket_bytes", [None, 1e4], ids=["one-bucket", "overlapped"])
@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_sharded_optimizer_scatters_gradients_in_fp32_and_gathers_weights(
    engine_run: Engine,
    replicas: int,
    precision: str,
    width: int,
    bucket_bytes: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bf16 6 bytes a parameter, of which a rank of n sends (n - 1) / n."""
    if bucket_bytes is not None:
        monkeypatch.setattr(engine, "BUCKET_BYTES", bucket_bytes)
    sizes = (f"parallel.data={replicas}", "parallel.pipeline=1", f"train.precision={precision}")
    run = engine_run(*sizes, "parallel.sharded_optimizer=true")
    assert parameter_count(run.plan.model) % replicas == 0  # else buckets are filled up
    of_a_rank = run.plan.train.iterations * (replicas - 1) * parameter_count(run.plan.model) // replicas
    assert sent(run) == [only(all_reduce=FP32 * of_a_rank, weights=width * of_a_rank)] * replicas


@pytest.mark.parametrize("shares", ["1-1", "3-1"], ids=["equal", "unequal"])
def test_scattered_gradients_travel_once_for_each_micro_batch(
    engine_run: Engine, shares: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas send as often as the one that has the most."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 1e4)
    run = engine_run("parallel.data=2", "parallel.pipeline=1", f"parallel.shares={shares}", "parallel.zero=2")
    of_a_rank = run.plan.train.iterations * parameter_count(run.plan.model) // 2
    rounds = max(run.plan.micro_batches)
    assert sent(run) == [only(all_reduce=FP32 * rounds * of_a_rank, weights=FP32 * of_a_rank)] * 2


@pytest.mark.parametrize("evaluated", [[], EVALUATED], ids=["trained", "evaluated, too"])
def test_gathered_weights_travel_for_each_pass(
    engine_run: Engine, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that are there still, or already, since they are among the next ones and have room."""
    monkeypatch.setattr(engine, "BUCKET_BYTES", 1e4)
    run = engine_run("parallel.data=2", "parallel.pipeline=1", "parallel.zero=3", UNTIED, *evaluated)
    model, iterations, rounds = run.plan.model, run.plan.train.iterations, max(run.plan.micro_batches)
    whole, words = parameter_count(model), model.padded_vocab_size * model.hidden
    last, first = words + 2 * model.hidden, words + model.sequence_length * model.hidden
    forward = [first, *[(whole - first - last) // model.layers] * model.layers, last]
    gathered = sum(fetched(forward, rounds))
    half = iterations * FP32 // 2
    assert sent(run) == [only(all_reduce=half * rounds * whole, weights=half * gathered)] * 2


def fetched(blocks: Sequence[int], rounds: int) -> Iterator[int]:
    """What comes into a memory that has room for two neighbours and has as many of the next blocks as fit, while they
    pass so often forward and backward."""
    numbers = range(len(blocks))
    room = max(one + other for one, other in pairwise(blocks))
    passes, here = [*numbers, *reversed(numbers)] * rounds, set[int]()
    for now in range(len(passes)):
        wanted = dict.fromkeys(passes[now : now + 1])
        for following in passes[now + 1 :]:
            if sum(blocks[one] for one in {*wanted, following}) > room:
                break
            wanted[following] = None
        yield sum(blocks[one] for one in {*wanted} - here)
        here = {*wanted}


def test_replicas_of_stages_with_a_tied_embedding_scatter_its_gradients_too(engine_run: Engine) -> None:
    sizes = ("parallel.data=2", "parallel.pipeline=2", "parallel.partition=1-2", "parallel.micro_batch_size=2")
    run = engine_run(*sizes, "parallel.sharded_optimizer=true")
    model, iterations = run.plan.model, run.plan.train.iterations
    message = samples(run) // 2 * activations(run)
    embedding = model.padded_vocab_size * model.hidden
    last = parameters_of_last_stage(run, layers=2)
    first = parameter_count(model) - (last - embedding)
    for one, parameters, kind in zip(
        sent(run), (first, first, last, last), (ACTIVATIONS,) * 2 + (GRADIENTS,) * 2, strict=True
    ):
        half = iterations * FP32 * parameters // 2
        assert one == only(**{kind: message}, all_reduce=half + iterations * FP32 * embedding, weights=half)


def test_a_tensor_group_sums_within_the_passes(engine_run: Engine) -> None:
    run = engine_run("parallel.data=1", "parallel.pipeline=1", "parallel.tensor=2", "model.layers=2", UNTIED)
    one, other = sent(run)
    assert one == other
    assert one[TENSOR] >= samples(run) * 2 * 4 * activations(run)  # two a layer in each direction
    assert one[ACTIVATIONS] == one[GRADIENTS] == one[ALL_REDUCE] == 0


def test_islands_with_plans_of_their_own_send_the_halves_of_matrices_once_and_all_else_with_each(
    engine_run: Engine,
) -> None:
    """A tensor group of two meets two stages, each of whose ranks has both halves."""
    run = engine_run(
        "parallel.data=2", "parallel.islands=1-1", "parallel.pipeline=2", "parallel.partition=1-2/3",
        "parallel.tensor=1/2", "train.sync_every=3", UNTIED, *EVALUATED,
    )  # fmt: skip
    first, last, *group = [one[ISLANDS] for one in sent(run)]
    model, meetings = run.plan.model, 2
    norms, biases = 4 * model.hidden, 2 * model.hidden  # of a layer; the biases of what is cut by rows
    whole = model.layers * (norms + biases) + 2 * model.hidden + model.sequence_length * model.hidden
    padded = 2 * (model.padded_vocab_size - model.vocab_size) * model.hidden  # of the embedding and the head
    assert first + last == meetings * FP32 * (parameter_count(model) + padded + whole)
    assert group == [(first + last) / 2] * 2


def test_both_stages_with_the_tied_words_send_them_to_the_other_island(engine_run: Engine) -> None:
    run = engine_run(
        "parallel.data=2", "parallel.islands=1-1", "parallel.pipeline=2", "parallel.partition=1-2",
        "train.sync_every=3", *EVALUATED,
    )  # fmt: skip
    model, meetings = run.plan.model, 2
    weights = parameter_count(model) + model.padded_vocab_size * model.hidden
    assert sum(one[ISLANDS] for one in sent(run)) == meetings * 2 * FP32 * weights


@pytest.mark.parametrize(("sizes", "replicas"), [("1-1", 2), ("2-1", 3)])
def test_islands_send_their_weights_once_each_time_they_meet(engine_run: Engine, sizes: str, replicas: int) -> None:
    """After iterations 3 and 4, shared by as many replicas of each island as the smallest has."""
    run = engine_run(
        f"parallel.data={replicas}", f"parallel.islands={sizes}", "parallel.pipeline=1", "train.sync_every=3",
        f"parallel.global_batch_size={4 * replicas}", *EVALUATED,
    )  # fmt: skip
    weights = parameter_count(run.plan.model) * FP32
    found = sent(run)
    meetings = 2 * weights
    if sizes == "1-1":
        assert found == [only(islands=meetings)] * 2
    else:  # the second replica gets the sum from the first
        gradients = run.plan.train.iterations * weights
        assert found == [
            only(all_reduce=gradients, islands=meetings, weights=meetings),
            only(all_reduce=gradients),
            only(islands=meetings),
        ]
