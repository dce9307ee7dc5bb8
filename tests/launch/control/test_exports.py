"""`tdpp search export=`: what torchtitan, Megatron-LM, FlagScale and NeMo take of a plan says what the plan says."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
from collections.abc import Sequence
from dataclasses import make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf.schema.values.partition import Partition
from fasop.search.arguments import ExportFormat, parse
from fasop.search.inputs import read
from fasop.search.plan import Plan
from fasop.search.run import best_plans
from launch.cli import main
from launch.control.exports.formats import FORMATS, exported, limited, with_limits

LLAMA = ("cluster=a100x1_a10x7", "cluster.groups.gpu2.count=3", "model=llama-7b", "parallel.global_batch_size=32")
GPT = ("cluster=a100x1_a10x7", "cluster.groups.gpu2.count=1", "model=small", "parallel.global_batch_size=16")

MIXTRAL = (*GPT[:2], "model=mixtral-tiny", "engine=megatron_core", "parallel.global_batch_size=16")


def found(name: ExportFormat, *words: str) -> Plan:
    args = parse([*words, "top=1", "leave_out=false"])
    return best_plans(limited(name, read(with_limits(name, args.overrides))), args).plans[0]


def text(name: ExportFormat, plan: Plan) -> str:
    return exported(name, plan, "tdpp search ...")


def bash_words(array: str) -> list[str]:
    """The arguments, as bash reads them."""
    script = f'{array}\nprintf "%s\\n" "${{PLAN[@]}}"'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def layers_of(modules: Sequence[Sequence[str]]) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in modules]


INTERLEAVED = ("train.precision=bf16", "parallel.schedule=interleaved", "parallel.pipeline=4", "parallel.chunks=2")
CASES = [
    pytest.param(("train.precision=bf16", "parallel.schedule=one_f_one_b", "parallel.pipeline=4"), id="uneven-stages"),
    pytest.param((*INTERLEAVED, "parallel.recompute=full"), id="interleaved-recomputed"),
    pytest.param(("parallel.tensor=4", "parallel.sequence_parallel=true", "train.precision=bf16"), id="tensor"),
]


@pytest.mark.parametrize("words", CASES)
def test_megatron_core_reads_the_layout_of_the_plan(words: tuple[str, ...]) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    kinds = pytest.importorskip("megatron.core.transformer.enums").LayerType
    plan = found(ExportFormat.megatron, *LLAMA, *words)
    given = bash_words(text(ExportFormat.megatron, plan))
    options = dict(pairwise(given))
    parallel = plan.parallel
    assert int(options["--tensor-model-parallel-size"]) == parallel.tensor_size
    assert int(options["--pipeline-model-parallel-size"]) == parallel.pipeline
    assert int(options["--micro-batch-size"]) == parallel.micro_batch_size
    assert int(options["--global-batch-size"]) == parallel.global_batch_size
    assert ("--sequence-parallel" in given) == parallel.sequence_parallel
    assert ("--use-distributed-optimizer" in given) == parallel.sharded_optimizer
    assert options.get("--recompute-granularity", "none") == parallel.recompute.way
    assert "--bf16" in given
    if parallel.pipeline == 1:
        return
    layout = layouts.PipelineParallelLayerLayout(options["--pipeline-model-parallel-layout"], parallel.pipeline)
    layout.validate_layer_layout(plan.training.model.layers, 0)
    by_part = [layout.layout[part % parallel.pipeline][part // parallel.pipeline] for part in range(len(by(plan)))]
    assert [stage.count(kinds.decoder) for stage in by_part] == by(plan)


def by(plan: Plan) -> list[int]:
    return [*plan.partition.layers]


TORCHTITAN_FIELDS = [
    *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
    *("tensor_parallel_degree", "enable_sequence_parallel", "pipeline_parallel_degree"),
    *("pipeline_parallel_schedule", "pipeline_parallel_microbatch_size"),
    ("module_fqns_per_model_part", Any, None),
]
"""Fields of ParallelismConfig in torchtitan 0.3 (torchtitan/config/configs.py)."""


def torchtitan_parallelism() -> type:
    """Torchtitan's own class where it is installed, else one with its fields."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or spec.origin is None:
        return make_dataclass("ParallelismConfig", TORCHTITAN_FIELDS)
    file = Path(spec.origin).parent / "config" / "configs.py"  # the package itself needs a GPU's libraries
    parallelism: type = runpy.run_path(str(file))["ParallelismConfig"]
    return parallelism


