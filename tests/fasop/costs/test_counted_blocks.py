"""The blocks of a model of transformers that no profile knows are counted, so that it is planned without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from conf.compose import compose
from conf.schema.experiment import Precision
from fasop.costs import known_blocks
from fasop.costs.layers import layer_times, measured_tensor_sizes
from fasop.costs.measured_module import BlockCounts, MeasuredBlock, MeasuredModule, PassCounts
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network.links import within
from fasop.costs.profiles.profile import Cost, LayerProfile, ModelCosts, Module, ModuleBlock, SequenceBytes
from fasop.costs.training import PlacedTraining, Training
from fasop.errors import SearchError
from fasop.search.arguments import Arguments
from fasop.search.inputs import Inputs, read
from fasop.search.run import best_plans
from fasop.search.space.candidates import sizes
from fasop.simulation.predict import predict, predict_plan
from launch.commands.launching.preflight import check_model
from tests.support.fasop.modules import written
from tests.support.megatron_ext.tiny_transformers import working

MIB = 2**20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests: what is asked of it again is answered again without counting."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    made = working("qwen2")
    file.write_text(json.dumps({**made.to_dict(), "model_type": made.model_type}, default=str))
    return file


def words(config: Path, *others: str) -> list[str]:
    return [
        "model=huggingface",
        f"model.config={config}",
        "model.sequence_length=16",
        "cluster.gpus.cpu.name=GPU",
        *others,
    ]


def test_memory_and_time_are_predicted_without_a_profile(config: Path) -> None:
    layout = ("parallel.pipeline=2", "parallel.partition=1-3", "parallel.data=1", "parallel.tensor=1")
    batches = ("parallel.micro_batch_size=2", "parallel.global_batch_size=4", "train.precision=bf16")
    found = predict(compose(words(config, *layout, *batches)))
    assert str(found.basis) == "not measured"
    assert found.iteration_s > 0
    first, last = found.stages
    made = working("qwen2")
    parameters = (first.memory.weights.of(1) + last.memory.weights.of(3)) / 2
    tied = made.vocab_size * made.hidden_size if made.tie_word_embeddings else 0
    of_model = sum(one.numel() for one in _whole(made))  # type: ignore[attr-defined]
    assert parameters == pytest.approx(of_model + tied, rel=0.01)  # and the angles of positions


def _whole(config: object) -> list[object]:
    from tests.support.megatron_ext.tiny_transformers import whole

    return [*whole(config).parameters()]


def test_what_cannot_be_counted_is_one_message(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "COUNTER", "megatron_ext.nothing")
    with pytest.raises(
        SearchError, match=r"cannot be counted here: .*nothing.*; measure its blocks with 'tdpp profile"
    ):
        predict(compose(words(config, "parallel=single", "parallel.partition=4")))


def test_layers_are_gone_when_the_backward_pass_comes_to_the_embedding(config: Path) -> None:
    def block(name: str, held: str | None, kept: int, passing: int) -> MeasuredBlock:
        of: dict[str, Any] = {"parameters": 0, "fixed_bytes": 0, "kept": (kept * MIB,), "given": (kept * MIB,)}
        of_pass = (passing * MIB,)
        one = PassCounts(operations=(1,), traffic=(1,), kernels=1)
        counts = BlockCounts(passing=of_pass, passing_again=of_pass, dropped=(0,), forward=one, backward=one)
        return MeasuredBlock(name=name, kind=name.partition(".")[0], held=held, counts=counts, **of)

    layers = [block(f"layer.{number}", None, 100, 50) for number in range(4)]
    ends = block("embedding", "first", 10, 1000), block("head", "last", 0, 10), block("loss()", "last", 0, 0)
    training = Training.of(compose(words(config, "parallel=single", "parallel.micro_batch_size=1")))
    module = MeasuredModule(
        training.model,
        digest="",
        sequence=[ends[0], *layers, *ends[1:]],
        sizes=(1,),
        crossing=[(0,)] * 5,
        wires=[],
        tied_parameters=0,
        tied_blocks=0,
        always=7 * MIB,
    )
    activations = stage_memory(replace(training, model=module), 0).activations
    found = [activations.of(count) / MIB for count in range(1, 13)]
    assert found == pytest.approx([17 + max(1000, 100 * count + 50) for count in range(1, 13)], abs=1e-3)


def searched(config: Path, *others: str) -> Inputs:
    node = ("cluster.groups.local.gpus_per_node=4", "parallel.global_batch_size=4")
    return read([*words(config, *node), *others])


def test_a_search_tries_the_tensor_sizes_of_the_familys_own_plan(config: Path) -> None:
    """Qwen2 has two heads of keys and values here, which four ranks cannot share."""
    inputs = searched(config)
    assert inputs.choices.tensor is None
    found = {one.parallel.tensor_size: one for one in sizes(inputs.training, inputs.kinds, inputs.choices)}
    assert sorted(found) == [1, 2]
    with pytest.raises(
        SearchError, match=r"^parallel.tensor=4 is not possible with Qwen2.*: num_key_value_heads=2 is not a multiple"
    ):
        searched(config, "parallel.tensor=4")
    whole, part = (_rank_parameters(found[size]) for size in (1, 2))
    assert whole / 2 < part < 0.6 * whole, "norms and the vocabulary's filling are on both"


def _rank_parameters(training: Training) -> int:
    assert isinstance(training.model, MeasuredModule)
    assert training.model.tensor == training.parallel.tensor_size
    return sum(block.parameters for block in training.model.sequence)


def test_a_plan_with_tensor_groups_is_launched_as_the_search_predicts_it(config: Path) -> None:
    plan = best_plans(searched(config, "parallel.tensor=2", "parallel.pipeline=2"), Arguments(top=1)).plans[0]
    assert (plan.training.parallel.tensor, plan.training.parallel.pipeline) == (2, 2)
    chosen = asdict(plan.training.parallel.configured())
    text = {key: "null" if value is None else str(value).lower() for key, value in chosen.items()}
    experiment = compose(words(config, *(f"parallel.{key}={value}" for key, value in text.items())))
    assert check_model(experiment) == []
    launched = predict(experiment)
    predicted = predict_plan(PlacedTraining(training=plan.training, partition=plan.partition, nodes=plan.nodes))
    for one, other in zip(launched.stages, predicted.stages, strict=True):
        assert one.memory.of(sum(one.layers)) == other.memory.of(sum(other.layers))
    assert launched.iteration_s == pytest.approx(plan.total)


def profile_of(alone: MeasuredModule) -> LayerProfile:
    """In which each block takes 1 ms forward and 3 ms backward."""
    module = Module(
        code=alone.code_name,
        digest=alone.digest,
        blocks=[
            ModuleBlock(name=one.name, kind=one.kind, held=one.held, parameters=one.parameters)
            for one in alone.sequence[:-1]
        ],
    )
    times = {kind: Cost(forward=1.0, backward=3.0, activation_bytes=0) for kind in {b.kind for b in alone.sequence}}
    number = len(alone.sequence) - 1
    costs = ModelCosts.of(
        times,
        model="tiny",
        tensor=1,
        micro_batch_size=1,
        precision=Precision.fp32,
        sequence=SequenceBytes(kept=[1] * number, given=[1] * number, crossing=[1] * (alone.layers + 1)),
    )
    return LayerProfile(gpu="CPU", source="a test", modules={"tiny": module}, costs=[costs])


OPERATIONS_ALONE = ("cluster.gpus.cpu.fp32_tflops=1e-6", "cluster.gpus.cpu.memory_gb_per_s=1e9")
"""Rates of a GPU for which nothing else counts."""


def test_times_of_a_profile_are_shared_out_as_counted_operations_are(config: Path, tmp_path: Path) -> None:
    """And the group's sums come on top, on links that take no time here."""
    alone = searched(config).training.model
    assert isinstance(alone, MeasuredModule)
    file = written(profile_of(alone), tmp_path)
    free = ("cluster.groups.local.intra_latency_us=0", "cluster.groups.local.intra_gbit_per_s=1e9")
    inputs = searched(config, f"cluster.gpus.cpu.profile={file}", *free, *OPERATIONS_ALONE)
    one, two = (replace(inputs.training, parallel=replace(inputs.training.parallel, tensor=size)) for size in (1, 2))
    (kind,) = inputs.kinds
    layers = [layer_times(kind.gpu, kind.profile, of, within(kind.group)).layer for of in (one, two)]
    assert (layers[0].forward, layers[0].backward) == pytest.approx((1e-3, 3e-3))
    assert two.model.tensor == 2  # type: ignore[attr-defined]
    assert layers[1].forward == pytest.approx(0.5e-3, rel=0.02)
    assert layers[1].backward == pytest.approx(1.5e-3, rel=0.02)
    sizes_known = measured_tensor_sizes(kind.gpu, kind.profile, inputs.training)
    assert sizes_known == {1, 2}


