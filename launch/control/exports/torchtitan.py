"""A plan as lines for a configuration of torchtitan 0.3.

Source: torchtitan/config/configs.py, torchtitan/distributed/pipeline_parallel.py and
torchtitan/models/llama3/config_registry.py of torchtitan 0.3. Its sharded data parallelism keeps the weights of a
pipeline's stages after the forward pass (`fsdp_reshard_after_forward`), which costs what tdpp's sharded optimizer does:
gradients are summed into parts, weights gathered once in an iteration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conf.schema.experiment import Precision, Recompute
from fasop.costs.training import Training
from fasop.search.plan import Plan
from megatron_ext.contract.models.counts import experts_of
from megatron_ext.contract.models.keys import RMS_NORM
from megatron_ext.contract.parallel_config import Schedule

ONLY: Mapping[str, str] = {"parallel.sharded_optimizer": "true"}
_SCHEDULES = {Schedule.one_f_one_b: "1F1B", Schedule.interleaved: "Interleaved1F1B"}
_DTYPES = {Precision.fp32: "float32", Precision.bf16: "bfloat16"}


def model_faults(training: Training) -> Iterator[str]:
    """Yields what torchtitan's decoders are not."""
    model = training.model
    if (experts := experts_of(model)) is not None:
        yield f"model.experts={experts}: export=torchtitan writes no experts"
    llama = {"position_embedding_type": "rope", "normalization": RMS_NORM, "swiglu": True, "add_bias_linear": False}
    for key, must in llama.items():
        if (value := getattr(model, key)) != must:
            yield f"model.{key}={_word(value)}: torchtitan's decoders are Llama's, with {key}={_word(must)}"


def sizes(training: Training) -> Mapping[str, tuple[int, ...]]:
    """Returns one stage for a model whose embedding and head share weights, which torchtitan takes in no pipeline."""
    return {} if training.model.untie_embeddings_and_output_weights else {"pipeline": (1,)}


def faults(plan: Plan) -> Iterator[str]:
    """Yields what torchtitan cannot run of a plan."""
    parallel, model = plan.parallel, plan.training.model
    if plan.training.precision is Precision.bf16 and parallel.data == 1:
        yield (
            "parallel.data=1 with train.precision=bf16: torchtitan's mixed precision needs replicas; give "
            "parallel.data=2 or more, or train.precision=fp32"
        )
    if parallel.pipeline > 1 and not model.untie_embeddings_and_output_weights:
        yield (
            f"parallel.pipeline={parallel.pipeline} with model.untie_embeddings_and_output_weights=false: torchtitan "
            f"ties weights within one stage only; use parallel.pipeline=1"
        )
    if 0 in plan.partition.layers[1:-1]:
        yield (
            f"parallel.partition={plan.partition}: torchtitan's optimizer needs weights in every stage; give a "
            f"smaller parallel.pipeline, or parallel.schedule=one_f_one_b"
        )
    if parallel.recompute.layers is not None:
        yield f"parallel.recompute={parallel.recompute}: torchtitan recomputes all layers or none; use full or none"


def stages(layers: tuple[int, ...]) -> list[list[str]]:
    """Returns the names of the modules of each (virtual) stage."""
    found, done = list[list[str]](), 0
    for count in layers:
        found.append([f"layers.{layer}" for layer in range(done, done + count)])
        done += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def text(plan: Plan) -> str:
    """Returns lines of Python that change the `config` of a function in config_registry.py."""
    parallel = plan.parallel
    own = parallel.global_batch_size // parallel.data
    names = ["[", *(f"        {stage}," for stage in stages(plan.partition.layers)), "    ]"]
    degrees = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": parallel.data,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": parallel.tensor_size,
        "enable_sequence_parallel": parallel.sequence_parallel,
        "pipeline_parallel_degree": parallel.pipeline,
        "pipeline_parallel_schedule": _SCHEDULES[parallel.schedule],
        "pipeline_parallel_microbatch_size": parallel.micro_batch_size,
    }
    training = {
        "local_batch_size": own if parallel.pipeline > 1 else parallel.micro_batch_size,
        "global_batch_size": parallel.global_batch_size,
        "seq_len": plan.training.model.sequence_length,
        "mixed_precision_param": _DTYPES[plan.training.precision],
    }
    full = parallel.recompute.way is Recompute.full
    return "\n".join(
        [
            *(f"config.training.{name} = {value!r}" for name, value in training.items()),
            f"config.activation_checkpoint = {'FullAC.Config()' if full else 'None'}",
            "config.parallelism = ParallelismConfig(",
            *(f"    {name}={value!r}," for name, value in degrees.items()),
            *([f"    module_fqns_per_model_part={chr(10).join(names)},"] if parallel.pipeline > 1 else []),
            ")",
        ]
    )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
