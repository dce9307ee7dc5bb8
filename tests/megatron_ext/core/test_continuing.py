"""Megatron-Core's own loader continues from what `tdpp checkpoint convert --to megatron` writes, in any layout.

make test-megatron
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import cli
from megatron_ext.checkpoints import tensors
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, MODELS, SINGLE
from tests.support.megatron_ext.engine_run import make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

MIXTRAL = (*MODELS["llama"], "model.experts=4")
EXPERT = ("parallel.data=2", "parallel.expert=2")
CASES = {
    "tdpp to sharded": (MODELS["gpt2"], (), (MEGATRON, *LAYOUTS["all"])),
    "sharded to uneven": (MODELS["llama"], (MEGATRON, *LAYOUTS["all"]), (MEGATRON, *LAYOUTS["uneven"])),
    "uneven to interleaved": (MODELS["gpt2"], (MEGATRON, *LAYOUTS["uneven"]), (MEGATRON, *LAYOUTS["interleaved"])),
    "bf16": (
        (*MODELS["llama"], "train.precision=bf16"),
        (MEGATRON, *LAYOUTS["tensor"]),
        (MEGATRON, *LAYOUTS["data"]),
    ),
    "fp16": (
        (*MODELS["gpt2"], "train.precision=fp16", "parallel.global_batch_size=4"),
        (MEGATRON, *LAYOUTS["sharded"]),  # whose replicas overflow later than one process
        (MEGATRON, *LAYOUTS["sharded"]),
    ),
    "experts": (MIXTRAL, (MEGATRON, *SINGLE), (MEGATRON, *SINGLE, "parallel.pipeline=2")),
    "experts shared out": (
        MIXTRAL,
        (MEGATRON, *SINGLE, *EXPERT),
        (MEGATRON, *SINGLE, *EXPERT, "parallel.tensor=2", "parallel.sequence_parallel=true"),
    ),
}
"""The model, the layout of the run that is converted, and that of the one that continues."""


def loaded_by_megatron_core(folder: Path) -> Any:
    """Loads a rank's chunks and optimizer as Megatron-LM's load_checkpoint does."""

    def load(_checkpoint: object, _plan: object, engine: Any) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Sharded

        take = Sharded._set_main_param_and_optimizer_states

        def without_step(own: Any, parameter: Any, tensors: dict[str, Any]) -> None:
            """Torch's Adam counts by parameter, which the sharded optimizer knows of groups alone."""
            step = own._get_main_param_and_optimizer_states(parameter)["step"]
            take(own, parameter, {**tensors, "step": step})

        Sharded._set_main_param_and_optimizer_states = without_step
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        chunks = engine._models
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
        optimizer = engine.optimizer.inner
        engine.optimizer._make_moments(1)  # without which the sharded one cannot ask for torch's Adam's
        state["optimizer"] = optimizer.sharded_state_dict(
            state["model"] if len(chunks) == 1 else state, is_loading=True, metadata=metadata
        )
        found = dist_checkpointing.load(state, str(folder))
        for name, chunk in zip(names, chunks, strict=True):
            chunk.load_state_dict(found.get(name, {}))  # which has none of an empty stage
        optimizer.load_state_dict(found["optimizer"])
        for one in engine.optimizer._optimizers:
            for state in one.optimizer.state.values():
                state["step"] = state["step"].clone()  # the sharded one gives all parameters of torch's Adam the same
        assert found["opt_param_scheduler"]["num_steps"] == found["iteration"] * engine._plan.global_batch_size
        engine.optimizer.updates = int(optimizer.param_groups[0]["step"])  # from which the learning rate follows

    return load


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_run_that_was_not_stopped(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, begin, end = CASES[case]
    stop = 22 if case == "fp16" else 2  # until its scale has come down
    words = (*model, *SINGLE, f"train.lr_decay_iterations={stop + 2}", f"train.iterations={stop + 2}")
    whole = make_run(tmp_path / "whole", corpus, *words, *end)
    assert whole.go() == 0, whole.stderr()
    run = make_run(tmp_path / "run", corpus, *words, f"train.iterations={stop}", "train.samples=null", *begin)
    assert run.go() == 0, run.stderr()
    folder = tmp_path / "megatron"
    assert cli.main(["checkpoint", "convert", str(run.run.path), str(folder), "--to", "megatron"]) == 0
    monkeypatch.setattr(tensors, "load", loaded_by_megatron_core(folder / f"iter_{stop:07d}"))
    run = run.replan(*words, *end)
    assert run.go() == 0, run.stderr()
    rounded = 1e-3 if case in ("bf16", "fp16") else 1e-5
    np.testing.assert_allclose(run.losses()[-2:], whole.losses()[-2:], rtol=0, atol=rounded)