LORA = ("train.lora_rank=2", "train.load=weights")


def counted_of(training: Training) -> MeasuredModule:
    assert isinstance(training.model, MeasuredModule)
    return training.model


def test_only_adapters_have_gradients_and_states_in_memory(config: Path) -> None:
    """In 16 bits: the weights beside them take two bytes each, as tensors of the whole model do."""
    precision = ("train.precision=bf16", "parallel.partition=4", "parallel=single")
    every, some = (predict(compose(words(config, *precision, *more))).stages[0].memory for more in ((), LORA))
    module = counted_of(searched(config, "train.precision=bf16", *LORA).training)
    made = working("qwen2")
    assert module.tied_parameters == 0
    wide, kv = made.hidden_size, made.num_key_value_heads * made.hidden_size // made.num_attention_heads
    inner = made.intermediate_size
    of_layer = [(wide, wide), (kv, wide), (kv, wide), (wide, wide), (inner, wide), (inner, wide), (wide, inner)]
    adapters = 4 * sum(2 * (out + within) for out, within in of_layer)
    assert sum(block.parameters for block in module.sequence) == adapters
    assert (some.gradients.of(4), some.optimizer.of(4)) == (4 * adapters, 12 * adapters)
    frozen = some.weights.of(4) - 2 * adapters
    tied = made.vocab_size * made.hidden_size if made.tie_word_embeddings else 0
    assert frozen == pytest.approx(every.weights.of(4) + 2 * tied, rel=1e-6)


