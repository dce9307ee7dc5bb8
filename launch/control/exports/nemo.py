"""A plan as assignments to a recipe of NeMo 2.

Source: nemo/lightning/pytorch/strategies/megatron_strategy.py, nemo/collections/llm/recipes and
scripts/performance/llm/pretrain_deepseek_v3.py of NeMo (September 2025). The strategy hands the layout to
Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.experiment import Precision, Recompute
from fasop.search.plan import Plan
from megatron_ext.contract.layout import megatron_layout

_PRECISIONS = {
    Precision.fp32: ('run.Config(MegatronMixedPrecision, precision="32")', "torch.float32"),
    Precision.bf16: ("bf16_mixed()", "torch.bfloat16"),
    Precision.fp16: ("fp16_mixed()", "torch.float16"),
}
"""The plugin, and the type of messages between stages."""


def faults(plan: Plan) -> Iterator[str]:
    """Yields what a recipe cannot say of a plan: its trainer has one number of GPUs for all nodes."""
    sizes = {node.name: node.gpus for node in plan.nodes}
    if len({*sizes.values()}) > 1:
        nodes = ", ".join(f"{name} has {gpus}" for name, gpus in sizes.items())
        yield (
            f"nodes with unequal numbers of GPUs ({nodes}): NeMo's trainer.devices is one number; give "
            f"cluster.groups.{max(sizes, key=sizes.__getitem__)}.gpus_per_node={min(sizes.values())}"
        )


def text(plan: Plan) -> str:
    """Returns lines of Python that change a recipe, such as `recipe = llm.llama3_8b.pretrain_recipe()`."""
    parallel, again = plan.parallel, plan.parallel.recompute
    full = again.way is Recompute.full
    strategy = {
        "tensor_model_parallel_size": parallel.tensor_size,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.chunks if parallel.chunks > 1 else None,
        "pipeline_model_parallel_layout": megatron_layout(plan.partition.layers, parallel.pipeline),
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence_parallel,
        "ddp.use_distributed_optimizer": parallel.sharded_optimizer,
    }
    recompute = {
        "recompute_granularity": None if again.way is Recompute.none else str(again.way),
        "recompute_method": ("block" if again.layers else "uniform") if full else None,
        "recompute_num_layers": (again.layers or 1) if full else None,
    }
    values = {
        "trainer.num_nodes": len(plan.nodes),
        "trainer.devices": plan.nodes[0].gpus,
        **{f"trainer.strategy.{name}": value for name, value in strategy.items()},
        "optim.config.use_distributed_optimizer": parallel.sharded_optimizer,
        **{f"model.config.{name}": value for name, value in recompute.items()},
        "data.micro_batch_size": parallel.micro_batch_size,
        "data.global_batch_size": parallel.global_batch_size,
        "data.seq_length": plan.training.model.sequence_length,
    }
    plugin, messages = _PRECISIONS[plan.training.precision]
    return "\n".join(
        [
            f"recipe.trainer.plugins = {plugin}",
            f"recipe.trainer.strategy.pipeline_dtype = {messages}",
            *(f"recipe.{name} = {value!r}" for name, value in values.items()),
        ]
    )
