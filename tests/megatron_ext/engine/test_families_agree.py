"""Every layout trains the same BERT and the same T5: losses, weights and moments equal one plain process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.engine import engine
from megatron_ext.engine.gradients import flat
from megatron_ext.families.bert.task import BertTask
from megatron_ext.families.t5.task import T5Task
from megatron_ext.parallel import cross_entropy
from tests.megatron_ext.engine.test_layouts_agree import Layout, options
from tests.support import cases
from tests.support.megatron_ext.engine_run import EngineRun, make_run
from tests.support.megatron_ext.masked import MaskedLoss, masked_samples
from tests.support.megatron_ext.textbook import trained

DROPOUT = ("model.hidden_dropout=0.3", "model.attention_dropout=0.2")
MODELS = {
    "bert": ("model.family=bert", *DROPOUT),
    "plain-bert": ("model.family=bert", "model.bert_binary_head=false"),
    "t5": ("model.family=t5", "model.layers=2", "model.decoder_layers=3", "model.decoder_sequence_length=16", *DROPOUT),
    "new-t5": (  # what today's decoders have, in a T5
        *("model.family=t5", "model.layers=3", "model.decoder_layers=2", "model.position_embedding_type=rope"),
        *("model.normalization=RMSNorm", "model.swiglu=true", "model.num_query_groups=2", "model.kv_channels=12"),
        *("model.add_bias_linear=false", "model.untie_embeddings_and_output_weights=true"),
    ),
}
LAYOUTS = {
    "bert": [
        Layout(1, 1, 1, "3", 4),
        Layout(1, 2, 3, "0-3-0", 2, sharded_optimizer=True),
        Layout(2, 2, 2, "1-2", 2, True, "full", True),
        Layout(4, 1, 2, "3-0", 2, True),
        Layout(2, 1, 2, "2-1", 2, False, "selective", schedule="zb_h1"),
        Layout(1, 2, 2, "0-2-0-1", 1, schedule="interleaved", chunks=2),
        Layout(2, 1, 3, "1-1-1", 4, schedule="gpipe"),
        Layout("2-1-4", 1, 3, "1-0-2", 2, True, schedule="zb_h1"),
        Layout("1-2", 1, 2, "2-1", 1, True, "full", True, replicas="3-2"),
        Layout(1, 1, 1, "3", 2, streams="2"),
    ],
    "plain-bert": [Layout(2, 1, 2, "1-2", 2, True)],
    "t5": [
        Layout(1, 1, 1, "5", 4),
        Layout(1, 1, 4, "0-1-3-1", 2),
        Layout(1, 2, 3, "2-0-3", 2, sharded_optimizer=True),
        Layout(2, 2, 2, "1-4", 2, True, "full", True),
        Layout(4, 1, 2, "3-2", 2, True),
        Layout(2, 1, 3, "4-1-0", 2, False, "selective", schedule="zb_h1"),
        Layout(1, 2, 2, "1-0-2-2", 1, schedule="interleaved", chunks=2),
        Layout(2, 1, 2, "2-1-1-1", 1, True, schedule="interleaved", chunks=2),
        Layout(2, 1, 2, "5-0", 4, schedule="gpipe"),
        Layout("2-1-4", 1, 3, "1-2-2", 2, True),
        Layout("1-2", 2, 2, "1-1-2-1", 1, True, schedule="interleaved", chunks=2),
        Layout("1-2-1", 1, 3, "1-3-1", 1, True, "full", replicas="3-1-2"),
        Layout(1, 2, 1, "5", 1, streams="2"),
    ],
    "new-t5": [
        Layout(2, 1, 3, "1-3-1", 2, True),
        Layout("2-1", 1, 2, "4-1", 2, True, replicas="1-2"),
        Layout(1, 2, 2, "4-1", 2, schedule="zb_h1"),
    ],
}


FIRST = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts[1:3]]
"""`make test-fast` tries some of these."""
TRIED = cases.covering(
    [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts],
    lambda case: {
        *options(case[1]),
        (case[0], case[1].tensor != 1, case[1].pipeline > 1),
        (case[0], case[1].streams),
    },
    always=FIRST[:4],
)


@pytest.fixture(autouse=True)
def samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for task in (BertTask, T5Task):
        monkeypatch.setattr(task, "samples", masked_samples)  # the ranks are forked from this process


@pytest.fixture(scope="module")
def reference(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """Of a textbook loop over one module, by model and micro-batch size: a micro-batch's loss is its mean."""
    found: dict[tuple[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]] = {}

    def of(model: str, size: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        if (model, size) not in found:
            run = make_run(tmp_path_factory.mktemp("reference") / "run", corpus, "parallel=single", *MODELS[model])
            found[model, size] = trained(run.plan, MaskedLoss(run.plan, size))
        return found[model, size]

    return of


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=[pytest.mark.fast] * ((model, layout) in FIRST[::4]))
        for model, layout in TRIED
    ],
    ids=str,
)
def test_losses_and_weights_equal_the_single_process(
    engine_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    model: str,
    layout: Layout,
) -> None:
    run = engine_run(*MODELS[model], *(f"parallel.{key}={value}" for key, value in layout._asdict().items()))
    assert run.go() == 0, run.stderr()
    losses, state = reference(model, layout.micro_batch_size)
    np.testing.assert_allclose(run.losses(), losses, rtol=0, atol=1e-5)
    found = run.state()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        tolerance = 1e-5 if name.startswith("weights/") else 1e-3 * tensor.abs().max().item()
        expected = tensor[: len(found[name])]  # a vocabulary's padding is never used
        torch.testing.assert_close(
            found[name], expected, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("model", "layout"),
    [("bert", LAYOUTS["bert"][2]), ("t5", LAYOUTS["t5"][3]), ("t5", LAYOUTS["t5"][7])],
    ids=str,
)
def test_gradients_that_their_matrix_product_adds_as_on_a_gpu_are_the_same(
    engine_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    layout: Layout,
) -> None:
    """And summed over the replicas in many messages, and the losses computed of some logits at a time."""
    monkeypatch.setattr(flat, "fuses", lambda dtype, device: True)
    monkeypatch.setattr(engine, "BUCKET_BYTES", 4096)
    monkeypatch.setattr(cross_entropy, "PART", 200)
    test_losses_and_weights_equal_the_single_process(engine_run, reference, model, layout)


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [("bert", LAYOUTS["bert"][2], LAYOUTS["bert"][5]), ("t5", LAYOUTS["t5"][3], LAYOUTS["t5"][1])],
    ids=["bert", "t5"],
)
def test_a_run_goes_on_under_another_layout(
    engine_run: Callable[..., EngineRun],
    reference: Callable[[str, int], tuple[np.ndarray, dict[str, torch.Tensor]]],
    model: str,
    first: Layout,
    then: Layout,
) -> None:
    first, then = first._replace(micro_batch_size=1), then._replace(micro_batch_size=1)
    layouts = [[f"parallel.{key}={value}" for key, value in layout._asdict().items()] for layout in (first, then)]
    run = engine_run(*MODELS[model], *layouts[0], "train.iterations=2")
    assert run.go() == 0, run.stderr()
    rest = run.replan(*MODELS[model], *layouts[1])
    assert rest.go() == 0, rest.stderr()
    np.testing.assert_allclose(rest.losses(), reference(model, 1)[0], rtol=0, atol=1e-5)
