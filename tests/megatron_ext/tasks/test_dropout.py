"""Dropout drops as often as it is asked to, independently in every place, and the same wherever a place is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_ext.families.tasks import stage_of
from megatron_ext.parallel import fused
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks import dropout as module
from megatron_ext.tasks.dropout import dropout, key_of, rows_of
from tests.support.megatron_ext.engine_run import VOCAB, EngineRun

SAMPLES, TOKENS, HIDDEN = 64, 96, 131
ONE = ["parallel.data=1", "parallel.pipeline=1", "parallel.partition=3", "parallel.micro_batch_size=8"]


def mask(rate: float, seed: int = 1, name: str = "layers.0.mlp", first: int = 0, columns: int = HIDDEN) -> Tensor:
    """[samples, tokens, columns]: 1 where a number is kept."""
    rows = rows_of(key_of(seed, name), torch.arange(first, first + SAMPLES), torch.arange(TOKENS))
    return (dropout(torch.ones(SAMPLES, TOKENS, columns), rate, rows) != 0).float()


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_much_is_dropped_as_is_asked_for(rate: float) -> None:
    rows = rows_of(key_of(1, "embedding"), torch.arange(SAMPLES), torch.arange(TOKENS))
    x = torch.full((SAMPLES, TOKENS, HIDDEN), 3.0)
    y = dropout(x, rate, rows)
    deviation = (rate * (1 - rate) / x.numel()) ** 0.5
    assert (y == 0).float().mean().item() == pytest.approx(rate, abs=5 * deviation + 1e-5)
    assert torch.allclose(y[y != 0], torch.tensor(3.0 / (1 - rate)), rtol=1e-3)
    assert y.mean().item() == pytest.approx(3.0, abs=15 * deviation / (1 - rate))


def test_a_rate_of_zero_changes_nothing() -> None:
    assert bool((mask(0.0) == 1).all())


def test_places_samples_blocks_and_seeds_are_independent() -> None:
    kept = mask(0.5) * 2 - 1
    others = {
        "the next sample": (kept[1:], kept[:-1]),
        "the next token": (kept[:, 1:], kept[:, :-1]),
        "the next number": (kept[..., 1:], kept[..., :-1]),
        "the one after": (kept[..., 2:], kept[..., :-2]),
        "another block": (kept, mask(0.5, name="layers.1.mlp") * 2 - 1),
        "another seed": (kept, mask(0.5, seed=2) * 2 - 1),
        "later samples": (kept, mask(0.5, first=SAMPLES) * 2 - 1),
        "samples of another split": (kept, mask(0.5, first=1 << 40) * 2 - 1),
    }
    for name, (one, other) in others.items():
        assert abs((one * other).mean().item()) < 5 / one.numel() ** 0.5, name


def test_columns_do_not_depend_on_how_many_there_are() -> None:
    assert torch.equal(mask(0.3)[..., :40], mask(0.3, columns=40))


def test_the_backward_pass_drops_the_same() -> None:
    rows = rows_of(key_of(3, "x"), torch.arange(2), torch.arange(5))
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, rows), [x])
    y = dropout(x, 0.4, rows)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)


def test_a_share_of_the_sequence_has_the_masks_of_its_places() -> None:
    whole = rows_of(key_of(1, "x"), torch.arange(3), TensorGroup().places(8, torch.device("cpu")))
    for rank in range(4):
        share = TensorGroup(4, rank, sequence_parallel=True).places(2, torch.device("cpu"))
        assert torch.equal(rows_of(key_of(1, "x"), torch.arange(3), share), whole[:, 2 * rank : 2 * rank + 2])


def logits(run: EngineRun, number: Tensor, training: bool = True) -> Tensor:
    stage = stage_of(run.plan, 0, TensorGroup()).train(training)
    tokens = torch.randint(VOCAB, (8, run.plan.model.sequence_length), generator=torch.Generator().manual_seed(1))
    left: Tensor = stage({"tokens": tokens, "number": number})["logits"].detach()
    return left


def test_attention_whose_weights_are_all_kept_is_attention(engine_run: Callable[..., EngineRun]) -> None:
    nearly_none, plain = engine_run(*ONE, "model.attention_dropout=1e-9"), engine_run(*ONE, name="plain")
    number = torch.arange(8)
    torch.testing.assert_close(logits(nearly_none, number), logits(plain, number), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["hidden_dropout", "attention_dropout"])
def test_only_training_drops_and_every_sample_has_its_own_masks(engine_run: Callable[..., EngineRun], key: str) -> None:
    run, number = engine_run(*ONE, f"model.{key}=0.5"), torch.arange(8)
    training = logits(run, number)
    assert torch.equal(training, logits(run, number))
    other = logits(run, torch.tensor([0, 1, 2, 3, 4, 5, 6, 100]))
    assert torch.equal(training[:-1], other[:-1])
    assert not torch.allclose(training[-1], other[-1], atol=1e-3)
    torch.testing.assert_close(logits(run, number, training=False), logits(engine_run(*ONE, name="plain"), number))


class OfGpu(Tensor):
    is_cuda = True


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("columns", [1, 2, 131])
def test_a_gpu_drops_the_same_numbers_in_one_kernel(rate: float, columns: int) -> None:
    rows = rows_of(key_of(1, "x"), torch.arange(SAMPLES), torch.arange(TOKENS))
    x, onto = torch.randn(2, SAMPLES, TOKENS, columns)
    assert torch.equal(module.masked.plain(x, rate, rows), dropout(x, rate, rows))
    assert torch.equal(module.masked.plain(x, rate, rows, onto), onto + dropout(x, rate, rows))


def test_what_is_left_is_added_to_another_tensor_which_has_the_whole_gradient() -> None:
    rows = rows_of(key_of(1, "x"), torch.arange(SAMPLES), torch.arange(TOKENS))
    x, onto = (torch.randn(SAMPLES, TOKENS, HIDDEN, requires_grad=True) for _ in range(2))
    apart, gradient = x.detach().clone().requires_grad_(), torch.randn(SAMPLES, TOKENS, HIDDEN)
    added = dropout(x, 0.3, rows, onto)
    assert torch.equal(added, onto + dropout(apart, 0.3, rows))
    added.backward(gradient)
    dropout(apart, 0.3, rows).backward(gradient)
    assert x.grad is not None and apart.grad is not None and onto.grad is not None
    assert torch.equal(x.grad, apart.grad)
    assert torch.equal(onto.grad, gradient)


def test_a_gpu_for_which_nothing_can_be_compiled_works_out_a_hash_for_two_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a CPU does: what is to be one kernel works out one for each number."""
    monkeypatch.setattr(fused, "fuses", lambda device: False)
    of_gpu = torch.randn(1).as_subclass(OfGpu)
    assert of_gpu.is_cuda
    assert not module.masked.fuses(of_gpu)
    monkeypatch.setattr(fused, "fuses", lambda device: True)
    assert module.masked.fuses(of_gpu)


@pytest.mark.slow
def test_what_a_gpu_fuses_is_the_same_when_it_is_compiled() -> None:
    """By torch's compiler for the CPU."""
    places = torch.arange(SAMPLES), torch.arange(TOKENS)
    rows = rows_of(key_of(1, "x"), *places)
    x = torch.randn(SAMPLES, TOKENS, HIDDEN)
    of_rows, masked = (torch.compile(one.plain, fullgraph=True) for one in (module._rows, module.masked))
    assert torch.equal(of_rows(places[0], key_of(1, "x"), places[1]), rows)
    assert torch.equal(masked(x, 0.1, rows), dropout(x, 0.1, rows))
