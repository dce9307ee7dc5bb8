"""Every rule of a plan and its model is told in one message: the keys, the values, and what would hold, which does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Experiment, Parallel

SEED = "experiment=seed_a10x8"
HET = "experiment=seed_a100x1_a10x7"
REPLICAS = ["parallel.data=2", "parallel.pipeline=1", "parallel.partition=null", "parallel.global_batch_size=4"]

BROKEN = {
    "streams in a pipeline": (
        ["parallel.streams=2"],
        "parallel.streams=2 cannot be combined with parallel.pipeline=2: it works only in data parallel plans; use",
    ),
    "streams of other replicas": (
        [*REPLICAS, "parallel.streams=2-1-1"],
        "parallel.streams=2-1-1 is for 3 replicas, but parallel.data=2; give one number, or one per replica",
    ),
    "micro-batches that streams cannot share": (
        [*REPLICAS, "parallel.streams=3-1"],
        "parallel.streams=3-1: a replica takes 1 micro-batch, which its 3 streams cannot share evenly; choose",
    ),
    "streams of compiled layers": (
        [*REPLICAS, "parallel.micro_batch_size=1", "parallel.streams=2", "train.compile=true"],
        "parallel.streams=2 cannot be combined with train.compile=true; use train.compile=false, or "
        "parallel.streams=null",
    ),
    "no streams": ([*REPLICAS, "parallel.streams=0"], "parallel.streams=0 must be a number from 1 to 64, or one for"),
    "layers are not the partition's sum": (
        ["parallel.partition=1-4"],
        "parallel.partition=1-4 has 1 + 4 = 5 layers, but model.layers=4; nearest that fits: 1-3",
    ),
    "a layer short, in a plan with empty stages": (
        [SEED, "parallel.partition=0-11-8-8-8-8-4-0"],
        "0 + 11 + 8 + 8 + 8 + 8 + 4 + 0 = 47 layers, but model.layers=48; nearest that fits: 0-12-8-8-8-8-4-0",
    ),
    "both rows of layers of a T5 are counted": (
        ["model=t5-tiny", "parallel.partition=1-4"],
        "parallel.partition=1-4 has 1 + 4 = 5 layers, but model.layers=2 + model.decoder_layers=2 = 4; nearest that "
        "fits: 1-3",
    ),
    "positions that the family does not have": (
        ["model=transformer-tiny", "model.position_embedding_type=rope"],
        "model.position_embedding_type=rope cannot be combined with model.family=transformer; use sinusoidal",
    ),
    "positions that only another family has": (
        ["model.position_embedding_type=sinusoidal"],
        "model.position_embedding_type=sinusoidal cannot be combined with model.family=gpt; use learned_absolute or "
        "rope or "
        "none",
    ),
    "an LSTM with an MLP": (
        ["model=gnmt-tiny", "model.ffn_hidden=64"],
        "model.ffn_hidden=64 is only for model.family=gpt, bert, t5, transformer, vit, t2t_vit, vgg or alexnet,",
    ),
    "an LSTM with heads": (
        ["model=gnmt-tiny", "model.heads=2"],
        "the attention of model.family=gnmt has a single head; use 1",
    ),
    "an LSTM with one layer": (
        ["model=gnmt-tiny", "model.layers=1"],
        "model.layers=1: the encoder of model.family=gnmt",
    ),
    "a language model of LSTMs with attention": (
        ["model=awd-lm-tiny", "model.heads=2"],
        "model.heads=2: model.family=awd_lm has no attention; use 1",
    ),
    "a language model of LSTMs with an MLP": (
        ["model=awd-lm-tiny", "model.ffn_hidden=64"],
        "model.ffn_hidden=64 is only for model.family=gpt, bert, t5, transformer, vit, t2t_vit, vgg or alexnet,",
    ),
    "a language model of LSTMs with norms": (
        ["model=awd-lm-tiny", "model.norm_epsilon=1e-3"],
        "model.norm_epsilon=0.001 is for transformers, not for model.family=awd_lm; leave it out",
    ),
    "a language model of one LSTM": (
        ["model=awd-lm-tiny", "model.layers=1"],
        "model.layers=1: model.family=awd_lm needs a first and a last layer, which have their own widths; use 2 or "
        "more",
    ),
    "part of a layer without attention computed again": (
        ["model=awd-lm-tiny", "parallel.recompute=selective"],
        "parallel.recompute=selective recomputes attention, which tdpp does not find in model.family=awd_lm; use",
    ),
    "a rate of dropout that drops all": (
        ["model=awd-lm-tiny", "model.weight_dropout=1"],
        "model.weight_dropout=1.0 must be at least 0 and less than 1",
    ),
    "weights dropped of a transformer": (
        ["model.weight_dropout=0.5"],
        "model.weight_dropout=0.5 is only for model.family=awd_lm, not for model.family=gpt; leave it out",
    ),
    "a model of videos without features": (
        ["model=s2vt-tiny", "model.features=null"],
        "model.features is not set, but model.family=s2vt needs it; give model.features=",
    ),
    "features of text": (["model.features=10"], "model.features=10 is only for model.family=s2vt"),
    "tensor parallel LSTMs": (
        ["model=gnmt-tiny", "parallel=single", "parallel.tensor=2"],
        "parallel.tensor=2",
    ),
    "a decoder that the family does not have": (
        ["model=bert-tiny", "model.decoder_layers=2"],
        "model.decoder_layers=2 is only for model.family=t5, transformer, gnmt or s2vt, not for model.family=bert; "
        "leave it out, or use model.decoder_layers=null",
    ),
    "a decoder's sequence that the family does not have": (
        ["model.decoder_sequence_length=2"],
        "model.decoder_sequence_length=2 is only for model.family=t5, transformer, gnmt or s2vt, not for "
        "model.family=gpt; leave it out",
    ),
    "a binary head that the family does not have": (
        ["model=t5-tiny", "model.bert_binary_head=false"],
        "model.bert_binary_head=false is only for model.family=bert, not for model.family=t5; leave it out, or use "
        "model.bert_binary_head=true",
    ),
    "a head's width that cannot be turned": (
        ["model.kv_channels=7", "model.position_embedding_type=rope"],
        "model.kv_channels=7 is odd, but model.position_embedding_type=rope rotates pairs of numbers; use 8, or "
        "another",
    ),
    "a tensor group shares the decoder's sequence, too": (
        [
            *("model=t5-tiny", "model.decoder_sequence_length=63", "parallel=single", "parallel.tensor=2"),
            *("parallel.sequence_parallel=true", "parallel.partition=null"),
        ],
        "model.decoder_sequence_length=63 is not divisible by parallel.tensor=2",
    ),
    "stages are not the pipeline size": (
        ["parallel.partition=1-2-1"],
        "parallel.partition=1-2-1 has 3 stages, but parallel.pipeline=2; "
        "use parallel.pipeline=3, or a partition such as 2-2",
    ),
    "one stage is told in the singular": (["parallel.partition=4"], "parallel.partition=4 has 1 stage, but"),
    "parts are not the stages times the chunks": (
        ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-3"],
        "parallel.partition=1-3 has 2 parts, but parallel.pipeline * parallel.chunks = 2 * 2 = 4; "
        "use a partition such as 1-1-1-1",
    ),
    "an interleaved schedule has several chunks": (
        ["parallel.schedule=interleaved"],
        "parallel.schedule=interleaved needs parallel.chunks of at least 2, not 1; use parallel.chunks=2, "
        "or parallel.schedule=one_f_one_b",
    ),
    "another schedule has one chunk": (
        ["parallel.schedule=zb_h1", "parallel.chunks=2", "parallel.partition=null"],
        "parallel.chunks=2 needs parallel.schedule=interleaved, but zb_h1 has one chunk per stage; "
        "use interleaved, or parallel.chunks=1",
    ),
    "one stage has one chunk": (
        ["parallel.schedule=interleaved", "parallel.chunks=2", "parallel.pipeline=1", "parallel.partition=null"],
        "parallel.chunks=2 needs parallel.pipeline of at least 2, not 1: one stage holds the whole model; "
        "use parallel.chunks=1 and another parallel.schedule, such as one_f_one_b",
    ),
    "a partition is numbers and dashes": (
        ["parallel.partition=2--2"],
        "parallel.partition='2--2' is not a partition: join the layers of each stage by dashes",
    ),
    "a partition without limit is not computed": (["parallel.partition=1-99999999999"], "is not a partition"),
    "ranks are more than the GPUs": (
        [SEED, "parallel.data=8"],
        "parallel.tensor * parallel.data * parallel.pipeline = 1 * 8 * 8 = 64 ranks, but the chosen nodes of cluster "
        "'a10x8', gpu2*8, have 32 GPUs; one of these fits: parallel.data=4; 16 nodes (cluster.groups.<group>.count)",
    ),
    "ranks are fewer than the GPUs": (
        [SEED, "parallel.data=2"],
        "1 * 2 * 8 = 16 ranks, but the chosen nodes of cluster 'a10x8', gpu2*8, have 32 GPUs; "
        "one of these fits: parallel.tensor=2; parallel.data=4; 4 nodes",
    ),
    "master and slave nodes are not all nodes": (
        [HET, "parallel.node_order=hgx+gpu2*6"],
        "1 * 4 * 8 = 32 ranks, but the chosen nodes of cluster 'a100x1_a10x7', hgx+gpu2*6, have 28 GPUs",
    ),
    "the order has more nodes than the group": (
        [HET, "parallel.node_order=hgx+gpu2*8"],
        "parallel.node_order=hgx+gpu2*8 has 8 nodes of group 'gpu2', but cluster.groups.gpu2.count=7; use at most 7",
    ),
    "the order names a group that is not there": (
        [HET, "parallel.node_order=dgx+gpu2*7"],
        "parallel.node_order=dgx+gpu2*7 names the node group 'dgx', but cluster 'a100x1_a10x7' has only hgx, gpu2",
    ),
    "a node order is groups and counts": (
        [HET, "parallel.node_order=hgx+gpu2*0"],
        "parallel.node_order='hgx+gpu2*0' is not a node order: 'gpu2*0' is neither a group name nor GROUP*COUNT",
    ),
    "the batch is not whole micro-batches": (
        ["parallel.global_batch_size=18"],
        "parallel.global_batch_size=18 is not divisible by parallel.data * parallel.micro_batch_size = 2 * 2 = 4; "
        "the nearest that are: 16, 20",
    ),
    "the batch is smaller than one micro-batch each": (
        ["parallel.global_batch_size=3"],
        "parallel.global_batch_size=3 is not divisible by parallel.data * parallel.micro_batch_size = 2 * 2 = 4; "
        "the nearest that are: 4",
    ),
    "shares of more replicas than there are": (
        ["parallel.shares=3*2-1*2"],
        "parallel.shares=3*2-1*2 is for 4 replicas, but parallel.data=2; use parallel.data=4, or 2 shares",
    ),
    "shares that are none": (
        ["parallel.shares=3-0"],
        "parallel.shares='3-0' is invalid: '0' is neither a whole number of at least 1 nor NUMBER*TIMES; write for "
        "example 3-1 or 3*4-1*4",
    ),
    "shares beyond number": (
        ["parallel.shares=" + "-".join(["1*99999"] * 9)],
        "is invalid: with '1*99999' it has more than 131072 numbers; write for example 3-1 or 3*4-1*4",
    ),
    "replicas beyond number": (
        ["parallel.replicas=1*99999-1*99999"],
        "must be whole numbers by stage joined by dashes",
    ),
    "shares that the batch does not have": (
        ["parallel.shares=6-4"],
        "parallel.shares=6-4 cannot divide parallel.global_batch_size=16 in micro-batches of 2: the batch must be a "
        "multiple of 5 micro-batches, 10 samples; use parallel.global_batch_size=10 or 20, or parallel.shares=5-3",
    ),
    "shares of half micro-batches": (
        ["parallel.shares=1-1", "parallel.global_batch_size=6", "parallel.micro_batch_size=4"],
        "the batch must be a multiple of 2 micro-batches, 8 samples; use parallel.global_batch_size=8",
    ),
    "tensor sizes of another number of stages": (
        ["parallel.tensor=2-1-1"],
        "parallel.tensor=2-1-1 is for 3 stages, but parallel.pipeline=2; use parallel.pipeline=3, or "
        "parallel.tensor=2-1",
    ),
    "tensor sizes that are none": (
        ["parallel.tensor=2-x"],
        "parallel.tensor=2-x must be a whole number, or whole numbers by stage joined by dashes, with *N for a run of "
        "N stages, such as 2-1 or 2*2-1*4",
    ),
    "a tensor size that is not a whole number": (
        ["parallel.tensor=1.5"],
        "parallel.tensor=1.5 must be a whole number, or",
    ),
    "no tensor size at all": (["parallel.tensor=null"], "parallel.tensor=None must be a whole number, or"),
    "a tensor size of a stage that does not divide the heads": (
        ["parallel.tensor=3-1"],
        "model.heads=4 is not divisible by parallel.tensor=3; nearest parallel.tensor that divide it: 2, 4",
    ),
    "a tensor group over two nodes": (
        [
            *(HET, "executor=slurm", "parallel.data=1", "parallel.global_batch_size=12"),
            *("parallel.pipeline=3", "parallel.partition=16-16-16", "parallel.tensor=1-2-1"),
            *("parallel.replicas=3-1-3", "parallel.node_order=hgx+gpu2", "model.heads=16"),
        ],
        "parallel.tensor=1-2-1 puts a tensor group of stage 1, ranks 3 to 4, over node 0 (hgx) and node 1 (gpu2), but "
        "a tensor-parallel group must fit in one node, and ranks fill the nodes of parallel.node_order stage by "
        "stage; nearest that fits: parallel.tensor=1*3 parallel.replicas=3-2-3",
    ),
    "replicas of which not each gets a micro-batch": (
        ["parallel.replicas=9-1"],
        "parallel.replicas=9-1 has a stage of 9 replicas, but parallel.global_batch_size=16 gives it only "
        "8 micro-batches of 2, so some replicas would get none; use parallel.global_batch_size=18, or "
        "parallel.replicas=8-1",
    ),
    "shares of replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.shares=1-2"],
        "parallel.shares=1-2 cannot be combined with parallel.replicas=2-1: it needs the same number of replicas in "
        "every stage; use "
        "parallel.shares=null, or parallel.replicas=null parallel.data=2",
    ),
    "shares of other than the replicas that all stages have": (
        ["parallel.replicas=3-3", "parallel.shares=3-1"],
        "parallel.shares=3-1 is for 2 replicas, but parallel.replicas=3-3 has 3 in every stage; use 3 shares",
    ),
    "interleaved replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.schedule=interleaved"],
        "parallel.schedule=interleaved cannot be combined with parallel.replicas=2-1: it needs the same number of "
        "replicas in every stage; "
        "use gpipe, one_f_one_b or zb_h1",
    ),
    "alike stages, written one by one, on other than their ranks": (
        [SEED, "parallel.pipeline=2", "parallel.partition=24-24", "parallel.tensor=2-2", "parallel.replicas=2-2"],
        "parallel.tensor * parallel.data * parallel.pipeline = 2 * 2 * 2 = 8 ranks, but the chosen nodes of cluster",
    ),
    "chunks of replicas that differ by stage": (
        ["parallel.replicas=2-1", "parallel.schedule=interleaved", "parallel.chunks=2", "parallel.partition=1-1-1-1"],
        "parallel.chunks=2 cannot be combined with parallel.replicas=2-1: it needs the same number of replicas in "
        "every stage; use "
        "parallel.chunks=1",
    ),
    "stages that differ on other than their ranks": (
        [SEED, "parallel.pipeline=2", "parallel.partition=24-24", "parallel.replicas=3-2", "parallel.data=1"],
        "tensor size * replicas, stage by stage, = 1 * 3 + 1 * 2 = 5 ranks, but the chosen nodes of cluster",
    ),
    "more replicas than micro-batches": (
        ["parallel.shares=1-3", "parallel.global_batch_size=2"],
        "the batch must be a multiple of 4 micro-batches, 8 samples; use parallel.global_batch_size=8",
    ),
    "shares and a schedule of one's own": (
        ["parallel.shares=3-1", "parallel.schedule_file=mine.json"],
        "parallel.shares=3-1 cannot be combined with parallel.schedule_file=mine.json, which is for a fixed number of",
    ),
    "Megatron-LM has no shares": (
        ["parallel.shares=3-1", "engine=megatron_lm", "engine.checkout=x"],
        "parallel.shares=3-1: Megatron-LM's replicas take equal numbers of micro-batches; use parallel.shares=null",
    ),
    "tensor does not fit a node": (
        [SEED, "parallel.tensor=8", "parallel.data=1", "parallel.pipeline=4", "parallel.partition=null"],
        "parallel.tensor=8 does not fit cluster.groups.gpu2.gpus_per_node=4: a tensor-parallel group must fit in one "
        "node; nearest that fit: 4",
    ),
    "tensor does not divide the heads": (
        ["parallel.tensor=3"],
        "model.heads=4 is not divisible by parallel.tensor=3; nearest parallel.tensor that divide it: 2, 4",
    ),
    "heads do not divide the hidden size": (
        ["model.heads=5"],
        "model.hidden=64 is not divisible by model.heads=5; nearest model.heads that divide it: 4, 8",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_names_keys_values_and_what_would_hold(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(overrides)


@pytest.fixture(scope="module")
def demo() -> Experiment:
    return compose(["experiment=demo"])


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 4096))
def test_the_batches_proposed_are_divisible_and_the_nearest(data: int, micro: int, batch: int) -> None:
    assume(batch % (data * micro))
    with pytest.raises(ConfigError) as caught:
        Parallel(data=data, micro_batch_size=micro, global_batch_size=batch)
    proposed = [int(n) for n in str(caught.value).rpartition(": ")[2].split(", ")]
    for value in proposed:
        Parallel(data=data, micro_batch_size=micro, global_batch_size=value)
    legal = range(data * micro, batch + 2 * data * micro, data * micro)
    nearest = min(abs(value - batch) for value in legal)
    assert min(abs(value - batch) for value in proposed) == nearest


@given(st.lists(st.integers(0, 20), min_size=2, max_size=2), st.integers(1, 40))
def test_the_partition_proposed_is_accepted(demo: Experiment, parts: list[int], layers: int) -> None:
    assume(sum(parts) != layers)
    parallel = replace(demo.parallel, partition=None)
    whole = replace(demo, model=replace(demo.model, layers=layers), parallel=parallel)
    with pytest.raises(ConfigError) as caught:
        replace(whole, parallel=replace(parallel, partition="-".join(map(str, parts))))
    proposed = str(caught.value).rpartition("nearest that fits: ")[2]
    assert replace(whole, parallel=replace(parallel, partition=proposed)).partition.layers


@given(
    st.integers(1, 8), st.integers(1, 8), st.sampled_from((1, 2, 4)), st.integers(1, 8), st.sampled_from((1, 2, 4, 8))
)
def test_the_parallel_sizes_proposed_are_accepted(
    demo: Experiment, data: int, pipeline: int, tensor: int, nodes: int, per_node: int
) -> None:
    assume(data * pipeline * tensor != nodes * per_node)
    group = replace(demo.cluster.groups["local"], count=nodes, gpus_per_node=per_node)
    cluster = replace(demo.cluster, groups={"local": group})
    parallel = Parallel(tensor=tensor, data=data, pipeline=pipeline, global_batch_size=840)
    with pytest.raises(ConfigError) as caught:
        replace(demo, cluster=cluster, parallel=parallel)
    for key, value in re.findall(r"parallel\.(\w+)=(\d+)", str(caught.value)):
        assert replace(demo, cluster=cluster, parallel=replace(parallel, **{key: int(value)}))


def test_a_schedule_of_ones_own_may_have_chunks() -> None:
    own = ["parallel.schedule_file=mine.json", "parallel.chunks=2", "parallel.partition=0-2-1-1"]
    assert compose(own).partition.layers == (0, 2, 1, 1)


def test_an_even_partition_counts_the_chunks() -> None:
    chunks = ["parallel.schedule=interleaved", "parallel.chunks=3", "parallel.partition=null", "model.layers=8"]
    assert compose(chunks).partition.layers == (2, 2, 1, 1, 1, 1)
