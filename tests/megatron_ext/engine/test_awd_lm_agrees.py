"""Every layout trains the same AWD-LSTM: losses, weights and moments equal the model as it is defined, in one process.

What is dropped of the weights is drawn for each micro-batch, so that all layouts here have micro-batches of two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.plan import Plan
from megatron_ext.data.gpt_samples import GptSamples
from megatron_ext.data.samples import Split
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, SGD, assert_as_delayed, stream_words
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.megatron_ext.engine.test_translation_agrees import Found, assert_equal
from tests.support import cases
from tests.support.megatron_ext.engine_run import VOCAB, make_run
from tests.support.megatron_ext.textbook import trained

SIZES = (
    *("model.family=awd_lm", "model.position_embedding_type=none", "model.heads=1", "model.layers=4"),
    *("model.embedding_width=20", "train.iterations=10", "train.clip_grad=0.25", "parallel=single"),
)
DROPPED = (
    *("model.embedding_dropout=0.1", "model.input_dropout=0.3", "model.hidden_dropout=0.2"),
    *("model.output_dropout=0.4", "model.weight_dropout=0.5"),
)
MODELS = {
    "tied": (*SIZES, *DROPPED),
    "untied": (*SIZES, *DROPPED, "model.untie_embeddings_and_output_weights=true"),
    "plain": SIZES,
}
SHARED = ("parallel.global_batch_size=6",)
LAYOUTS: list[tuple[str, Layout, str]] = [
    ("tied", Layout(1, 1, 1, "4", 2), ""),
    ("tied", Layout(1, 2, 2, "1-3", 2), ""),
    ("tied", Layout(1, 4, 1, "4", 2, sharded_optimizer=True), ""),
    ("tied", Layout(1, 2, 2, "3-1", 2, recompute="full"), "2-1"),
    ("tied", Layout(1, 1, 3, "1-2-1", 2, recompute="full", replicas="3-1-2"), ""),
    ("tied", Layout(1, 1, 2, "1-1-1-1", 2, schedule="interleaved", chunks=2), ""),
    ("tied", Layout(1, 1, 3, "0-4-0", 2, schedule="zb_h1"), ""),
    ("untied", Layout(1, 2, 2, "2-2", 2, schedule="gpipe"), ""),
    ("untied", Layout(1, 1, 2, "2-2", 2, replicas="2-1"), ""),
    ("plain", Layout(1, 1, 2, "2-2", 4), ""),
    ("plain", Layout(1, 2, 2, "3-1", 1), ""),
    ("tied", Layout(1, 1, 1, "4", 2, streams="2"), ""),
]
FIRST = [LAYOUTS[1], LAYOUTS[4]]
"""`make test-fast` tries these."""


class Defined(nn.Module):
    """The model by its formulas, a step of each LSTM at a time, with the initial weights of ours."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        stage = stage_of(plan, 0, TensorGroup())
        named = {name: nn.Parameter(one.detach().clone()) for name, one in stage.parameters_by_name()}
        self._places = {name: f"{part_name(block)}.{inner}" for name, (block, inner) in stage.places.items()}
        self._names = list(named)
        self._held = nn.ParameterList(named.values())
        self._model, self._seed = plan.model, plan.train.seed

    def state(self, values: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
        return {self._places[name]: values(one) for name, one in zip(self._names, self._held, strict=True)}

    def forward(self, tokens: Tensor, number: Tensor) -> Tensor:
        weights, model = dict(zip(self._names, self._held, strict=True)), self._model
        word = weights["embedding.word"]
        x = word[tokens]
        x = x * self._mask("embedding.word", model.embedding_dropout, 1, number, tokens)  # type: ignore[attr-defined]
        x = self._locked(x, "embedding", model.input_dropout, number)  # type: ignore[attr-defined]
        for layer in range(model.layers):
            of = {name.rpartition(".")[2]: one for name, one in weights.items() if name.startswith(f"layers.{layer}.")}
            between = of["weight_hh_l0"]
            width = between.shape[1]
            gates = self._mask(f"layers.{layer}.lstm", model.weight_dropout, width, number[:1], torch.arange(4 * width))  # type: ignore[attr-defined]
            between = between * gates[0]
            h = c = torch.zeros(len(x), width)
            steps = []
            for step in x.unbind(1):
                gate = step @ of["weight_ih_l0"].T + of["bias_ih_l0"] + h @ between.T + of["bias_hh_l0"]
                let_in, forget, new, out = gate.chunk(4, 1)
                c = forget.sigmoid() * c + let_in.sigmoid() * new.tanh()
                h = out.sigmoid() * c.tanh()
                steps.append(h)
            rate = model.output_dropout if layer == model.layers - 1 else model.hidden_dropout  # type: ignore[attr-defined]
            x = self._locked(torch.stack(steps, 1), f"layers.{layer}", rate, number)
        logits: Tensor = x @ weights.get("head.word", word).T + weights["head.bias"]
        return logits[..., :VOCAB]

    def _locked(self, x: Tensor, name: str, rate: float, number: Tensor) -> Tensor:
        return x * self._mask(name, rate, x.shape[-1], number).unsqueeze(1)

    def _mask(self, name: str, rate: float, columns: int, *places: Tensor) -> Tensor:
        rows = rows_of(key_of(self._seed, name), *places)
        return dropout(torch.ones(*rows.shape, columns), rate, rows)


class TokenLoss:
    """The mean over the micro-batches of a global batch, each with the weights that it drops."""

    def __init__(self, plan: Plan) -> None:
        train = plan.train
        split = Split(train.iterations * plan.global_batch_size, train.seed, tuple(plan.data_split))
        self._samples = GptSamples(plan.data_prefix, split, plan.model.sequence_length, VOCAB)
        self._size = plan.micro_batch_size

    def __call__(self, model: nn.Module, numbers: Tensor) -> Tensor:
        losses = []
        for number in numbers.split(self._size):
            tokens = torch.stack([torch.from_numpy(self._samples.tokens(sample)) for sample in number.tolist()])
            logits = model(tokens[:, :-1], number)
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        return torch.stack(losses).mean()


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Found]:
    found: dict[tuple[str, bool], Found] = {}

    def of(model: str, by_thirds: bool) -> Found:
        if (model, by_thirds) not in found:
            batch = SHARED if by_thirds else ()
            words = (*MODELS[model], "parallel.micro_batch_size=2", *batch)
            plan = make_run(tmp_path_factory.mktemp("reference") / "run", corpus, *words).plan
            found[model, by_thirds] = trained(plan, TokenLoss(plan), Defined(plan))
        return found[model, by_thirds]

    return of


