"""Weights cross from a run of any layout to Megatron-Core and to Hugging Face, and from both to runs of any layout.

make test-megatron
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from launch import cli
from megatron_ext.contract.plan import Plan
from tests.support.megatron_ext.another_process import in_another_process
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, MODELS, saves_alone
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun, make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")

MIXTRAL = (*MODELS["llama"], "model.experts=4")
KINDS = {**MODELS, "mixtral": MIXTRAL}
SHORT = ("train.iterations=2", "train.lr=0.05", "train.min_lr=0.05")
BEGUN = {
    "gpt2": LAYOUTS["all"],
    "llama": LAYOUTS["interleaved"],
    "mixtral": (*LAYOUTS["data"], "parallel.expert=2", "parallel.pipeline=2", "parallel.partition=1-3"),
}
"""The layout of a run that is converted."""
ENDED = {
    "gpt2": LAYOUTS["uneven"],
    "llama": LAYOUTS["tensor"],
    "mixtral": (*LAYOUTS["sequence"], "parallel.data=2", "parallel.expert=2"),
}
"""Of one that begins with what was converted."""
TOKENS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EngineRun]:
    """A run of each model, which tests only read."""

    @cache
    def of(model: str) -> EngineRun:
        run = make_run(tmp_path_factory.mktemp("runs") / "run", corpus, MEGATRON, *KINDS[model], *BEGUN[model], *SHORT)
        assert run.go() == 0, run.stderr()
        return run

    return of


def converted(run: EngineRun, to: str, folder: Path) -> Path:
    assert cli.main(["checkpoint", "convert", str(run.run.path), str(folder), "--to", to]) == 0
    return folder


def a_model_of_theirs(plan: Plan, folder: Path) -> tuple[Any, Any]:
    """megatron.core's GPTModel by its own layers, and the state that it asks for."""
    from megatron_ext.core import library

    found = library.load(plan)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    from megatron_ext.core.families import family_of
    from megatron_ext.core.settings import make_groups, model_config

    make_groups(plan, timedelta(seconds=60))
    model = family_of(plan).make(model_config(plan, found), found, 0).eval()
    return model, model.sharded_state_dict()


def logits(plan: Plan, saved: Path, folder: Path) -> torch.Tensor:
    """Of TOKENS, by megatron.core's GPTModel with the weights that its dist_checkpointing reads."""
    model, state = a_model_of_theirs(plan, folder)
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(
        state, str(saved), strict=dist_checkpointing.validation.StrictHandling.RAISE_UNEXPECTED
    )
    model.load_state_dict({name: loaded[name] for name in state})  # it adds what is common
    with torch.no_grad():
        out: torch.Tensor = model(TOKENS, torch.arange(24).unsqueeze(0), None)
    return out[..., :VOCAB]


@pytest.mark.parametrize("model", KINDS)
def test_megatron_core_and_transformers_compute_the_same_of_a_run(
    trained: Callable[[str], EngineRun], tmp_path: Path, corpus: Path, model: str
) -> None:
    run = trained(model)
    single = make_run(tmp_path / "single", corpus, MEGATRON, *KINDS[model], *LAYOUTS["single"]).plan
    saved = converted(run, "megatron", tmp_path / "megatron") / "iter_0000002"
    found = in_another_process(lambda: logits(single, saved, tmp_path), tmp_path / "logits")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(converted(run, "huggingface", tmp_path / "theirs"))
    torch.testing.assert_close(found, theirs(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("model", "to"), [*product(KINDS, ("megatron", "huggingface")), ("mixtral", "tdpp")])
def test_a_run_of_another_layout_begins_with_the_weights(
    trained: Callable[[str], EngineRun], tmp_path: Path, corpus: Path, model: str, to: str
) -> None:
    """Its weights after an iteration that learns nothing are those of the first run."""
    run = trained(model)
    folder = converted(run, to, tmp_path / "folder")
    words = ("train.iterations=3", "train.lr=1e-30", "train.min_lr=1e-30", f"train.load={folder}")
    begun = make_run(tmp_path / "begun", corpus, MEGATRON, *KINDS[model], *ENDED[model], *words)
    assert begun.go() == 0, begun.stderr()
    found = begun.weights()
    for name, tensor in run.weights().items():
        assert torch.equal(found[name], tensor), name
    assert len(begun.losses()) == (1 if to == "tdpp" else 3)


def saved_by_megatron_core(plan: Plan, folder: Path, metadata: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    model, _ = a_model_of_theirs(plan, folder)
    from megatron.core import dist_checkpointing

    for number, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    (folder / "saved").mkdir()
    state = model.sharded_state_dict(metadata=metadata)
    with saves_alone():
        dist_checkpointing.save(state, str(folder / "saved"))
    with torch.no_grad():
        out = model(TOKENS, torch.arange(24).unsqueeze(0), None)
    return {"logits": out[..., :VOCAB]}


@pytest.mark.parametrize(
    ("model", "singletons"), [("gpt2", False), ("llama", True), ("mixtral", False), ("mixtral", True)]
)
def test_what_megatron_core_saved_computes_the_same_in_transformers(
    tmp_path: Path, corpus: Path, model: str, singletons: bool
) -> None:
    """Whether it has a tensor of all layers and experts, or one of each."""
    metadata = {"singleton_local_shards": True} if singletons else None
    words = (MEGATRON, *KINDS[model], *LAYOUTS["single"], "train.iterations=2", "train.lr=1e-30", "train.min_lr=1e-30")
    single = make_run(tmp_path / "single", corpus, *words).plan
    compute = lambda: saved_by_megatron_core(single, tmp_path, metadata)  # noqa: E731
    expected = in_another_process(compute, tmp_path / "logits")["logits"]
    run = make_run(tmp_path / "run", corpus, *words, f"train.load={tmp_path / 'saved'}")
    assert run.go() == 0, run.stderr()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(converted(run, "huggingface", tmp_path / "theirs"))
    torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_a_mixtral_of_transformers_is_trained(tmp_path: Path, corpus: Path) -> None:
    """The first loss is that of transformers."""
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(3)
    theirs = transformers.MixtralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    words = ("train.iterations=2", "train.lr=1e-30", "train.min_lr=1e-30", f"train.load={tmp_path / 'theirs'}")
    run = make_run(tmp_path / "run", corpus, MEGATRON, *MIXTRAL, *ENDED["mixtral"], *words)
    assert run.go() == 0, run.stderr()
    folder = converted(run, "huggingface", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(back(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-6)
    assert np.isfinite(run.losses()).all()