@pytest.mark.parametrize("profiled", [False, True], ids=["counted", "from a profile of all weights"])
def test_a_frozen_layers_backward_pass_has_no_gradients_of_weights(
    profiled: bool, config: Path, tmp_path: Path
) -> None:
    """So it has as many products as the forward pass, a half of those with such gradients; the first layer has fewer,
    since nothing before it is trained. What adapters of rank 2 of 32 add is in both."""
    if profiled:
        file = written(profile_of(counted_of(searched(config).training)), tmp_path)
        given = [*OPERATIONS_ALONE, f"cluster.gpus.cpu.profile={file}"]
    else:
        given = [*OPERATIONS_ALONE]
    trainings = [searched(config, *given, *more).training for more in ((), LORA)]
    (kind,) = searched(config, *given).kinds
    every, some = (layer_times(kind.gpu, kind.profile, one, within(kind.group)) for one in trainings)
    longer = every.layer.backward / every.layer.forward
    assert longer == pytest.approx(3.0 if profiled else 2.0, rel=0.1)
    first, later = (one.backward / every.layer.backward for one in some.layers[:2])
    assert 0.4 < first < later
    assert 0.5 < later < 0.75
    assert all(1.0 < one.forward / every.layer.forward < 1.2 for one in some.layers)
    assert some.embedding.backward < 1e-3 * some.layer.backward
    assert some.embedding.forward > 0
    left = 0.75 if profiled else 0.5  # that profile's loss takes as long as its head, and no less
    assert some.head.backward == pytest.approx(left * every.head.backward, rel=0.1)


def test_a_search_predicts_adapters_as_a_launch_of_its_plan(config: Path) -> None:
    given = ("parallel.pipeline=2", "parallel.tensor=1", "parallel.data=2", *OPERATIONS_ALONE)
    every, plan = (best_plans(searched(config, *given, *more), Arguments(top=1)).plans[0] for more in ((), LORA))
    text = {
        key: "null" if value is None else str(value).lower()
        for key, value in asdict(plan.training.parallel.configured()).items()
    }
    layout = {**text, "partition": "-".join(map(str, plan.partition.layers))}
    chosen = [f"parallel.{key}={value}" for key, value in layout.items()]
    launched = predict(compose(words(config, *LORA, *OPERATIONS_ALONE, *chosen)))
    assert launched.iteration_s == pytest.approx(plan.total, rel=1e-3)  # a launch counts its micro-batch itself
    assert plan.total < every.total


def test_a_target_that_no_layer_has_ends_a_search(config: Path) -> None:
    with pytest.raises(SearchError, match=r"\[c_attn\]: the layers of Qwen2ForCausalLM have no linear"):
        searched(config, *LORA, "train.lora_targets=[c_attn]")
