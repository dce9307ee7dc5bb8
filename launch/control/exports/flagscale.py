"""A plan as the `system` and `model` of FlagScale's train configuration, with a mesh for each kind of GPU.

Source: flagscale/train/arguments.py, flagscale/train/hetero/parallel_context.py and examples/llama3/conf/train of
FlagScale (November 2025). A mesh is [tensor, context, expert, data, pipeline] of stages that follow each other. Ranks
are ordered by the type of their device, in the order of hetero_device_types, and then as they were started; so a type
cannot come back after another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from fasop.costs.training import Training
from fasop.search.plan import Plan
from launch.control.megatron_lm import Options, layout_options, model_options, precision_options
from megatron_ext.contract.models.counts import experts_of

ONLY: Mapping[str, str] = {"parallel.schedule": "one_f_one_b"}
"""Heterogeneous meshes have no virtual stages."""
_OF_MESHES = {"pipeline-model-parallel-layout"}
"""What is said by the meshes."""
_OF_MODEL = ("micro-batch-size", "global-batch-size")


def model_faults(training: Training) -> Iterator[str]:
    """Yields what cannot be said of a model: nothing is known of meshes with experts that differ."""
    if (experts := experts_of(training.model)) is not None:
        yield f"model.experts={experts}: export=flagscale writes no experts"


def faults(plan: Plan) -> Iterator[str]:
    """Yields what meshes cannot say of a plan."""
    types = [kind for kind, _ in groupby(_gpus(plan))]
    if len(types) != len(set(types)):
        yield (
            f"parallel.node_order={plan.parallel.node_order}: FlagScale orders ranks by the type of their GPU, so the "
            f"nodes of one type must follow each other"
        )
    for stage, kinds in enumerate(_kinds_by_stage(plan)):
        if len(set(kinds)) > 1:
            yield (
                f"parallel.data={plan.parallel.data}: stage {stage} lies on {' and '.join(dict.fromkeys(kinds))}, "
                f"but a mesh of FlagScale has GPUs of one type; give another parallel.data or parallel.tensor"
            )


def text(plan: Plan) -> str:
    """Returns YAML."""
    options = {**layout_options(plan.parallel, plan.partition.layers), **precision_options(plan.training.precision)}
    system = {name: value for name, value in options.items() if name not in (*_OF_MESHES, *_OF_MODEL)}
    recompute = {name: system.pop(name) for name in [*system] if name.startswith("recompute-")}
    model = {**model_options(plan.training.model), **{name: options[name] for name in _OF_MODEL}}
    types, meshes = [], list[int]()
    for kind, stages in groupby(kinds[0] for kinds in _kinds_by_stage(plan)):
        types.append(kind)
        meshes += [plan.parallel.tensor_size, plan.parallel.context, 1, plan.parallel.data, len([*stages])]
    return "\n".join(
        [
            "# Each node's hostfile line names its GPUs' type: type=" + " or type=".join(dict.fromkeys(types)),
            "system:",
            *_lines(system),
            "  hetero:",
            "    enable_hetero: true",
            f"    hetero_process_meshes: {meshes}",
            f"    hetero_device_types: [{', '.join(map(_quoted, types))}]",
            f"    hetero_current_device_type: {_quoted(types[0])}",
            f"    hetero_pipeline_layer_split: {[*plan.partition.layers]}",
            "    standalone_embedding_stage: false",
            *(["  recompute:", *_lines(recompute, 4)] if any(recompute.values()) else []),
            "model:",
            *_lines(model),
        ]
    )


def _gpus(plan: Plan) -> list[str]:
    """The kind of each rank's GPU."""
    return [node.group.gpu for node in plan.nodes for _ in range(node.gpus)]


def _kinds_by_stage(plan: Plan) -> list[list[str]]:
    kinds, each = _gpus(plan), plan.parallel.tensor_size * plan.parallel.data
    return [kinds[stage * each : (stage + 1) * each] for stage in range(plan.parallel.pipeline)]


def _lines(options: Options, indent: int = 2) -> list[str]:
    """Megatron's options as FlagScale has them: words joined by underscores."""
    return [
        f"{' ' * indent}{name.replace('-', '_')}: {'true' if value == '' else value}"
        for name, value in options.items()
        if value is not None
    ]


def _quoted(text: str) -> str:
    return f'"{text}"'
