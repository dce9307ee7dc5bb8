"""Weight gradients that wait: nothing of them before they are asked for, and then what autograd would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.contract.models.model import ModelConfig
from megatron_ext.engine.gradients.flat import FlatWeights
from megatron_ext.parallel.tensor_parallel import TensorGroup
from megatron_ext.tasks.language.transformer import TransformerLayer
from megatron_ext.tasks.linear import WeightGradients, embedding, linear
from megatron_ext.tasks.task import DTYPES

CONFIG = ModelConfig(layers=1, hidden=8, heads=2, sequence_length=5, vocab_size=7, padded_vocab_size=7)


def accumulate(weight: nn.Parameter, left: Tensor, right: Tensor) -> None:
    gradient = left @ right
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_split_backward_pass_gives_what_a_whole_one_gives(recompute: str) -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(CONFIG, TensorGroup(), CONFIG.stacks()[0], recompute, "layers.0", seed=0).double()
    for parameter in layer.parameters():  # a layer is made without values: the engine draws them
        nn.init.normal_(parameter)
    inputs = [torch.randn(2, 5, 8, dtype=torch.float64) for _ in range(3)]

    def gradients(later: WeightGradients | None) -> dict[str, Tensor]:
        layer.later = later
        layer.zero_grad()
        outputs = [layer(x) for x in inputs]
        for m, y in enumerate(outputs):
            if later is None:
                y.square().sum().backward()
                continue
            with later.defer(m):
                y.square().sum().backward()
        if later is not None:
            defer_weight_grads = {name for name, p in layer.named_parameters() if p.grad is None}
            assert defer_weight_grads == {f"{name}.weight" for name in ("qkv", "attention_out", "mlp_in", "mlp_out")}
            for m in (1, 0, 2):
                later.run(m)
        return {name: p.grad.clone() for name, p in layer.named_parameters()}

    expected = gradients(None)
    for name, gradient in gradients(WeightGradients(accumulate)).items():
        torch.testing.assert_close(gradient, expected[name])


def test_what_is_not_put_off_is_computed_at_once_and_autograd_counts_no_gradient_of_its_own() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    added: list[Tensor] = []
    later = WeightGradients(lambda _, left, right: added.append(left @ right))
    x = torch.arange(4.0).view(2, 2).requires_grad_()
    linear(x, weight, None, later).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(added, [torch.tensor([[2.0, 4.0]] * 3)])
    torch.testing.assert_close(x.grad, torch.full((2, 2), 3.0))


def test_weight_gradients_that_waited_leave_no_graph_behind() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3))
    total = torch.zeros(2, 3)
    later = WeightGradients(lambda _, left, right: total.addmm_(left, right))
    for key in range(3):
        x = torch.ones(4, 3, requires_grad=True)
        with later.defer(key):
            linear(x * 1.0, weight, None, later).sum().backward()
        later.run(key)
    assert torch.equal(total, torch.full((2, 3), 12.0))
    assert not total.requires_grad


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations made, but for views of others."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given]
        self.made += [x.shape for x in new]
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tables_gradient_is_added_in_the_rows_that_were_looked_up_and_is_autograds_to_the_last_bit(
    precision: str,
) -> None:
    dtype = DTYPES[precision]
    torch.manual_seed(0)
    whole = torch.randn(50, 3)
    batches = [torch.randint(20, (2, 40)) for _ in range(3)]  # rows come several times, and some never
    gradients = [torch.randn(2, 40, 3).to(dtype) for _ in batches]

    def total(later: bool) -> tuple[Tensor, int, list[torch.Size]]:
        table = nn.Parameter(whole.clone())
        flat = FlatWeights([("table", table)], dtype, torch.device("cpu"))
        told: list[str] = []
        flat.tell(told.append)
        where = WeightGradients(flat.add, flat.add_rows) if later else None
        with Shapes() as shapes:
            for rows, gradient in zip(batches, gradients, strict=True):
                y = embedding(rows, table, where)
                assert torch.equal(y, table[rows])
                y.backward(gradient)
        return flat.gradient(table), len(told), shapes.made

    expected, given, made = total(later=False)
    assert (50, 3) in made
    found, told, made = total(later=True)
    assert torch.equal(found, expected)
    assert found[:20].any() and not found[20:].any()
    assert told == given == 3
    assert (50, 3) not in made


def test_the_ranks_of_a_tensor_group_that_look_up_none_of_their_rows_have_a_gradient_of_zero() -> None:
    table = nn.Parameter(torch.randn(5, 3))
    flat = FlatWeights([("table", table)], torch.float32, torch.device("cpu"))
    later = WeightGradients(flat.add, flat.add_rows)
    elsewhere = torch.ones(1, 4, 1, dtype=torch.bool)
    embedding(torch.zeros(1, 4, dtype=torch.int64), table, later).masked_fill(elsewhere, 0.0).sum().backward()
    assert not flat.grad.any()


def test_a_table_that_is_only_read_has_no_graph() -> None:
    later = WeightGradients(lambda *_: None, lambda *_: None)
    with torch.no_grad():
        assert not embedding(torch.zeros(1, dtype=torch.int64), nn.Parameter(torch.ones(2, 2)), later).requires_grad
