"""A model cut into encoder, decoder and head translates as the whole one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoints.meta import Checkpoint
from megatron_ext.contract.errors import EngineError
from megatron_ext.contract.plan import Plan
from megatron_ext.data.pairs import BEGIN, END, PAD
from megatron_ext.families.tasks import stage_of
from megatron_ext.inference import exported
from megatron_ext.inference.scoring import Scoring
from megatron_ext.inference.translator import Translator, search, weights_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from tests.megatron_ext.engine.test_translation_agrees import LAYOUTS, MODELS, overrides
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.pairs import write_pairs

SENTENCES = [[5, 9, 30], [7], [], list(range(8, 22)), [40, 41, 42, 43]]
GREEDY = Scoring(1, 0.0, 0.0)


def plan_of(folder: Path, model: str) -> Plan:
    folder.mkdir(exist_ok=True)
    prefix = write_pairs(folder, 61)
    return make_run(folder / "run", prefix, "parallel=single", *MODELS[model]).plan


def weights(plan: Plan) -> dict[str, torch.Tensor]:
    """As they begin, but larger, so that what comes out depends on what goes in; larger still, LSTMs are chaos."""
    larger = 2 if plan.model.family == "gnmt" else 10
    return {name: larger * one.detach() for name, one in stage_of(plan, 0, TensorGroup()).parameters_by_name()}


def greedy(plan: Plan, values: dict[str, torch.Tensor], tokens: list[int]) -> list[int]:
    """With the whole model in one piece, a token at a time."""
    stage = stage_of(plan, 0, TensorGroup()).eval()
    for name, parameter in stage.parameters_by_name():
        parameter.data = values[name]
    text = torch.tensor([[*tokens, END]])
    prefix = [BEGIN]
    while len(prefix) < max(plan.model.decoder_tokens, 2 * text.shape[1]):
        inputs = {"text_enc": text, "enc_mask": torch.ones_like(text), "text_dec": torch.tensor([prefix])}
        logits = stage({**inputs, "number": torch.zeros(1, dtype=torch.int64)})["logits"][0, -1, :61]
        logits[[PAD, BEGIN]] = -torch.inf
        if (token := int(logits.argmax())) == END:
            break
        prefix.append(token)
    return prefix[1:]


@pytest.mark.parametrize("model", MODELS)
def test_greedy_translations_are_those_of_the_whole_model(tmp_path: Path, model: str) -> None:
    plan = plan_of(tmp_path, model)
    values = weights(plan)
    found = Translator(plan.model.identity(), values).translate(SENTENCES, GREEDY)
    assert found == [greedy(plan, values, one) if one else [] for one in SENTENCES]
    assert len(set(map(tuple, found))) > 2


def beam(plan: Plan, values: dict[str, torch.Tensor], tokens: list[int], scoring: Scoring) -> list[int]:
    """With the whole model in one piece, of which nothing is kept between tokens."""
    stage = stage_of(plan, 0, TensorGroup()).eval()
    for name, parameter in stage.parameters_by_name():
        parameter.data = values[name]
    watched = [block for block in stage.blocks if hasattr(block, "watch")][-1]
    text = torch.tensor([[*tokens, END]])

    def step(prefixes: torch.Tensor, rows: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []
        watched.watch = seen.append
        source = text.expand(len(prefixes), -1)
        inputs = {"text_enc": source, "enc_mask": torch.ones_like(source), "text_dec": prefixes}
        logits = stage({**inputs, "number": torch.zeros(len(prefixes), dtype=torch.int64)})["logits"]
        return logits[:, -1, :61].log_softmax(-1), seen[-1][:, -1]

    with torch.no_grad():
        limit = max(plan.model.decoder_tokens, 2 * text.shape[1])
        (found,) = search(step, torch.ones_like(text), [limit], scoring)
    return list(found.tokens)


@pytest.mark.parametrize("model", MODELS)
def test_translations_of_a_beam_are_those_of_the_whole_model(tmp_path: Path, model: str) -> None:
    plan = plan_of(tmp_path, model)
    values = weights(plan)
    scoring = Scoring(3)
    found = Translator(plan.model.identity(), values).translate(SENTENCES, scoring)
    assert found == [beam(plan, values, one, scoring) if one else [] for one in SENTENCES]
    assert len(set(map(tuple, found))) > 2


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_a_token_costs_the_same_wherever_it_stands(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(tmp_path, model)
    translator = Translator(plan.model.identity(), weights(plan))
    lengths: list[int] = []
    monkeypatch.setattr(translator._decoder.blocks[0], "forward", _noting(translator._decoder.blocks[0], lengths))
    (found,) = translator.translate([[5, 9, 30]], GREEDY)
    assert lengths == [1] * len(lengths)
    assert len(lengths) in (len(found), len(found) + 1)


def _noting(module: torch.nn.Module, lengths: list[int]) -> Callable[..., torch.Tensor]:
    forward = module.forward

    def noted(tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return forward(tokens, *others)

    return noted


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_a_beam_sees_the_attention_and_other_sentences_change_nothing(tmp_path: Path, model: str) -> None:
    plan = plan_of(tmp_path, model)
    translator = Translator(plan.model.identity(), weights(plan))
    together = translator.translate(SENTENCES, Scoring(4))
    assert together == [translator.translate([one], Scoring(4))[0] for one in SENTENCES]


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_what_a_search_sees_of_the_attention_are_weights_of_the_sources_tokens(tmp_path: Path, model: str) -> None:
    plan = plan_of(tmp_path, model)
    translator = Translator(plan.model.identity(), weights(plan))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(step, mask, limits, scoring):  # as `search`
        _, attention = step(torch.full((2, 1), BEGIN), torch.arange(2), torch.arange(2))
        rows = torch.tensor([0, 1, 1])
        _, attention = step(torch.tensor([[BEGIN, 5], [BEGIN, 6], [BEGIN, 7]]), rows, rows)
        seen.append((attention, mask))
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_ext.inference.translator.search", watched)
        translator.translate([[9], [10, 11, 12]])
    ((attention, mask),) = seen
    assert attention.shape == (3, 4)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert (attention[0, 2:] == 0).all()
    torch.testing.assert_close(attention.sum(-1), torch.ones(3))
    assert not torch.equal(attention[1], attention[2])


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_parts_of_any_layout_merge_by_name_and_an_export_has_all_of_them(tmp_path: Path, model: str) -> None:
    prefix = write_pairs(tmp_path, 61)
    run: EngineRun = make_run(tmp_path / "run", prefix, *overrides(model, *LAYOUTS[model][1]), "train.iterations=2")
    assert run.go() == 0, run.stderr()
    checkpoint = Checkpoint.at(run.run.path)
    merged = weights_of(checkpoint)
    assert merged.keys() == weights(plan_of(tmp_path / "whole", model)).keys()
    content = exported.Exported(checkpoint.meta.model, merged, "{}")
    exported.write(tmp_path / "model.safetensors", content)
    again = exported.read(tmp_path / "model.safetensors")
    assert again.tokenizer == "{}"
    found = [Translator(one.model, one.weights).translate(SENTENCES) for one in (content, again)]
    assert found[0] == found[1]


def test_what_cannot_be_translated_with_is_one_message(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "gnmt")
    values = weights(plan)
    with pytest.raises(EngineError, match="which does not translate; transformer and gnmt do"):
        Translator({**plan.model.identity(), "family": "t5"}, values)
    with pytest.raises(EngineError, match=r"expected a weight head\.bias of shape \[61\], found none"):
        Translator(plan.model.identity(), {name: one for name, one in values.items() if name != "head.bias"})
    with pytest.raises(EngineError, match="not all in the vocabulary of 61"):
        Translator(plan.model.identity(), values).translate([[61]])


def test_a_file_that_is_no_export_is_one_message(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    exported.safetensors.write(file, {"a": torch.zeros(1)}, {})
    with pytest.raises(
        EngineError, match="no model to translate with; make one with 'tdpp translate RUN --export FILE'"
    ):
        exported.read(file)
