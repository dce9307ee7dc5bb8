"""A training continues from what Megatron-Core's own `dist_checkpointing.save` wrote, in any layout and either engine.

make test-megatron
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import cli
from megatron_ext.checkpoints.foreign import torch_dist
from megatron_ext.train import Training
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, MODELS, SINGLE, arguments_of, saves_alone
from tests.support.megatron_ext.engine_run import make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

MIXTRAL = (*MODELS["llama"], "model.experts=4", MEGATRON)
FILLED = "model.vocab_multiple=64"
"""Has a tied embedding fill its bucket; otherwise megatron.core saves a wrong state (below)."""
EXPERT = ("parallel.data=2", "parallel.expert=2")
CASES = {
    "sharded to tdpp": (MODELS["gpt2"], LAYOUTS["all"], LAYOUTS["uneven"]),
    "interleaved to tensor": (MODELS["gpt2"], LAYOUTS["interleaved"], (MEGATRON, *LAYOUTS["tensor"])),
    "uneven to sharded": (MODELS["llama"], LAYOUTS["uneven"], (MEGATRON, *LAYOUTS["sharded"])),
    "tensor to tdpp's data": (MODELS["llama"], LAYOUTS["tensor"], LAYOUTS["data"]),
    "bf16": ((*MODELS["llama"], "train.precision=bf16"), LAYOUTS["data"], (MEGATRON, *LAYOUTS["tensor"])),
    "bf16, sharded": ((*MODELS["gpt2"], "train.precision=bf16"), LAYOUTS["sharded"], LAYOUTS["single"]),
    "fp16": (
        (*MODELS["gpt2"], "train.precision=fp16", "parallel.global_batch_size=4"),
        LAYOUTS["sharded"],  # whose replicas overflow later than one process
        (MEGATRON, *LAYOUTS["sharded"]),
    ),
    "experts": (MIXTRAL, SINGLE, (*SINGLE, "parallel.pipeline=2")),
    "experts shared out": (
        MIXTRAL,
        (*SINGLE, *EXPERT),
        (*SINGLE, "parallel.tensor=2", "parallel.sequence_parallel=true"),
    ),
    "experts shared out, chained": (MIXTRAL, (*SINGLE, *EXPERT), SINGLE),
    "experts shared out, sharded": (
        MIXTRAL,
        (*SINGLE, *EXPERT, "parallel.sharded_optimizer=true"),
        (*SINGLE, *EXPERT),
    ),
}
"""The model, the layout of the run that megatron.core saves, and that of the one that continues."""


def saved_by_megatron_core(
    folder: Path, args: Namespace, metadata: dict[str, Any] | None = None
) -> Callable[[Training], tuple[int, bool]]:
    """Trains, and saves as Megatron-LM's save_checkpoint does."""
    run = Training.run

    def trained(training: Training) -> tuple[int, bool]:
        ended = run(training)
        from megatron.core import dist_checkpointing, parallel_state

        engine: Any = training._engine
        plan = training._plan
        kind = {"distrib_optim_sharding_type": "fully_reshardable"} if plan.sharded_optimizer else {}
        content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **kind, **(metadata or {})}
        group = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        chunks = engine._models
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": ended[0]}
        for name, chunk in zip(names, chunks, strict=True):
            state[name] = chunk.sharded_state_dict(metadata={**content, **group})
        state["optimizer"] = engine.optimizer.inner.sharded_state_dict(
            state["model"] if len(chunks) == 1 else state, metadata={**content, **group}
        )
        args.consumed_train_samples = engine.consumed(ended[0])
        inner = folder / f"iter_{ended[0]:07d}"
        inner.mkdir(parents=True, exist_ok=True)
        with saves_alone():
            dist_checkpointing.save(state, str(inner), content_metadata=content)
        (folder / torch_dist.TRACKER).write_text(str(ended[0]))
        return ended

    return trained


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_run_that_was_not_stopped(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model, begin, end = CASES[case]
    stop = 22 if case == "fp16" else 2  # until its scale has come down
    words = (*model, *SINGLE, FILLED, f"train.lr_decay_iterations={stop + 2}", f"train.iterations={stop + 2}")
    whole = make_run(tmp_path / "whole", corpus, *words, *end)
    assert whole.go() == 0, whole.stderr()
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    with monkeypatch.context() as patched:
        # of a chain of optimizers, each with a prefix, as before megatron.core 0.14
        metadata = {"chained_optim_avoid_prefix": False} if "chained" in case else None
        patched.setattr(Training, "run", saved_by_megatron_core(theirs, arguments_of(*model), metadata))
        words = (*words, "train.samples=null")
        run = make_run(tmp_path / "run", corpus, *words, *begin, MEGATRON, f"train.iterations={stop}")
        assert run.go() == 0, run.stderr()
    assert any(name.startswith("chained_1.") for name in torch_dist.read_index(theirs)) == ("chained" in case)
    assert cli.main(["checkpoint", "convert", str(theirs), str(ours), "--to", "tdpp"]) == 0
    run = make_run(tmp_path / "more", corpus, *words, *end, f"train.load={ours}")
    assert run.go() == 0, run.stderr()
    rounded = 1e-3 if case.startswith(("bf16", "fp16")) else 1e-5
    assert len(run.losses()) == 2
    np.testing.assert_allclose(run.losses(), whole.losses()[-2:], rtol=0, atol=rounded)


def save(folder: Path, corpus: Path, *words: str, metadata: dict[str, Any] | None = None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Training, "run", saved_by_megatron_core(folder, arguments_of(*MODELS["gpt2"]), metadata))
        run = make_run(folder.with_name(f"{folder.name}-run"), corpus, *SINGLE, "train.iterations=2", *words, MEGATRON)
        assert run.go() == 0, run.stderr()


def refused(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message with which a conversion ends that leaves nothing."""
    assert cli.main(["checkpoint", "convert", str(folder), str(out), "--to", "tdpp"]) == 1
    assert not list(out.parent.glob(f"*{out.name}*"))
    said = capsys.readouterr().err
    assert said.startswith("tdpp: error: ") and said.count("\n") == 1
    return said


def test_a_state_that_follows_from_a_layout_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "dp_reshardable"  # what Megatron-LM saves unless it is asked for another one
    metadata = {"distrib_optim_sharding_type": kind}
    words = (*MODELS["gpt2"], "parallel.data=2", "parallel.sharded_optimizer=true")
    save(tmp_path / "theirs", corpus, *words, metadata=metadata)
    said = refused(tmp_path / "theirs", tmp_path / "ours", capsys)
    assert kind in said and "--dist-ckpt-optim-fully-reshardable" in said and "train.load=" in said


def test_a_state_that_megatron_core_saved_wrongly_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts the padding behind a tied embedding's bucket where there is none."""
    save(tmp_path / "theirs", corpus, *MODELS["gpt2"], *LAYOUTS["all"])
    assert "are not the model's" in refused(tmp_path / "theirs", tmp_path / "ours", capsys)