@pytest.mark.parametrize("words", CASES)
def test_torchtitan_reads_the_stages_of_the_plan(words: tuple[str, ...]) -> None:
    plan = found(ExportFormat.torchtitan, *LLAMA, *words)
    config = SimpleNamespace(training=SimpleNamespace())
    full = SimpleNamespace(Config=lambda: "full")
    exec(  # a user pastes it so
        text(ExportFormat.torchtitan, plan),
        {"config": config, "ParallelismConfig": torchtitan_parallelism(), "FullAC": full},
    )
    own, parallel = config.parallelism, plan.parallel
    ranks = own.data_parallel_replicate_degree * own.data_parallel_shard_degree * own.tensor_parallel_degree
    assert ranks * own.pipeline_parallel_degree == parallel.world_size
    assert own.tensor_parallel_degree == parallel.tensor_size
    assert own.enable_sequence_parallel == parallel.sequence_parallel
    assert own.pipeline_parallel_schedule == ("Interleaved1F1B" if parallel.chunks > 1 else "1F1B")
    passes = config.training.local_batch_size // own.pipeline_parallel_microbatch_size
    if parallel.pipeline > 1:
        names = own.module_fqns_per_model_part
        layers = plan.training.model.layers
        assert layers_of(names) == by(plan)
        every = ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "lm_head"]
        assert [name for stage in names for name in stage] == every
        assert passes * own.pipeline_parallel_microbatch_size * parallel.data == parallel.global_batch_size
    assert config.training.global_batch_size == parallel.global_batch_size
    assert config.activation_checkpoint == ("full" if parallel.recompute.way == "full" else None)


def test_flagscale_has_a_mesh_for_each_kind_of_gpu() -> None:
    """The rules are those of `pre_validate_args` in its flagscale/train/arguments.py."""
    plan = found(ExportFormat.flagscale, *LLAMA, "train.precision=bf16", "parallel.pipeline=4")
    config: Any = OmegaConf.create(text(ExportFormat.flagscale, plan))
    hetero, parallel = config.system.hetero, plan.parallel
    meshes = [hetero.hetero_process_meshes[at : at + 5] for at in range(0, len(hetero.hetero_process_meshes), 5)]
    assert len(meshes) == len(hetero.hetero_device_types) == 2
    assert sum(mesh[-1] for mesh in meshes) == config.system.pipeline_model_parallel_size == parallel.pipeline
    assert [tuple(mesh[:4]) for mesh in meshes] == [(parallel.tensor_size, 1, 1, parallel.data)] * 2
    assert [*hetero.hetero_pipeline_layer_split] == by(plan)
    assert sum(hetero.hetero_pipeline_layer_split) == config.model.num_layers
    ranks = [gpu for gpu, mesh in zip(hetero.hetero_device_types, meshes, strict=True) for _ in range(mesh[-1])]
    each = parallel.tensor_size * parallel.data
    assert [gpu for gpu in ranks for _ in range(each)] == [n.group.gpu for n in plan.nodes for _ in range(n.gpus)]
    assert hetero.hetero_current_device_type in hetero.hetero_device_types


def test_a_mesh_cannot_come_back_or_mix_kinds() -> None:
    plan = found(ExportFormat.flagscale, *LLAMA, "train.precision=bf16", "parallel.pipeline=4")
    faults = FORMATS[ExportFormat.flagscale].faults
    assert [*faults(plan)] == []
    (alone,) = [node for node in plan.nodes if node.name == "hgx"]
    first, *others = [node for node in plan.nodes if node.name != "hgx"]
    between = replace(plan, nodes=[first, alone, *others])
    assert "must follow each other" in next(faults(between))
    assert any("a mesh of FlagScale has GPUs of one type" in fault for fault in faults(replace_data(plan)))


def replace_data(plan: Plan) -> Plan:
    """The same nodes with all ranks in one stage."""
    own = plan.training.parallel
    one = replace(own, data=own.data * own.pipeline, pipeline=1, partition=(plan.training.model.layers,))
    return replace(plan, training=replace(plan.training, parallel=one), partition=Partition(one.partition or ()))


