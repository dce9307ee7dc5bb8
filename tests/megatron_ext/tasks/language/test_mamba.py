"""Mamba by itself: transformers' own model gives the same logits and gradients, and sizes are known without torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from conf.compose import compose
from conf.errors import ConfigError
from conf.schema.experiment import Recompute, Schedule
from fasop.search.space.choices import runnable
from megatron_ext.contract.models.counts import parameter_count
from megatron_ext.contract.plan import Plan
from megatron_ext.families.mamba.task import MambaLayer, scan
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.measuring.passes import Parts
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.megatron_ext.engine.test_mamba_agrees import SIZES
from tests.support.megatron_ext.engine_run import VOCAB, make_run
from tests.support.megatron_ext.known_sizes import assert_sizes_known

THEIRS = {
    "mixer_in.weight": "mixer.in_proj.weight",
    "conv.weight": "mixer.conv1d.weight",
    "conv.bias": "mixer.conv1d.bias",
    "selection.weight": "mixer.x_proj.weight",
    "time_step.weight": "mixer.dt_proj.weight",
    "time_step.bias": "mixer.dt_proj.bias",
    "log_decay": "mixer.A_log",
    "skip": "mixer.D",
    "mixer_out.weight": "mixer.out_proj.weight",
    "norm.weight": "norm.weight",
}
"""By the names of a layer's parameters, those in transformers."""
OTHER_SIZES = (
    *("model.mamba_state_dim=5", "model.mamba_expand=3", "model.mamba_conv_kernel=3", "model.mamba_time_step_rank=7"),
    *("model.untie_embeddings_and_output_weights=true", "model.norm_epsilon=1e-3"),
)


