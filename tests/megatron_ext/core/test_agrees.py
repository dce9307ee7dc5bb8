"""engine=megatron_core learns what tdpp's own engine learns, under every layout that both can have.

make test-megatron
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.contract.plan_parts import ANSWERS
from megatron_ext.data.indexed_dataset import data_file, write_indexed
from tests.support.cases import each
from tests.support.megatron_ext.core_layouts import LAYOUTS, MEGATRON, MODELS, SINGLE
from tests.support.megatron_ext.engine_run import VOCAB, make_run

pytest.importorskip("megatron", reason="megatron-core is not installed")


def losses(folder: Path, corpus: Path, *words: str) -> np.ndarray:
    run = make_run(folder, corpus, *words)
    assert run.go() == 0, run.stderr()
    return run.losses()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], np.ndarray]:
    """The losses of tdpp's own engine on one process, by model."""
    known: dict[str, np.ndarray] = {}

    def of(model: str) -> np.ndarray:
        if model not in known:
            known[model] = losses(tmp_path_factory.mktemp(model), corpus, *MODELS[model], *SINGLE)
        return known[model]

    return of


@pytest.mark.parametrize(("model", "layout"), each([*MODELS], [*LAYOUTS], always=product(MODELS, ["all"])))
def test_losses_are_those_of_tdpps_own_engine(
    tmp_path: Path, corpus: Path, ours: Callable[[str], np.ndarray], model: str, layout: str
) -> None:
    theirs = losses(tmp_path / "run", corpus, MEGATRON, *MODELS[model], *LAYOUTS[layout])
    assert len(theirs) == 4
    np.testing.assert_allclose(theirs, ours(model), rtol=0, atol=1e-5)


PADDED = ("model.vocab_size=61", "parallel.tensor=2")


def test_a_vocabulary_that_is_padded_for_a_tensor_group_loses_as_much(tmp_path: Path, corpus: Path) -> None:
    both = [losses(tmp_path / one, corpus, f"engine={one}", *SINGLE, *PADDED) for one in ("tdpp", "megatron_core")]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


def test_positions_rotate_the_same_part_of_each_head(tmp_path: Path, corpus: Path) -> None:
    words = (*SINGLE, *MODELS["llama"], "model.rotary_percent=0.5")
    both = [losses(tmp_path / one, corpus, f"engine={one}", *words) for one in ("tdpp", "megatron_core")]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of which only some tokens are learned, in each another number of them."""
    prefix, rng = tmp_path_factory.mktemp("answers") / "data", np.random.RandomState(0)
    documents = [rng.randint(0, VOCAB, size).astype(np.uint16) for size in rng.randint(8, 40, 64)]
    write_indexed(prefix, documents, np.dtype(np.uint16))
    data_file(prefix, ANSWERS).write_bytes(b"".join((rng.rand(len(one)) < 0.4).tobytes() for one in documents))
    return prefix


@pytest.mark.parametrize("layout", ["single", "uneven", "all", "context, data"])
def test_answers_are_learned_over_the_weight_of_the_whole_batch(tmp_path: Path, answers: Path, layout: str) -> None:
    words = (*MODELS["llama"], 'data.split="80,20,0"', "train.eval_interval=2")
    found = []
    for one in (SINGLE, (MEGATRON, *LAYOUTS[layout])):
        run = make_run(tmp_path / f"run{len(found)}", answers, *one, *words)
        assert run.go() == 0, run.stderr()
        found.append([(line.get("loss"), line.get("valid_loss")) for line in run.metrics()])
    assert len(found[0]) >= 4
    np.testing.assert_allclose(*(np.array(one, float) for one in found), rtol=0, atol=1e-5)


FP16 = ("train.precision=fp16", "train.iterations=24")


def test_fp16_skips_the_same_iterations_and_has_the_same_loss_scale(tmp_path: Path, corpus: Path) -> None:
    found = []
    for one in ("tdpp", "megatron_core"):
        run = make_run(tmp_path / one, corpus, f"engine={one}", *SINGLE, *FP16)
        assert run.go() == 0, run.stderr()
        found.append([(line["loss_scale"], line["skipped"]) for line in run.metrics()])
    assert found[0] == found[1]
    assert {skipped for _, skipped in found[0]} == {0, 1}


EVALUATED = ("train.eval_interval=2", 'data.split="80,20,0"', "train.best=loss")


@pytest.mark.parametrize("layout", ["single", "data", "interleaved", "all", "context, interleaved", "context, data"])
def test_evaluations_agree(tmp_path: Path, corpus: Path, layout: str) -> None:
    found = []
    for one in (SINGLE, (MEGATRON, *LAYOUTS[layout])):
        run = make_run(tmp_path / f"run{len(found)}", corpus, *one, *MODELS["llama"], *EVALUATED)
        assert run.go() == 0, run.stderr()
        found.append([line["valid_loss"] for line in run.metrics() if "valid_loss" in line])
    assert len(found[0]) == 2
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5)


WAYS = {
    "tdpp to sharded": ((), (MEGATRON, *LAYOUTS["all"])),
    "sharded to tdpp": ((MEGATRON, *LAYOUTS["all"]), ()),
    "pipeline to interleaved": ((MEGATRON, *LAYOUTS["uneven"]), (MEGATRON, *LAYOUTS["interleaved"])),
    "context to tdpp": ((MEGATRON, *LAYOUTS["context, data"]), ()),
    "tdpp to context": ((), (MEGATRON, *LAYOUTS["context, tensor"])),
    "data to single": ((MEGATRON, *LAYOUTS["data"]), (MEGATRON,)),
}


@pytest.mark.parametrize(("model", "way"), each([*MODELS], [*WAYS]))
def test_a_run_goes_on_with_another_engine_and_layout(tmp_path: Path, corpus: Path, model: str, way: str) -> None:
    """As one that was never stopped: losses, weights and the optimizer's state."""
    begin, end = WAYS[way]
    words = (*MODELS[model], *SINGLE, "train.lr_decay_iterations=4")
    whole = make_run(tmp_path / "whole", corpus, *words)
    assert whole.go() == 0, whole.stderr()
    run = make_run(tmp_path / "run", corpus, *words, "train.iterations=2", "train.samples=null", *begin)
    assert run.go() == 0, run.stderr()
    run = run.replan(*words, *end)
    assert run.go() == 0, run.stderr()
    np.testing.assert_allclose(run.losses(), whole.losses(), rtol=0, atol=1e-5)
    found, expected = run.state(), whole.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")