def overrides(model: str, layout: Layout, shares: str) -> list[str]:
    found = [*MODELS[model], *(f"parallel.{key}={value}" for key, value in layout._asdict().items())]
    return [*found, *SHARED, f"parallel.shares={shares}"] if shares else found


@pytest.mark.parametrize(
    ("model", "layout", "shares"),
    [
        pytest.param(*each, marks=pytest.mark.fast if each in FIRST else pytest.mark.slow)
        for each in cases.covering(
            LAYOUTS, lambda each: {*options(each[1]), each[0], ("shares", each[2])}, always=FIRST
        )
    ],
    ids=str,
)
def test_losses_weights_and_moments_equal_the_definition(
    tmp_path: Path,
    corpus: Path,
    reference: Callable[[str, bool], Found],
    model: str,
    layout: Layout,
    shares: str,
) -> None:
    run = make_run(tmp_path / "run", corpus, *overrides(model, layout, shares))
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(model, bool(shares)))


@pytest.mark.slow
def test_a_run_goes_on_under_another_layout(
    tmp_path: Path, corpus: Path, reference: Callable[[str, bool], Found]
) -> None:
    """From the middle, with everything dropped that can be."""
    whole = ("train.iterations=10", "train.lr_decay_iterations=10")
    first = make_run(
        tmp_path / "run", corpus, *overrides(*LAYOUTS[1]), "train.iterations=4", "train.lr_decay_iterations=10"
    )
    assert first.go() == 0, first.stderr()
    rest = first.replan(*overrides(*LAYOUTS[4]), *whole)
    assert rest.go() == 0, rest.stderr()
    assert_equal(rest, reference("tied", False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "partition", "semantics", "others"),
    [
        ("1-1-1", "1-2-1", "stashing", SGD),
        ("2-1-1", "2-1-1", "vertical", ADAM),
        ("1-2", "1-3", "stashing", (*ADAM, "parallel.recompute=full")),
        ("2-1", "3-1", "latest", SGD),
    ],
)
def test_without_a_flush_it_learns_as_one_process_with_delays(
    tmp_path: Path, corpus: Path, replicas: str, partition: str, semantics: str, others: tuple[str, ...]
) -> None:
    words = stream_words(replicas, partition, semantics)
    run = make_run(tmp_path / "run", corpus, *MODELS["untied"], *words, *others)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)