@pytest.mark.parametrize("words", [SIZES, (*SIZES, *OTHER_SIZES)], ids=["usual", "other sizes"])
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, corpus: Path, words: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    plan = make_run(tmp_path / "run", corpus, *words).plan
    model = plan.model
    stage = stage_of(plan, 0, TensorGroup())
    rank = len(dict(stage.parameters_by_name())["layers.0.time_step.weight"][0])
    config = transformers.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        state_size=model.mamba_state_dim,  # type: ignore[attr-defined]
        expand=model.mamba_expand,  # type: ignore[attr-defined]
        conv_kernel=model.mamba_conv_kernel,  # type: ignore[attr-defined]
        time_step_rank=rank,
        layer_norm_epsilon=model.norm_epsilon,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
    )
    theirs = transformers.MambaForCausalLM(config)
    state = {their_name(name): one.detach() for name, one in stage.parameters_by_name()}
    left = theirs.load_state_dict(state, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = torch.randint(VOCAB, (3, model.sequence_length), generator=torch.Generator().manual_seed(1))
    ours = stage({"tokens": tokens, "number": torch.arange(3)})["logits"]
    expected = theirs(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    ours.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: one.grad for name, one in theirs.named_parameters()}
    for name, one in stage.parameters_by_name():
        torch.testing.assert_close(one.grad, gradients[their_name(name)], rtol=1e-3, atol=1e-7, msg=name)


def their_name(name: str) -> str:
    outside = {"embedding.word": "backbone.embeddings.weight", "head.word": "lm_head.weight"}
    outside["head.norm.weight"] = "backbone.norm_f.weight"
    if name in outside:
        return outside[name]
    layer = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    assert layer is not None
    return f"backbone.layers.{layer[1]}.{THEIRS[layer[2]]}"


def test_sizes_known_without_torch_are_those_of_the_blocks(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, *SIZES, *OTHER_SIZES).plan
    task = task_of(plan)
    numbers = assert_sizes_known(task, plan.model)
    left = stage_of(plan, 0, TensorGroup())(task.example(3, torch.Generator().manual_seed(0)).inputs)["logits"]
    assert left.numel() == 3 * numbers["logits"]


def test_the_smallest_public_mamba_has_its_129_million_weights() -> None:
    model = compose(["model=mamba-130m", "parallel.partition=null"]).model.sized(1)
    assert parameter_count(model) == 129_135_360


def test_a_layer_keeps_what_is_counted(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, *SIZES, "model.hidden=64", "model.sequence_length=96").plan
    layer = next(one for one in stage_of(plan, 0, TensorGroup()).blocks if isinstance(one, MambaLayer))
    assert kept_by(layer, plan, 2) == pytest.approx(2 * counted(plan), rel=0.05)


def counted(plan: Plan) -> int:
    family = plan.model.traits
    return family.inside_activations(plan.model, "layer") + family.outside_activations(plan.model, "layer")


def kept_by(layer: nn.Module, plan: Plan, batch: int) -> int:
    """Numbers in the memory that a forward pass keeps for the backward pass, beside the parameters."""
    own = {one.untyped_storage().data_ptr() for one in layer.parameters()}
    held: dict[int, int] = {}

    def keep(one: Tensor) -> Tensor:
        memory = one.untyped_storage()
        if memory.data_ptr() not in own:
            held[memory.data_ptr()] = memory.nbytes() // one.element_size()
        return one

    x = torch.randn(batch, plan.model.sequence_length, plan.model.hidden, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        left = layer(x)
    assert left.shape == x.shape
    return sum(held.values())


def test_a_token_depends_on_none_behind_it(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, *SIZES).plan
    stage = stage_of(plan, 0, TensorGroup())
    tokens = torch.randint(VOCAB, (1, plan.model.sequence_length))
    other = tokens.clone()
    other[:, 10:] = (other[:, 10:] + 1) % VOCAB
    first, second = (stage({"tokens": each, "number": torch.arange(1)})["logits"] for each in (tokens, other))
    torch.testing.assert_close(first[:, :10], second[:, :10])
    assert not torch.allclose(first[:, 10], second[:, 10])


def test_a_scan_is_its_formula_token_by_token() -> None:
    """With one channel and one number in its state."""
    x, step, write, read = torch.rand(4, 1, 6, 1).unbind()
    decay, skip = torch.rand(1, 1), torch.rand(1)
    state, expected = 0.0, []
    for token in range(6):
        width = step[0, token, 0].item()
        state *= torch.exp(-width * decay.exp()).item()
        state += width * write[0, token, 0].item() * x[0, token, 0].item()
        expected.append(state * read[0, token, 0].item() + skip.item() * x[0, token, 0].item())
    torch.testing.assert_close(scan(x, step, write, read, decay, skip).flatten(), torch.tensor(expected))


def test_what_a_search_may_choose_is_what_a_mamba_can_do() -> None:
    experiment = compose(["model=mamba-tiny", "parallel.partition=null"])
    allowed = runnable(experiment.engine, experiment.train, experiment.model)
    assert Schedule.zb_h1 not in allowed.schedule
    assert Recompute.selective not in allowed.recompute


def test_a_profile_times_every_kind_of_block(tmp_path: Path, corpus: Path) -> None:
    plan = make_run(tmp_path / "run", corpus, *SIZES).plan
    parts = Parts(plan, plan.model, TensorGroup(), 2, torch.device("cpu"))
    assert parts.kept_bytes().keys() == {"embedding", "layer", "head"}
    parts._pass()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.heads=2",), "model.heads=2: model.family=mamba has no attention; use 1"),
        (("model.swiglu=true",), "model.swiglu=true is only for model.family=gpt, bert, t5 or transformer"),
        (("model.weight_dropout=0.5",), "model.weight_dropout=0.5 is only for model.family=awd_lm"),
        (("model.mamba_expand=0",), "model.mamba_expand=0 must be at least 1"),
        (("model=tiny", "model.mamba_expand=3"), "model.mamba_expand=3 is only for model.family=mamba, not for"),
    ],
    ids=str,
)
def test_options_of_other_families_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        compose(["model=mamba-tiny", "parallel.partition=null", *words])