def test_a_recipe_of_nemo_has_the_plan() -> None:
    plan = found(ExportFormat.nemo, *LLAMA, *INTERLEAVED)
    recipe = SimpleNamespace(
        trainer=SimpleNamespace(strategy=SimpleNamespace(ddp=SimpleNamespace())),
        optim=SimpleNamespace(config=SimpleNamespace()),
        model=SimpleNamespace(config=SimpleNamespace()),
        data=SimpleNamespace(),
    )
    names = {"recipe": recipe, "bf16_mixed": lambda: "bf16", "torch": SimpleNamespace(bfloat16="bf16")}
    exec(text(ExportFormat.nemo, plan), names)
    strategy, parallel = recipe.trainer.strategy, plan.parallel
    assert recipe.trainer.num_nodes * recipe.trainer.devices == parallel.world_size
    assert strategy.tensor_model_parallel_size == parallel.tensor_size
    assert strategy.pipeline_model_parallel_size == parallel.pipeline
    assert strategy.virtual_pipeline_model_parallel_size == parallel.chunks
    parts = strategy.pipeline_model_parallel_layout.split("|")
    counted = [int(part.strip("EL").removeprefix("t*") or 0) for part in parts]
    assert counted == by(plan)
    assert (recipe.data.micro_batch_size, recipe.data.global_batch_size) == (
        parallel.micro_batch_size,
        parallel.global_batch_size,
    )
    assert recipe.trainer.plugins == strategy.pipeline_dtype == "bf16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export=torchtitan"], "model.position_embedding_type=learned_absolute: torchtitan's decoders are Llama's"),
        (["export=torchtitan", "model=llama-7b", "train.precision=fp16"], "train.precision=fp16: torchtitan has fp32"),
        (["export=nemo", "model=bert-base"], "model.family=bert: export=nemo writes GPTs; leave export=nemo out"),
        (["export=nemo", "cluster.groups.gpu2.gpus_per_node=2"], "trainer.devices is one number; give cluster.groups."),
        (
            ["export=megatron", "engine=tdpp"],
            "export=megatron writes plans with engine=megatron_core only",
        ),
        (["export=flagscale", "parallel.schedule=interleaved"], "with parallel.schedule=one_f_one_b only"),
        (["export=megatron", "model=llama-7b", "model.add_qkv_bias=true"], "model.add_qkv_bias=true: export=megatron"),
        (["export=megatron", "+engine.options.qk_layernorm=true"], "engine.options.qk_layernorm: export=megatron does"),
        (
            ["export=torchtitan", "model=mixtral-tiny"],
            "model.experts=4: export=torchtitan writes no experts; use export=",
        ),
        (
            ["export=flagscale", "model=mixtral-tiny"],
            "model.experts=4: export=flagscale writes no experts; use export=",
        ),
        (["export=jax"], "export=jax must be torchtitan, megatron, flagscale, nemo"),
        (["export=nemo", "start=now"], "it does not take export"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_what_a_format_cannot_say_is_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["search", *GPT, "leave_out=false", "top=1", *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("error:") == 1


def test_torchtitan_gets_no_empty_stage_and_no_pipeline_of_tied_weights() -> None:
    plan = found(ExportFormat.torchtitan, *LLAMA, "train.precision=bf16")
    assert 0 not in plan.partition.layers[1:-1]
    tied = found(ExportFormat.torchtitan, *LLAMA, "model=llama-1b", "train.precision=bf16")
    assert tied.parallel.pipeline == 1


def test_the_command_prints_the_plan_that_it_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.yaml"
    assert main(["search", *GPT, "top=2", "leave_out=false", "export=megatron", f"plan={file}"]) == 0
    said = capsys.readouterr().out
    array = said[said.index("# Found by") :].partition("\n)")[0] + "\n)"
    words = bash_words(array)
    saved = OmegaConf.load(file)
    assert words[words.index("--pipeline-model-parallel-size") + 1] == str(saved.pipeline)
    assert words[words.index("--micro-batch-size") + 1] == str(saved.micro_batch_size)


def test_megatron_lm_balances_experts_as_the_engine_does() -> None:
    plan = found(ExportFormat.megatron, *MIXTRAL)
    options = dict(pairwise(bash_words(text(ExportFormat.megatron, plan))))
    expected = ("4", "2", "0.01")
    names = ("--num-experts", "--moe-router-topk", "--moe-aux-loss-coeff")
    assert tuple(options[name] for name in names) == expected
