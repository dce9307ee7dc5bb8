"""What `tdpp profile engine=megatron_core` times is Megatron-Core's model, and a search takes it for that engine alone.

make test-megatron
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from conf.compose import compose
from conf.run_folder.rundir import RunDir
from conf.schema.experiment import EngineKind
from fasop.costs.memory.shared_state import parameter_bytes
from fasop.costs.profiles import files as profiles
from fasop.costs.training import Training
from launch.cli import main
from launch.control.planning.plan import make_plan
from megatron_ext.contract.plan import Plan
from megatron_ext.core.parts import ModelParts, tensor_group
from megatron_ext.families.tasks import task_of
from megatron_ext.measuring.kinds import CoreParts
from megatron_ext.measuring.passes import Parts, cut_off
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.support.megatron_ext.another_process import in_another_process

pytest.importorskip("megatron", reason="megatron-core is not installed")

CPU = torch.device("cpu")
SMALL = ("model.hidden=32", "model.heads=2", "model.layers=2", "model.sequence_length=16", "model.vocab_size=101")
LLAMA = (
    *("model.normalization=RMSNorm", "model.swiglu=true", "model.position_embedding_type=rope"),
    *("model.add_bias_linear=false", "model.num_query_groups=1", "model.untie_embeddings_and_output_weights=true"),
)


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Has a test be one rank of its own, whose groups are megatron.core's."""

    @wraps(test)
    def call(*, tmp_path: Path, **fixtures: Any) -> None:
        def work() -> None:
            timeout = timedelta(seconds=60)
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
            test(tmp_path=tmp_path, **fixtures)

        in_another_process(work, tmp_path / "found")

    return call


def _plan(folder: Path, *overrides: str) -> Plan:
    run = RunDir(folder)
    one = compose(
        ["parallel=single", *SMALL, "parallel.global_batch_size=2", "parallel.micro_batch_size=2", *overrides]
    )
    run.write_json(run.plan, make_plan(one, "test/run").as_json())
    return Plan.read(run.plan)


@alone
@pytest.mark.parametrize("model", {"GPT-2": (), "Llama": LLAMA}.items(), ids=lambda one: one[0])
def test_the_parts_together_are_the_model_that_tdpp_has_too(tmp_path: Path, model: tuple[str, tuple[str, ...]]) -> None:
    """The loss of the same micro-batch, with the weights with which both begin."""
    plan = _plan(tmp_path, "engine=megatron_core", *model[1])
    core = CoreParts(plan, plan.model, tensor_group(plan, 1), 2, CPU)
    own = Parts(plan, plan.model, TensorGroup(), 2, CPU)
    losses = []
    for parts in (core, own):
        wires: dict[str, torch.Tensor] = {}
        for part in range(len(parts._counts)):
            wires = parts._through(part, cut_off(wires))
        losses.append(wires["loss"].item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert core.updates().numel == own.updates().numel + (0 if model[1] else plan.model.padded_vocab_size * 32)


@alone
def test_what_is_kept_is_of_as_many_layers_as_there_are_and_no_weights(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "engine=megatron_core")
    core = CoreParts(plan, plan.model, tensor_group(plan, 1), 2, CPU)
    kept = core.kept_bytes()
    twice = CoreParts(plan, plan.model, tensor_group(plan, 1), 4, CPU).kept_bytes()
    assert twice["layer"] == 2 * kept["layer"]  # a weight would be there once
    assert kept["layer"] > 10 * 2 * 16 * 32 * 4  # of 16 tensors of a layer with its MLP
    core.forward_and_backward(2)
    assert core.laps.keys() == {
        f"{kind}.{way}" for kind in ("embedding", "layer", "head") for way in ("forward", "backward")
    }


@alone
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("precision", "copied"), [("fp32", False), ("bf16", True)])
def test_only_16_bit_weights_have_a_copy_in_fp32_as_the_search_counts(
    tmp_path: Path, precision: str, copied: bool, sharded: bool
) -> None:
    words = ("engine=megatron_core", f"train.precision={precision}")
    plan = replace(_plan(tmp_path, *words), sharded_optimizer=sharded)
    task = task_of(plan)
    optimizer = ModelParts(plan, plan.model, tensor_group(plan, 1), task).optimizer
    for name, parameter in optimizer._named.items():
        held = optimizer._held[name]
        assert held is not None
        own = held.main.untyped_storage().data_ptr() != parameter.tensor.untyped_storage().data_ptr()
        assert own is copied, name
    one = Training.of(compose(["parallel=single", *SMALL, *words]))
    each = parameter_bytes(replace(one, parallel=replace(one.parallel, sharded_optimizer=sharded)))
    assert each.optimizer == 8 + 4 * copied


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_search_for_this_engine_takes_its_profile_and_another_one_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], experts: bool
) -> None:
    """Tensor groups of two ranks, which share the sequence before experts, too."""
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    model = [*SMALL, *(LLAMA if experts else ()), *(["model.experts=2", "model.ffn_hidden=48"] if experts else [])]
    nodes = ["cluster.groups.local.gpus_per_node=2", "parallel.global_batch_size=4", "profile=mine", "top=1"]
    core = "engine=megatron_core"
    assert main(["profile", core, *model, *nodes[:1], "micro_batches=2", "seconds=0.02", "profile=mine"]) == 0
    written = profiles.read_profile("mine")
    assert written.engine is EngineKind.megatron_core
    assert "megatron-core" in written.versions
    assert [(one.tensor, one.micro_batch_size) for one in written.costs] == [(1, 2), (2, 2)]
    capsys.readouterr()
    assert main(["search", core, *model, *nodes]) == 0
    found = capsys.readouterr()
    assert "measured" in found.out
    assert "other engine" not in found.out + found.err
    assert main(["search", core, "+engine.options.moe_z_loss_coeff=0.1", *model, *nodes]) == 0
    assert "of engine=megatron_core, and this is engine=megatron_core engine.options.moe_z_loss_coeff=0.1" in (
        capsys.readouterr().err
    )
    if not experts:
        assert main(["search", *model, *nodes]) == 0
        found = capsys.readouterr()
        assert "other engine" in found.out
        assert "profile 'mine' of CPU has times of engine=megatron_core, and this is engine=tdpp" in found.err
        assert main(["profile", *model, "profile=mine", "add=true"]) == 1
        assert (
            "add=true: profile 'mine' has times of engine=megatron_core, not of engine=tdpp" in capsys.readouterr().err
        )
