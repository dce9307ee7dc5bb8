"""Costs of models whose layers differ: what each kind takes, where it lies, and what crosses a cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conf.schema.experiment import Gpu
from conf.schema.values.partition import Partition
from fasop.costs.blocks import blocks_of
from fasop.costs.layers import layer_times
from fasop.costs.memory.activations import layer_activations
from fasop.costs.memory.amounts import GIB
from fasop.costs.memory.stages import stage_memory
from fasop.costs.network.links import Link
from fasop.costs.sizes import BYTES, kind_parameters, shared_parameters
from fasop.costs.training import PlacedTraining, Training
from fasop.search.inputs import read
from fasop.simulation.predict import predict_plan
from megatron_ext.contract.models.counts import block_numel
from tests.support.fasop.plans import pipelines

NOTHING = Link(latency_s=0.0, s_per_byte=0.0)


def t5() -> Training:
    words = ["model=t5-large", "cluster=a100x1_a10x7", "parallel.global_batch_size=128", "train.precision=fp16"]
    return read(words).training


def test_a_decoders_first_layer_has_the_encoders_norm_and_the_decoders_embedding() -> None:
    blocks = t5().blocks
    assert blocks.first == ("embedding",)
    assert blocks.last == ("head",)
    assert blocks.kinds == (("encoder",), ("encoder_norm", "decoder_embedding", "decoder"), ("decoder",))
    assert blocks.sequence == (0,) * 24 + (1,) + (2,) * 23
    assert blocks.by_kind([20, 5, 23]) == [(20, 0, 0), (4, 1, 0), (0, 0, 23)]
    assert [blocks.named(part) for part in blocks.by_kind([20, 5, 23])] == [
        "20 encoder",
        "4 encoder + 1 decoder",
        "23 decoder",
    ]


def test_a_decoders_messages_carry_the_encoders_output_too() -> None:
    model = t5().model
    crossing = blocks_of(model).crossing
    assert crossing[1] == crossing[24] == 512 * 1024
    assert crossing[25] == crossing[47] == (512 + 128) * 1024


@pytest.mark.parametrize("name", ["tiny", "llama-tiny", "bert-tiny"])
def test_layers_of_one_kind_are_alike(name: str) -> None:
    assert read([f"model={name}", "cluster=a10x8", "parallel.global_batch_size=64"]).training.blocks.alike


@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_hold_all_parameters(tensor: int) -> None:
    """Without the copies that stages of their own have."""
    model = t5().model
    sized = model.sized(tensor)
    whole = sum(count * block_numel(sized, kind, tensor) for kind, count in sized.all_kinds())
    one = replace(t5(), parallel=replace(t5().parallel, tensor=tensor))
    of_kinds = kind_parameters(model, tensor, own_word=True)
    held = stage_memory(one, 0).weights.fixed / BYTES[one.precision]
    last = replace(one, parallel=replace(one.parallel, pipeline=2))
    head = stage_memory(last, 1).weights.fixed / BYTES[one.precision]
    first = stage_memory(last, 0).weights.fixed / BYTES[one.precision]
    assert first + head + np.dot(of_kinds, one.blocks.counts[:, -1]) == whole
    words, holders = shared_parameters(model, tensor)
    assert holders == 3
    assert held < first + head
    embedding = sized.traits.parameters(sized, "embedding")
    assert words == embedding["word"].numel(tensor) + embedding["position"].numel(tensor)


def test_a_decoder_layer_takes_more_than_an_encoder_layer_of_its_tokens() -> None:
    """It attends twice, and so has a third more matrices."""
    same = replace(t5().model, decoder_sequence_length=512)
    training = replace(t5(), model=same)
    gpu = Gpu(
        name="some", memory_gib=80, fp32_tflops=20, fp16_tflops=100, bf16_tflops=100, memory_gb_per_s=1000, profile=None
    )
    encoder, first, decoder = layer_times(gpu, None, training, NOTHING).layers
    assert 1.2 < decoder.forward / encoder.forward < 1.5
    assert decoder.forward < first.forward < 1.2 * decoder.forward
    kept = [layer_activations(training, kind) for kind in range(3)]
    assert 1.2 < kept[2] / kept[0] < 1.6
    assert kept[1] == kept[2]


def test_each_stage_has_the_time_and_the_memory_of_its_own_layers() -> None:
    """A stage with the border between encoder and decoder has some of each."""
    inputs = read(["model=t5-large", "cluster=a10x8", "parallel.global_batch_size=64", "train.precision=fp16"])
    layers = (8, 8, 6, 6, 5, 5, 5, 5)
    parallel = replace(inputs.training.parallel, data=4, pipeline=8, partition=layers, micro_batch_size=2)
    training = replace(inputs.training, parallel=parallel)
    nodes = [inputs.kinds[0]] * 8
    prediction = predict_plan(PlacedTraining(training=training, partition=Partition(layers), nodes=nodes))
    assert [stage.contents for stage in prediction.stages][2:5] == ["6 encoder", "2 encoder + 4 decoder", "5 decoder"]
    one = pipelines(training, inputs.kinds, np.zeros((1, 8), int))
    split = np.array([[8, 8, 6, 6, 5, 5, 5, 5]]).T
    assert one.order is not None
    assert prediction.iteration_s == pytest.approx(one.iteration(split)[0])
    assert one.fits(split)[0]
    stage = prediction.stages[3]
    kinds = [stage_memory(training, 3, None, kind) for kind in range(3)]
    expected = kinds[0].fixed + 2 * kinds[0].layer + kinds[1].layer + 3 * kinds[2].layer
    assert stage.memory.context is not None and stage.memory.communicators is not None
    beside = stage.memory.context.fixed + stage.memory.communicators.fixed
    assert stage.memory_gib * GIB == pytest.approx(expected + beside)
    encoder, first, decoder = (layer_times(nodes[0].gpu, None, training, NOTHING).layers[kind] for kind in range(3))
    whole = 2 * encoder.forward + first.forward + 3 * decoder.forward
    assert stage.times.forward[0] == pytest.approx(whole)
    hop = one.messages(split)[0][:, 0]
    assert hop[4] == hop[3] > hop[2] == hop[1]
