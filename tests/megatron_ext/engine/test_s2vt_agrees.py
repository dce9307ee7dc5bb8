"""Every layout trains the same S2VT: losses, weights and moments equal the model as it is defined, in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.checkpoints.header import part_name
from megatron_ext.contract.plan import Plan
from megatron_ext.data.samples import Split
from megatron_ext.data.vision.videos import VideoSamples
from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from tests.megatron_ext.engine.streams.test_streams_agree import ADAM, SGD, assert_as_delayed, stream_words
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.megatron_ext.engine.test_translation_agrees import Found, assert_equal
from tests.support import cases
from tests.support.megatron_ext.engine_run import VOCAB, make_run
from tests.support.megatron_ext.textbook import trained
from tests.support.megatron_ext.videos import FEATURES, write_videos

SIZES = (
    *("model.family=s2vt", "model.position_embedding_type=none", "model.heads=1", f"model.features={FEATURES}"),
    *("model.embedding_width=20", "model.sequence_length=7", "model.decoder_sequence_length=10"),
    *("model.hidden_dropout=0.3", "train.iterations=10", "parallel=single"),
)
MODELS = {
    "one": (*SIZES, "model.layers=1", "model.decoder_layers=1"),
    "two": (*SIZES, "model.layers=2", "model.decoder_layers=2", "model.label_smoothing=0.1"),
}
SHARED = ("parallel.global_batch_size=6",)
LAYOUTS: list[tuple[str, Layout, str]] = [
    ("one", Layout(1, 1, 1, "2", 4), ""),
    ("one", Layout(1, 2, 2, "1-1", 2), ""),
    ("one", Layout(1, 1, 3, "0-1-1", 2, replicas="2-1-1"), ""),
    ("two", Layout(1, 4, 1, "4", 2, sharded_optimizer=True), ""),
    ("two", Layout(1, 2, 2, "1-3", 2, recompute="full"), "2-1"),
    ("two", Layout(1, 1, 4, "1-1-1-1", 1, schedule="gpipe"), ""),
    ("two", Layout(1, 1, 3, "2-2-0", 2, recompute="full", replicas="3-1-2"), ""),
    ("two", Layout(1, 1, 2, "1-1-1-1", 2, schedule="interleaved", chunks=2), ""),
    ("two", Layout(1, 2, 1, "4", 1, streams="2-1"), "2-1"),
]
FIRST = LAYOUTS[2:3]
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

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        weights, model = dict(zip(self._names, self._held, strict=True)), self._model
        frames, words = batch["frames"], weights["decoder_embedding.word"][batch["text_dec"]]
        seen = frames @ weights["embedding.frame.weight"].T + weights["embedding.frame.bias"]
        x = torch.cat([seen, torch.zeros_like(words)], 1)
        for layer in range(model.layers):
            x = self._lstm(x, f"encoder.{layer}", weights, batch["number"])
        x = torch.cat([x, torch.cat([torch.zeros_like(seen), words], 1)], 2)
        for layer in range(model.decoder_count):
            x = self._lstm(x, f"decoder.{layer}", weights, batch["number"])
        logits: Tensor = x[:, frames.shape[1] :] @ weights["head.word"].T + weights["head.bias"]
        return logits[..., :VOCAB]

    def _lstm(self, x: Tensor, name: str, weights: dict[str, Tensor], number: Tensor) -> Tensor:
        rows = rows_of(key_of(self._seed, name), number, torch.arange(x.shape[1]))
        x = x * dropout(torch.ones_like(x), self._model.hidden_dropout, rows)
        of = {key.rpartition(".")[2]: one for key, one in weights.items() if key.startswith(f"{name}.")}
        h = c = torch.zeros(len(x), self._model.hidden)
        steps = []
        for step in x.unbind(1):
            gate = step @ of["weight_ih_l0"].T + of["bias_ih_l0"] + h @ of["weight_hh_l0"].T + of["bias_hh_l0"]
            let_in, forget, new, out = gate.chunk(4, 1)
            c = forget.sigmoid() * c + let_in.sigmoid() * new.tanh()
            h = out.sigmoid() * c.tanh()
            steps.append(h)
        return torch.stack(steps, 1)


class CaptionLoss:
    """The mean over the words of a global batch."""

    def __init__(self, plan: Plan) -> None:
        split = Split(plan.train.iterations * plan.global_batch_size, plan.train.seed)
        self._samples = VideoSamples(plan.data_prefix, split, plan.model)
        self._smoothing = plan.model.label_smoothing

    def __call__(self, model: nn.Module, number: Tensor) -> Tensor:
        batch = {name: torch.from_numpy(content) for name, content in self._samples.batch(number.numpy()).items()}
        asked = batch["loss_mask"].bool()
        return F.cross_entropy(model(batch)[asked], batch["labels"][asked], label_smoothing=self._smoothing)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"), VOCAB)


@pytest.fixture(scope="module")
def reference(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Found]:
    found: dict[tuple[str, bool], Found] = {}

    def of(model: str, by_thirds: bool) -> Found:
        if (model, by_thirds) not in found:
            batch = SHARED if by_thirds else ()
            plan = make_run(tmp_path_factory.mktemp("reference") / "run", videos, *MODELS[model], *batch).plan
            found[model, by_thirds] = trained(plan, CaptionLoss(plan), Defined(plan))
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
    videos: Path,
    reference: Callable[[str, bool], Found],
    model: str,
    layout: Layout,
    shares: str,
) -> None:
    run = make_run(tmp_path / "run", videos, *overrides(model, layout, shares))
    assert run.go() == 0, run.stderr()
    assert_equal(run, reference(model, bool(shares)))


def test_a_run_goes_on_under_another_layout(
    tmp_path: Path, videos: Path, reference: Callable[[str, bool], Found]
) -> None:
    words = (*overrides(*LAYOUTS[1]), "train.iterations=4", "train.lr_decay_iterations=10")
    first = make_run(tmp_path / "run", videos, *words)
    assert first.go() == 0, first.stderr()
    rest = first.replan(*overrides(*LAYOUTS[2]), "train.lr_decay_iterations=10")
    assert rest.go() == 0, rest.stderr()
    assert_equal(rest, reference("one", False))


@pytest.mark.parametrize(
    ("model", "replicas", "partition", "semantics", "others"),
    [
        pytest.param("one", "2-1-1", "0-1-1", "stashing", SGD, marks=pytest.mark.slow),
        pytest.param("two", "1-1-1", "1-2-1", "vertical", ADAM, marks=pytest.mark.slow),
        ("two", "1-2", "3-1", "stashing", (*ADAM, "parallel.recompute=full")),
    ],
)
def test_without_a_flush_it_learns_as_one_process_with_delays(
    tmp_path: Path, videos: Path, model: str, replicas: str, partition: str, semantics: str, others: tuple[str, ...]
) -> None:
    words = stream_words(replicas, partition, semantics)
    run = make_run(tmp_path / "run", videos, *MODELS[model], *words, *others)
    assert run.go() == 0, run.stderr()
    assert_as_delayed(run)
