"""What engine=megatron_core cannot do is refused with the key, the rule and the engine that can."""

from __future__ import annotations

import pytest

from conf.compose import compose
from conf.errors import ConfigError
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.contract.plan_check import PlanFault

CORE = ("engine=megatron_core", "parallel=single", "model.layers=4", "parallel.partition=null", "model.vocab_size=64")
REFUSED = {
    "shares": (
        ["parallel.data=2", "parallel.shares=3-1", "parallel.global_batch_size=8"],
        "parallel.shares=3-1 must be null with engine=megatron_core, whose replicas take equal numbers of",
    ),
    "replicas by stage": (
        ["parallel.pipeline=2", "parallel.replicas=2-1"],
        "parallel.replicas=2-1 must be null with engine=megatron_core, whose stages have equal numbers of replicas",
    ),
    "tensor sizes by stage": (
        ["parallel.pipeline=2", "parallel.tensor=1-2"],
        "parallel.tensor=1-2 must be one number with engine=megatron_core, whose stages have tensor groups of one size",
    ),
    "streams": (
        ["parallel.data=2", "parallel.streams=2", "parallel.global_batch_size=8"],
        "parallel.streams=2 cannot be combined with engine.kind=megatron_core; use engine.kind=tdpp",
    ),
    "zb_h1": (
        ["parallel.pipeline=2", "parallel.schedule=zb_h1"],
        "parallel.schedule=zb_h1 must be one_f_one_b or interleaved with engine=megatron_core; engine=tdpp has more",
    ),
    "groups of micro-batches": (
        [
            *("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"),
            *("parallel.micro_batch_size=1", "parallel.global_batch_size=9"),
        ],
        "parallel.global_batch_size=9 must be a multiple of data x micro_batch_size x pipeline = 2 with chunks",
    ),
    "sums in bf16": (
        ["parallel.data=2", "parallel.reduce_dtype=bf16"],
        "parallel.reduce_dtype=bf16 must be fp32 with engine=megatron_core, which sums gradients in fp32",
    ),
    "messages in 8 bits": (
        ["parallel.pipeline=2", "parallel.compress=int8"],
        "parallel.compress=int8 must be none with engine=megatron_core, which sends activations as they are",
    ),
    "another family": (
        ["model=mamba-tiny", "model.layers=4"],
        "model.family=mamba must be gpt, bert or t5 with engine=megatron_core; engine=tdpp trains all families",
    ),
    "latent attention in tensor groups": (
        ["+engine.options.multi_latent_attention=true", "parallel.tensor=2"],
        "parallel.tensor=2 must be 1 with engine.options.multi_latent_attention=true, whose tensor groups do not sum",
    ),
    "latent attention of BERT": (
        ["+engine.options.multi_latent_attention=true", "model=bert-tiny"],
        "model.family=bert must be gpt with engine.options.multi_latent_attention=true",
    ),
    "T5 in stages": (
        ["model=t5-tiny", "parallel.pipeline=2"],
        "parallel.pipeline=2 must be 1 with engine=megatron_core and model.family=t5; engine=tdpp cuts it into stages",
    ),
    "T5 with shared heads": (
        ["model=t5-tiny", "model.num_query_groups=2"],
        "model.num_query_groups=2 must be null with engine=megatron_core and model.family=t5; engine=tdpp takes others",
    ),
    "BERT's tokens shared": (
        ["model=bert-tiny", "parallel.context=2"],
        "parallel.context=2 must be 1 with model.family=bert, whose tokens see those behind them, too",
    ),
    "BERT's angles": (
        ["model=bert-tiny", "model.position_embedding_type=rope", "model.rotary_base=500000"],
        "model.rotary_base=500000.0 must be 10000.0 with engine=megatron_core and model.family=bert; engine=tdpp",
    ),
    "lamb": (["train.optimizer=lamb"], "train.optimizer=lamb must be adamw or adam with engine=megatron_core"),
    "an average": (["train.ema=0.9"], "train.ema=0.9 must be null with engine=megatron_core; engine=tdpp has more"),
    "compiled": (["train.compile=true"], "train.compile=True must be false with engine=megatron_core"),
    "a rehearsal": (["executor.rehearse=virtual"], "executor.rehearse=virtual must be null with engine=megatron_core"),
    "experts of another engine": (
        ["model=mixtral-tiny", "engine=tdpp"],
        "model.experts=4 must be null with engine=tdpp; engine=megatron_core has experts",
    ),
    "options of another engine": (
        ["+engine.options.qk_layernorm=true", "engine=tdpp"],
        "engine.options.qk_layernorm is for Megatron-Core, but engine.kind=tdpp; use engine=megatron_core too",
    ),
    "options within options": (
        ["+engine.options.a.b=3"],
        "engine.options.a={'b': 3} must be a number, a text, true, false, null or a list of these",
    ),
    "expert without experts": (
        ["parallel.data=2", "parallel.expert=2"],
        "parallel.expert=2 must be 1 without model.experts",
    ),
    "expert and replicas": (
        ["model=mixtral-tiny", "parallel.data=2", "parallel.expert=4"],
        "parallel.expert=4 must be a divisor of data=2",
    ),
    "experts and tensor": (
        ["model=mixtral-tiny", "parallel.tensor=2"],
        "parallel.sequence_parallel=False must be true with model.experts and tensor=2",
    ),
    "context of tdpp's engine": (
        ["engine=tdpp", "parallel.context=2"],
        "parallel.context=2 must be 1 with engine=tdpp; engine=megatron_core has ranks that share sequences",
    ),
    "context and the sequence": (
        ["parallel.context=3", "model.sequence_length=32"],
        "model.sequence_length=32 must be a multiple of 6 with context=3, whose ranks take two pieces each; use 30 or",
    ),
    "context, tensor and the sequence": (
        ["parallel.context=2", "parallel.tensor=4", "parallel.sequence_parallel=true", "model.sequence_length=20"],
        "model.sequence_length=20 must be a multiple of 8 with context=2, whose ranks take two pieces each; use 16 or",
    ),
    "context and shares": (
        ["parallel.context=2", "parallel.data=2", "parallel.shares=3-1", "parallel.global_batch_size=8"],
        "parallel.shares=3-1 cannot be combined with parallel.context=2; use parallel.shares=null",
    ),
    "context and the batch": (
        ["parallel.context=2", "parallel.data=3", "parallel.global_batch_size=8", "parallel.micro_batch_size=1"],
        "parallel.global_batch_size=8 is not divisible by parallel.data * parallel.micro_batch_size = 3 * 1 = 3",
    ),
    "context and the ranks": (
        ["parallel.context=2", "parallel.data=2", "cluster=local", "cluster.groups.local.gpus_per_node=2"],
        "parallel.tensor * parallel.data * parallel.pipeline * parallel.context = 1 * 2 * 1 * 2 = 4 ranks",
    ),
    "too few experts": (
        ["model=mixtral-tiny", "model.experts_per_token=5"],
        "model.experts_per_token=5 must be at most model.experts=4",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_it_cannot_do_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([*CORE, *words])
    assert message in str(refused.value)


def test_a_rank_refuses_the_same_in_a_plan() -> None:
    words = ["model=mixtral-tiny", "parallel.data=2", "parallel.expert=2", "+engine.options.moe_z_loss_coeff=0.001"]
    plan = make_plan(compose([*CORE, *words]), "test/run")
    content = plan.as_json()
    assert (content["engine"], content["expert"]) == ("megatron_core", 2)
    assert content["engine_options"] == {"moe_z_loss_coeff": 0.001}
    assert Plan.parse(content, plan.folder) == plan
    shared = make_plan(compose([*CORE, "parallel.data=2", "parallel.context=2"]), "test/run")
    assert (shared.data, shared.context, len(shared.ranks), len(shared.micro_batches)) == (4, 2, 4, 2)
    assert [shared.taken_by(0, rank) for rank in range(4)] == [shared.taken_by(0, rank // 2 * 2) for rank in range(4)]
    with pytest.raises(PlanFault, match="data=4 must be a multiple of context=3"):
        Plan.parse({**shared.as_json(), "context": 3}, plan.folder)
    for change, message in (
        ({"shares": [5, 3]}, "shares=\\[5, 3\\] must be null with engine=megatron_core"),
        ({"engine": "tdpp"}, "model.experts=4 must be null with engine=tdpp"),
        ({"engine": "deepspeed"}, "engine='deepspeed' must be tdpp or megatron_core or megatron_lm"),
        ({"expert": 3}, "expert=3 must be a divisor of data=2"),
    ):
        with pytest.raises(PlanFault, match=message):
            Plan.parse({**content, **change}, plan.folder)
