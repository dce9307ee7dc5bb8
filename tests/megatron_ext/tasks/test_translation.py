"""The translation models by themselves: their loss, and what must not change it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from conf.compose import compose
from conf.schema.experiment import Schedule
from fasop.search.space.choices import runnable
from megatron_ext.contract.plan import Plan
from megatron_ext.families.tasks import stage_of, task_of
from megatron_ext.measuring.passes import Parts
from megatron_ext.measuring.sequence import wires_of
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.positions import sinusoids
from tests.megatron_ext.engine.test_translation_agrees import MODELS
from tests.support.megatron_ext.engine_run import make_run
from tests.support.megatron_ext.known_sizes import assert_sizes_known
from tests.support.megatron_ext.pairs import write_pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), 61, longest=15)


def plan_of(folder: Path, pairs: Path, model: str, *overrides: str) -> Plan:
    return make_run(folder, pairs, "parallel=single", *MODELS[model], *overrides).plan


def passed(plan: Plan, count: int = 6) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Logits, metrics and loss of the first samples."""
    task, stage = task_of(plan), stage_of(plan, 0, TensorGroup())
    batch = task.samples("train", count).batch(np.arange(count))
    micro = task.micro({name: torch.from_numpy(content) for name, content in batch.items()})
    left = stage(micro.inputs)
    metrics = task.metrics(left, micro, TensorGroup())
    return {**left, **micro.targets}, metrics, task.loss(left, micro, TensorGroup())


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_the_loss_is_a_smoothed_sum_and_the_metrics_are_sums_too(tmp_path: Path, pairs: Path, model: str) -> None:
    found, metrics, loss = passed(plan_of(tmp_path / "run", pairs, model))
    asked = found["loss_mask"].bool()
    logits, labels = found["logits"][asked][:, :61], found["labels"][asked]
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["nll"], F.cross_entropy(logits, labels, reduction="sum"))
    assert metrics["accuracy"] == (logits.argmax(-1) == labels).sum()


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_padding_changes_nothing(tmp_path: Path, pairs: Path, model: str) -> None:
    """Of sentences of up to 15 words, in both directions and in both languages."""
    dropped = "model.hidden_dropout=0.0", *["model.attention_dropout=0.0"] * (model == "transformer")
    short, long = (
        passed(
            plan_of(
                tmp_path / f"{n}",
                pairs,
                model,
                *dropped,
                f"model.sequence_length={n}",
                f"model.decoder_sequence_length={n + 3}",
            )
        )
        for n in (16, 24)
    )
    torch.testing.assert_close(short[2], long[2], rtol=1e-6, atol=0)
    seen = short[0]["loss_mask"].bool()
    torch.testing.assert_close(short[0]["logits"][seen], long[0]["logits"][:, :19][seen], rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_the_decoder_does_not_see_what_it_is_to_write(tmp_path: Path, pairs: Path, model: str) -> None:
    plan = plan_of(tmp_path / "run", pairs, model)
    task, stage = task_of(plan), stage_of(plan, 0, TensorGroup()).eval()
    micro = task.example(2, torch.Generator().manual_seed(0))
    before = stage(micro.inputs)["logits"]
    changed = micro.inputs["text_dec"].clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    after = stage({**micro.inputs, "text_dec": changed})["logits"]
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(after[:, 9:], before[:, 9:], atol=1e-6)


def test_positions_are_sines_and_cosines_of_falling_frequencies() -> None:
    found = sinusoids(7, 6, torch.device("cpu"))
    place = torch.arange(7.0)
    for column, frequency in enumerate((1.0, 1e-2, 1e-4)):
        torch.testing.assert_close(found[:, column], (place * frequency).sin())
        torch.testing.assert_close(found[:, column + 3], (place * frequency).cos())


def test_a_bidirectional_layer_is_torchs_over_packed_sentences(tmp_path: Path, pairs: Path) -> None:
    plan = plan_of(tmp_path / "run", pairs, "gnmt")
    layer = next(module for module in stage_of(plan, 0, TensorGroup()).blocks if hasattr(module, "reverse"))
    both = torch.nn.LSTM(32, 32, batch_first=True, bidirectional=True)
    weights = dict(layer.lstm.state_dict().items())
    weights.update({f"{name}_reverse": one for name, one in layer.reverse.state_dict().items()})
    both.load_state_dict(weights)
    x, lengths = torch.randn(3, 9, 32), torch.tensor([9, 1, 5])
    mask = (torch.arange(9) < lengths.unsqueeze(1)).long()
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(both(packed)[0], batch_first=True)
    seen = mask.bool()
    torch.testing.assert_close(layer(x, mask)[seen], expected[seen], rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_known_without_torch_are_those_of_the_blocks(tmp_path: Path, pairs: Path, model: str) -> None:
    """Parameters by name and shape, and what crosses each cut."""
    plan = plan_of(tmp_path / "run", pairs, model)
    task, sized = task_of(plan), plan.model
    numbers = assert_sizes_known(task, sized)
    expected = sorted((ends, numbers[name]) for name, ends in wires_of(task).items())
    assert sorted(([one.giver, *one.takers], one.numbers) for one in sized.traits.wires(sized)) == expected


def test_a_search_leaves_out_what_lstms_cannot_do() -> None:
    experiment = compose(["model=gnmt-tiny", "parallel.partition=null"])
    allowed = runnable(experiment.engine, experiment.train, experiment.model)
    assert Schedule.zb_h1 not in allowed.schedule
    assert Schedule.one_f_one_b in allowed.schedule


@pytest.mark.parametrize("model", ["transformer", "gnmt"])
def test_a_profile_times_every_kind_of_block(tmp_path: Path, pairs: Path, model: str) -> None:
    plan = plan_of(tmp_path / "run", pairs, model)
    kinds = {kind for kind, _ in plan.model.all_kinds()}
    parts = Parts(plan, plan.model, TensorGroup(), 2, torch.device("cpu"))
    assert parts.kept_bytes().keys() == kinds
    parts._pass()
